"""tokenizers: native code writes and reads tokenizer.json."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from oomph.prediction.compat.library import Library
from oomph.prediction.patches import Patches

if TYPE_CHECKING:
    from oomph.prediction.tracer.tracer import Tracer


def _use_python_files(patches: Patches, tracer: Tracer) -> None:
    from tokenizers import Tokenizer

    def save(tokenizer: Any, path: Any, pretty: bool = True) -> None:
        with open(path, "w", encoding="utf-8") as file:
            file.write(tokenizer.to_str(pretty=pretty))

    def from_file(path: Any) -> Any:
        with open(path, encoding="utf-8") as file:
            return Tokenizer.from_str(file.read())

    patches.set(Tokenizer, "save", save)
    patches.set(Tokenizer, "from_file", staticmethod(from_file))


LIBRARY = Library("tokenizers", "tokenizers", in_trace=_use_python_files)
