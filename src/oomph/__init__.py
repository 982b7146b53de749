"""Will it fit? If not, what uses the memory, and what is the cheapest way to make it fit?"""

from __future__ import annotations

import sys
from importlib import import_module

TYPE_CHECKING = False  # typing takes a while, in which Ctrl-C is not handled yet (cli/interrupts.py)
if TYPE_CHECKING:
    from typing import Any

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
    from oomph.models import finetune as finetune
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


# Imported when first asked for, so that commands which need no torch do not wait for it.
_MODULES = {
    **dict.fromkeys(("fixes", "nn", "ops"), ""),
    "diagnose": "diagnosis",
    **dict.fromkeys(("ArgumentError", "OomphError", "ProgramError", "UserError"), "errors"),
    **dict.fromkeys(("apply", "undo"), "fixes"),
    "measure": "measurement",
    "finetune": "models",
    "fit": "planning",
    **dict.fromkeys(("Script", "predict"), "prediction"),
    **dict.fromkeys(("Change", "Diagnosis", "Difference", "Finding", "FixUse", "Measurement"), "records"),
    **dict.fromkeys(("Plan", "Prediction", "Proposal", "Verification"), "records"),
    **dict.fromkeys(("MicroBatches", "Workload"), "workload"),
}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{_MODULES[name] or name}")
    value = globals()[name] = getattr(module, name) if _MODULES[name] else module
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if "IPython" in sys.modules:  # a notebook shows records as HTML
    import_module("oomph.integrations.jupyter").register()
