"""nvidia-smi: a machine with a GPU has it. Where it is missing, it prints nothing."""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Collection
from typing import Any

from oomph.prediction.compat.library import Library

_OPTIONS = ("-L", "-q", "--query", "--format", "-i", "--id")


def _is_query(words: tuple[str, ...]) -> bool:
    return words[:1] == ("nvidia-smi",) and all(
        word.startswith(_OPTIONS) or word.isdigit() for word in words[1:]
    )


def _print_nothing(allow: Collection[str]) -> None:
    if shutil.which("nvidia-smi") is not None:
        return
    begin = subprocess.Popen.__init__

    @functools.wraps(begin)
    def begin_other(self: Any, *args: Any, **kwargs: Any) -> None:
        command = args[0] if args else kwargs.get("args")
        name = command[0] if isinstance(command, (list, tuple)) and command else command
        if name == "nvidia-smi" and len(args) <= 2 and not kwargs.get("shell"):
            kwargs["executable"] = "true"
        begin(self, *args, **kwargs)

    subprocess.Popen.__init__ = begin_other  # type: ignore[method-assign]


LIBRARY = Library("nvidia-smi", None, in_process=_print_nothing, is_query=_is_query)
