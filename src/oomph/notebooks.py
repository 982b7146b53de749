"""Notebooks as Python: their code cells in order, as "Restart & Run All" runs them.

A cell has the file name `exp.ipynb cell 3`, with the number that Jupyter gives it in such a run; its lines
keep their numbers. Magics and `!` commands become calls of get_ipython(), which prediction/notebook.py makes.
"""

from __future__ import annotations

import ast
import json
import linecache
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oomph import launch
from oomph.errors import UserError

SUFFIX = ".ipynb"
_FLAGS = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
# Magics that time or profile a statement, or the rest of a cell: what they measure runs once.
_MEASURING = {"time", "timeit", "prun", "memit", "mprun", "lprun", "snakeviz", "wandb", "memray_flamegraph"}
_OPTIONS = re.compile(r"(-[nrp]\s*\d+\s+|-[fmsTDl]\s*\S+\s+|-\w\s+)*")  # of those
_WITHOUT_SIGN = {"pip", "conda", "mamba", "cd", "ls", "mkdir", "cat", "cp", "mv", "rm", "rmdir", "env"}
_HELP = re.compile(r"\s*(\?{1,2}[\w.*%]+|[\w.*%]+\?{1,2})\s*$")
_ASSIGNED = r"(?P<before>\s*(?:[\w.\[\]'\", ]+=(?!=)\s*)?)"
_CALL = re.compile(_ASSIGNED + r"(?P<sign>!!?|%(?=[A-Za-z_]))\s*(?P<rest>\S.*)$")


@dataclass(frozen=True, slots=True)
class Cell:
    """A code cell that is not empty."""

    name: str  # `exp.ipynb cell 3`, the file name of its lines
    number: int
    code: str  # Python
    typed: str


def is_notebook(path: str | os.PathLike[str]) -> bool:
    return os.fspath(path).endswith(SUFFIX)


def load(path: str) -> list[Cell]:
    """The code cells. Their lines are known to linecache from now on, for tracebacks and reports."""
    cells: list[Cell] = []
    for source in _sources(path):
        number = len(cells) + 1
        cell = Cell(f"{path} cell {number}", number, _as_python(source), source)
        lines = [f"{line}\n" for line in cell.code.split("\n")]
        linecache.cache[cell.name] = (len(cell.code), None, lines, cell.name)
        cells.append(cell)
    if not cells:
        raise UserError(f"notebook {path!r} has no code cells")
    return cells


def _sources(path: str) -> list[str]:
    try:
        found: Any = json.loads(Path(path).read_text(encoding="utf-8"))
        cells = [cell for cell in found["cells"] if cell["cell_type"] == "code"]
        sources = ["".join(cell["source"]) for cell in cells]  # a string, or one for each line
        about = found.get("metadata", {})
        language = about.get("language_info", {}).get("name") or about.get("kernelspec", {}).get("language")
    except OSError as error:
        raise UserError(f"file {path!r} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"file {path!r} is not a notebook of format 4 (`jupyter nbconvert --to notebook` writes one)"
        ) from error
    if language is not None and "python" not in str(language).lower():
        raise UserError(f"notebook {path!r} is written in {language}; give one in Python")
    return [source for source in sources if source.strip()]


def parse(code: str, name: str) -> ast.Module:
    """Of a cell, in which `await` may stand outside of functions."""
    tree: ast.Module = compile(code, name, "exec", _FLAGS, dont_inherit=True)
    return tree


def _as_python(source: str) -> str:
    """Line for line. A cell that is not Python stays as it is, and fails where it runs."""
    lines = source.split("\n")
    first = next(index for index, line in enumerate(lines) if line.strip())
    if match := re.match(r"%%\s*(!|\w+)[ \t]*(.*)", lines[first]):
        name, arguments = match[1], match[2].strip()
        if name not in _MEASURING and name != "capture":
            body = "\n".join(lines[first + 1 :])
            call = f"get_ipython().run_cell_magic({name!r}, {arguments!r}, {body!r})"
            return "\n".join([*lines[:first], call])
        lines[first] = f"# {lines[first]}" if name in _MEASURING else _line_magic(name, arguments)
    while True:
        try:
            parse("\n".join(lines), "")
        except (SyntaxError, ValueError) as error:
            # The parser may stop at a later line, at a bracket or a quote that a command leaves open.
            stopped = (getattr(error, "lineno", None) or 0) - 1
            signed = (index for index, line in enumerate(lines) if re.match(r"\s*[!%]\s*\w", line))
            candidates = [*([stopped] if 0 <= stopped < len(lines) else []), *signed]
            if not any(_translate(lines, index) for index in candidates):
                return "\n".join(lines)
        else:
            return "\n".join(lines)


def _translate(lines: list[str], index: int) -> bool:
    """Make a line Python; False if it is no magic and no command."""
    last = index
    while lines[last].endswith("\\") and last + 1 < len(lines):
        last += 1
    line = "".join(each.removesuffix("\\") for each in lines[index : last + 1])
    indent = line[: len(line) - len(line.lstrip())]
    words = line.split()
    if _HELP.match(line):
        new = f"{indent}pass"
    elif match := _CALL.match(line):
        new = match["before"] + _called(match["sign"], match["rest"], assigned="=" in match["before"])
    elif words and words[0] in _WITHOUT_SIGN:
        new = indent + _called("%", line.strip(), assigned=False)
    else:
        return False
    lines[index : last + 1] = [new, *[""] * (last - index)]
    return True


def _called(sign: str, rest: str, assigned: bool) -> str:
    if sign != "%":
        return f"get_ipython().{'getoutput' if assigned or sign == '!!' else 'system'}({rest.strip()!r})"
    name, _, arguments = rest.partition(" ")
    if name in _MEASURING:
        return arguments.strip()[len((_OPTIONS.match(arguments.strip() + " ") or [""])[0]) :] or "pass"
    return _line_magic(name, arguments.strip())


def _line_magic(name: str, arguments: str) -> str:
    return f"get_ipython().run_line_magic({name!r}, {arguments!r})"


def training_command(command: str) -> str | None:
    """`oomph predict ...` for a shell's command that starts a Python program of the user's."""
    found = next(filter(launch.starts_program, launch.commands(command)), None)
    return shlex.join(["oomph", "predict", "--", *found]) if found else None
