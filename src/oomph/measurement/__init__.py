"""The same figures as a prediction, read off a real GPU."""

from oomph.measurement.measure import measure
from oomph.measurement.oplog import record_ops
from oomph.records import OpRow

__all__ = ["OpRow", "measure", "record_ops"]
