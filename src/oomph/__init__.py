"""Will it fit? If not, what uses the memory, and what is the cheapest way to make it fit?"""

from typing import TYPE_CHECKING

from oomph.lazy import attach

if TYPE_CHECKING:
    from oomph import fixes, nn, ops
    from oomph.diagnosis import diagnose
    from oomph.errors import ArgumentError, OomphError, ProgramError, UserError
    from oomph.fixes import apply
    from oomph.measurement import measure
    from oomph.planning import fit
    from oomph.prediction import Script, predict
    from oomph.records import (
        Change,
        Diagnosis,
        Difference,
        Finding,
        FixUse,
        Measurement,
        Plan,
        Prediction,
        Proposal,
        Verification,
    )
    from oomph.workload import MicroBatches, Workload

__version__ = "0.1.0"
__all__ = [
    "ArgumentError",
    "Change",
    "Diagnosis",
    "Difference",
    "Finding",
    "FixUse",
    "Measurement",
    "MicroBatches",
    "OomphError",
    "Plan",
    "Prediction",
    "ProgramError",
    "Proposal",
    "Script",
    "UserError",
    "Verification",
    "Workload",
    "apply",
    "diagnose",
    "fit",
    "fixes",
    "measure",
    "nn",
    "ops",
    "predict",
]

# Imported when first asked for, so that commands which need no torch do not wait for it.
__getattr__, __dir__ = attach(
    __name__,
    {
        "diagnosis": ("diagnose",),
        "errors": ("ArgumentError", "OomphError", "ProgramError", "UserError"),
        "fixes": ("apply",),
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
