"""Will it fit? If not, what is eating the memory, and what is the cheapest way to make it fit?"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oomph import nn, ops
    from oomph.errors import ArgumentError, OomphError, ProgramError, UserError
    from oomph.measurement import measure
    from oomph.prediction import predict
    from oomph.records import Measurement, Prediction
    from oomph.workload import Workload

__version__ = "0.1.0"
__all__ = [
    "ArgumentError",
    "Measurement",
    "OomphError",
    "Prediction",
    "ProgramError",
    "UserError",
    "Workload",
    "measure",
    "nn",
    "ops",
    "predict",
]

# Imported when first asked for, so that commands which need no torch do not wait for it.
_HOMES = {
    "ArgumentError": "errors",
    "OomphError": "errors",
    "ProgramError": "errors",
    "UserError": "errors",
    "Measurement": "records",
    "Prediction": "records",
    "Workload": "workload",
    "measure": "measurement",
    "predict": "prediction",
}
_ROOMS = ("nn", "ops")


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"oomph.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'oomph' has no attribute {name!r}")
    value = getattr(import_module(f"oomph.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
