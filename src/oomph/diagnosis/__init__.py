"""Names the causes of a predicted peak."""

from oomph.diagnosis.api import diagnose

__all__ = ["diagnose"]
