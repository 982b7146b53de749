"""The five reference systems: `model.py` is the implementation to use, `naive.py` the one from the report."""

from oomph_lab.systems.registry import FORMS, SYSTEMS, System, find_system

__all__ = ["FORMS", "SYSTEMS", "System", "find_system"]
