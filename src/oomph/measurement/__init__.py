"""The same figures as a prediction, read off a real GPU."""

from oomph.measurement.measure import measure
from oomph.measurement.oplog import OpRow, record_ops

__all__ = ["OpRow", "measure", "record_ops"]
