"""mpi4py: MPI starts processes when it is imported."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Collection
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

from oomph.prediction.compat.library import Library


def _replace(allow: Collection[str]) -> None:
    """The communicator of one process returns what it is given."""
    if "mpi4py" in sys.modules or importlib.util.find_spec("mpi4py") is None:
        return
    package, mpi = ModuleType("mpi4py"), ModuleType("mpi4py.MPI")
    for module in (package, mpi):
        module.__spec__ = ModuleSpec(module.__name__, None)
        sys.modules[module.__name__] = module
    returned = dict.fromkeys(("bcast", "reduce", "allreduce"), lambda value, *args, **kwargs: value)
    listed = dict.fromkeys(("gather", "allgather"), lambda value, *args, **kwargs: [value])
    waits = dict.fromkeys(("barrier", "Barrier", "Bcast"), lambda *args, **kwargs: None)
    world = SimpleNamespace(
        rank=0, size=1, Get_rank=lambda: 0, Get_size=lambda: 1, **returned, **listed, **waits
    )
    vars(package).update(MPI=mpi, rc=SimpleNamespace())
    vars(mpi).update(COMM_WORLD=world, SUM=None, MAX=None, MIN=None)


LIBRARY = Library("mpi4py", "mpi4py", in_process=_replace)
