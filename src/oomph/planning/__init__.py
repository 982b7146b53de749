"""Planning: the cheapest set of fixes with which a training step fits."""

from oomph.planning.largest import RankTrial, ranks_needed
from oomph.planning.plan import read_plan, write_plan
from oomph.planning.search import fit

__all__ = ["RankTrial", "fit", "ranks_needed", "read_plan", "write_plan"]
