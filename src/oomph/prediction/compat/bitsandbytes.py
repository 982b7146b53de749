"""bitsandbytes: paged optimizers keep their state in unified memory, which its CUDA library maps."""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oomph.errors import UserError
from oomph.prediction.compat.library import Library
from oomph.prediction.patches import Patches

if TYPE_CHECKING:
    from oomph.prediction.tracer.tracer import Tracer


def _map_paged_states(patches: Patches, tracer: Tracer) -> None:
    """The other functions of its library do nothing, as those of any CUDA library."""
    mapped: list[Any] = []
    load = ctypes.LibraryLoader.LoadLibrary

    def cget_managed_ptr(size: Any) -> int:
        """The host takes a page once it is written."""
        tracer.note_once(
            "paged optimizer states are in unified memory, outside of torch's allocator: none of it is "
            "counted"
        )
        mapped.append(mmap.mmap(-1, size.value))
        return ctypes.addressof(ctypes.c_char.from_buffer(mapped[-1]))

    def load_library(loader: Any, name: Any) -> Any:
        library = load(loader, name)
        if "bitsandbytes_cuda" in Path(str(name)).name:
            library.cget_managed_ptr = cget_managed_ptr
        return library

    patches.set(ctypes.LibraryLoader, "LoadLibrary", load_library)
    loaded = sys.modules.get("bitsandbytes.cextension")
    if loaded is None or getattr(loaded.lib, "compiled_with_cuda", True):
        return

    def __getattr__(lib: Any, name: str) -> Any:
        """It has no function for CUDA, and bitsandbytes has registered no kernel for it."""
        found = getattr(lib._lib, name, None)
        if found is None:
            raise UserError(
                "bitsandbytes was imported before the prediction, where there is no GPU; predict in a "
                "process that has not imported it, such as the command line"
            )
        return found

    patches.set(type(loaded.lib), "__getattr__", __getattr__)


LIBRARY = Library("bitsandbytes", None, in_trace=_map_paged_states)  # loaded when it is imported
