"""The same figures as a prediction, read off a real GPU."""

from oomph.measurement.measure import measure
from oomph.measurement.oplog import OpRow, read_rows, record_ops, write_rows

__all__ = ["OpRow", "measure", "read_rows", "record_ops", "write_rows"]
