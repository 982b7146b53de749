"""Will it fit? If not, what uses the memory, and what is the cheapest way to make it fit?"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oomph import fixes as fixes, nn as nn, ops as ops
    from oomph.diagnosis import diagnose as diagnose
    from oomph.errors import (
        ArgumentError as ArgumentError,
        OomphError as OomphError,
        ProgramError as ProgramError,
        UserError as UserError,
    )
    from oomph.fixes import apply as apply, undo as undo
    from oomph.measurement import measure as measure
    from oomph.planning import fit as fit
    from oomph.prediction import Script as Script, predict as predict
    from oomph.records import (
        Change as Change,
        Diagnosis as Diagnosis,
        Difference as Difference,
        Finding as Finding,
        FixUse as FixUse,
        Measurement as Measurement,
        Plan as Plan,
        Prediction as Prediction,
        Proposal as Proposal,
        Verification as Verification,
    )
    from oomph.workload import MicroBatches as MicroBatches, Workload as Workload

__version__ = "0.1.0"


def _attach(
    package: str, homes: Mapping[str, Collection[str]], submodules: Collection[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """The `__getattr__`, `__dir__` and `__all__` of a package that imports its modules when they are used.

    `homes`: submodule -> the names it gives the package; `submodules`: those offered as they are.
    Type checkers do not look in here: the package imports the same names under TYPE_CHECKING.
    """
    home_of = {name: home for home, names in homes.items() for name in names}
    namespace = vars(sys.modules[package])

    def get(name: str) -> Any:
        if name in submodules:
            return import_module(f"{package}.{name}")  # which makes it an attribute of the package
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = namespace[name] = getattr(import_module(f"{package}.{home_of[name]}"), name)
        return value

    def list_names() -> list[str]:
        return sorted({*namespace, *home_of, *submodules})

    return get, list_names, sorted({*home_of, *submodules})


# Imported when first asked for, so that commands which need no torch do not wait for it.
__getattr__, __dir__, __all__ = _attach(
    __name__,
    {
        "diagnosis": ("diagnose",),
        "errors": ("ArgumentError", "OomphError", "ProgramError", "UserError"),
        "fixes": ("apply", "undo"),
        "measurement": ("measure",),
        "planning": ("fit",),
        "prediction": ("Script", "predict"),
        "records": (
            "Change",
            "Diagnosis",
            "Difference",
            "Finding",
            "FixUse",
            "Measurement",
            "Plan",
            "Prediction",
            "Proposal",
            "Verification",
        ),
        "workload": ("MicroBatches", "Workload"),
    },
    submodules=("fixes", "nn", "ops"),
)

if "IPython" in sys.modules:  # a notebook shows records as HTML
    import_module("oomph.integrations.jupyter").register()
