"""The names a source may have, and which of them is text."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from oomph.errors import UserError
from oomph.training.data.sources import hub
from oomph.training.data.sources.corpus import Corpus
from oomph.training.data.sources.files import open_path, open_stdlib

TEXT_NAMES = ("stdlib", *hub.TEXTS)
IMAGE_NAMES = ("photographs", *hub.IMAGES)


def open_text(source: str, field: str = "text") -> Corpus:
    """The corpus of a name or a path. A name wins over a file of the same name: write ./name for the file."""
    if source == "stdlib":
        return open_stdlib()
    if source in hub.TEXTS:
        return hub.open_hub_text(source)
    if source in IMAGE_NAMES:
        raise UserError(f"{source} has images, not text; choose from {', '.join(TEXT_NAMES)} or a path")
    if _is_name(source):
        close = difflib.get_close_matches(source, TEXT_NAMES, n=1)
        nearest = f" (nearest name: {close[0]})" if close else ""
        raise UserError(
            f"there is no data source {source!r}{nearest}; choose from {', '.join(TEXT_NAMES)} or a path"
        )
    return open_path(source, field)


def _is_name(source: str) -> bool:
    """A bare word that is no file was meant as a name; anything with a separator or a suffix, as a path."""
    if not source or os.sep in source or "." in source or any(sign in source for sign in "*?[~"):
        return source == ""
    return not Path(source).exists()
