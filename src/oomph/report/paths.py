"""File names short enough to read: relative to the current directory, or without an installation's prefix."""

from __future__ import annotations

from pathlib import Path

from oomph.records import Site

_INSTALLED = ("site-packages", "dist-packages")


def short_path(file: str, base: Path | None = None) -> str:
    """`file` relative to `base` (the current directory) when below it, otherwise its telling end."""
    if file.startswith("<"):  # "<stdin>", "<string>": not a file at all
        return file
    path = Path(file)
    # An environment often lives below the current directory, so this comes first.
    for marker in _INSTALLED:
        if marker in path.parts:
            last = len(path.parts) - 1 - path.parts[::-1].index(marker)
            return Path(*path.parts[last + 1 :]).as_posix()
    if not path.is_absolute():
        return path.as_posix()
    base = base or Path.cwd()
    if path.is_relative_to(base):
        return path.relative_to(base).as_posix()
    if len(path.parts) <= 4:
        return path.as_posix()
    return ".../" + Path(*path.parts[-3:]).as_posix()


def place(site: Site, base: Path | None = None) -> str:
    """`loss.py:41`"""
    return f"{short_path(site.file, base)}:{site.line}"
