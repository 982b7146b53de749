"""pyarrow maps files with native code, also those that datasets.load_dataset wrote in Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from oomph.prediction.compat.library import Library
from oomph.prediction.patches import Patches

if TYPE_CHECKING:
    from oomph.prediction.tracer.tracer import Tracer


def _map_written_files(patches: Patches, tracer: Tracer) -> None:
    import pyarrow

    map_real = pyarrow.memory_map

    def map_written(path: Any, mode: str = "r") -> Any:
        with open(path, "rb" if mode == "r" else "r+b") as file:
            return map_real(f"/dev/fd/{file.fileno()}", mode)

    patches.set(pyarrow, "memory_map", map_written)


LIBRARY = Library("pyarrow", "pyarrow", in_trace=_map_written_files)
