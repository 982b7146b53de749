"""Runs the code cells of a notebook in this process, with what they use of IPython.

In a prediction other programs are not started: commands that were not run are named. On a real GPU,
`oomph run` runs the same cells and their commands as Jupyter does.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any

from oomph import notebooks
from oomph.errors import UserError
from oomph.prediction.compat import ipython
from oomph.prediction.isolation import Refused, is_isolated

LeftOut = Callable[[str, str], None]  # what was left out, and how it can be predicted or run; "" if no matter
_SHOWN = 60  # characters of a command
_ALLOW = "--allow-subprocesses runs it"
# Cells that are other programs. Those of all other magics are left out as well.
_PROGRAMS = {"bash", "sh", "script", "!", "sx", "system", "python", "python3", "perl", "ruby"}


def run_notebook(path: str, left_out: LeftOut) -> dict[str, Any]:
    """All of its cells, in its folder. What it defines."""
    main = ModuleType("__main__")
    shell, cells = _Shell(vars(main), left_out), notebooks.load(path)
    ipython.stand_in()
    with _as_main(main), contextlib.chdir(Path(path).resolve().parent):
        shell.run_cells(cells)
    return shell.user_ns


def say_left_out(what: str, how: str) -> None:
    print(f"oomph: not run: {what}{how and f'; {how}'}", file=sys.stderr)


@contextlib.contextmanager
def _as_main(module: ModuleType) -> Iterator[None]:
    before = sys.modules["__main__"]
    sys.modules["__main__"] = module
    try:
        yield
    finally:
        sys.modules["__main__"] = before


class _Shell:
    """What get_ipython() returns."""

    def __init__(self, namespace: dict[str, Any], left_out: LeftOut) -> None:
        self.user_ns, self._left_out = namespace, left_out
        self.config: dict[str, Any] = {}
        self._number = 0  # of the cell
        namespace.update(get_ipython=lambda: self, display=display, Out={}, exit=sys.exit, quit=sys.exit)

    def run_cells(self, cells: list[notebooks.Cell]) -> None:
        for cell in cells:
            self._number = cell.number
            self._run(cell)

    def _run(self, cell: notebooks.Cell) -> None:
        body = notebooks.parse(cell.code, cell.name).body
        last = body[-1] if body and not cell.code.rstrip().endswith(";") else None
        shown = body.pop() if isinstance(last, ast.Expr) else None
        self._execute(ast.Module(body, []), cell.name, "exec")
        if not isinstance(shown, ast.Expr):
            return
        value = self._execute(ast.Expression(shown.value), cell.name, "eval")
        if value is not None:
            # Jupyter keeps the values of cells, too: tensors on the GPU stay there.
            self.user_ns["Out"][cell.number] = self.user_ns["_"] = value
            display(value)

    def _execute(self, tree: ast.Module | ast.Expression, name: str, mode: str) -> Any:
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        code: CodeType = compile(tree, name, mode, flags, dont_inherit=True)
        result = eval(code, self.user_ns)
        return asyncio.run(result) if code.co_flags & inspect.CO_COROUTINE else result

    # Magics -------------------------------------------------------------------------------------------

    def run_line_magic(self, name: str, line: str, *_: Any) -> Any:
        arguments = self._expanded(line)
        if name in ("pip", "conda", "mamba"):
            return self.system(f"{name} {arguments}")
        if name in ("system", "sx", "sc"):
            return self.getoutput(arguments)
        if name in ("ls", "cat", "cp", "mv", "rm", "rmdir", "mkdir"):
            return self.system(f"{name} {arguments}")
        known = getattr(self, f"_magic_{name}", None)
        if known is not None:
            return known(arguments)
        return self._leave_out(f"%{name} {arguments}")

    def run_cell_magic(self, name: str, line: str, cell: str) -> Any:
        if name in ("writefile", "file"):
            *options, file = shlex.split(self._expanded(line))
            with open(os.path.expanduser(file), "a" if "-a" in options else "w") as written:
                written.write(cell)
            return None
        if name in _PROGRAMS:
            interpreter = shlex.split(line) if name == "script" else [name if name.isalnum() else "sh"]
            return self._start(interpreter, f"%%{name}", self._expanded(cell), input=cell)
        return self._leave_out(f"%%{name} {line}")

    def magic(self, line: str) -> Any:
        name, _, arguments = line.partition(" ")
        return self.run_line_magic(name.lstrip("%"), arguments)

    def _magic_cd(self, folder: str) -> None:
        os.chdir(os.path.expanduser(folder.strip("'\"") or "~"))

    def _magic_pwd(self, _: str) -> str:
        return os.getcwd()

    def _magic_env(self, setting: str) -> Any:
        match = re.match(r"(\w+)(?:\s*=\s*|\s+)(.*)", setting)
        if match is None:
            return os.environ[setting] if setting else dict(os.environ)
        os.environ[match[1]] = match[2].strip()
        return None

    _magic_set_env = _magic_env

    def _magic_run(self, line: str) -> None:
        words, options = shlex.split(line), list[str]()
        while words and words[0] in ("-i", "-n", "-e", "-t", "-m"):
            options.append(words.pop(0))
        if not words:
            raise UserError("%run is given no file; give one, as %run helper.py")
        module = "-m" in options
        path, *arguments = words
        path = path if module else os.path.expanduser(path)
        if notebooks.is_notebook(path):
            number = self._number
            self.run_cells(notebooks.load(path))
            self._number = number
            return
        path = path if module or path.endswith(".py") or os.path.exists(path) else f"{path}.py"
        own = self.user_ns if "-i" in options else None
        before = sys.argv
        sys.argv = [path, *arguments]
        try:
            run: Any = runpy.run_module if module else runpy.run_path
            made = run(path, init_globals=own, run_name="__main__")
        except SystemExit as end:  # which ends the file alone
            if end.code:
                raise
            made = {}
        finally:
            sys.argv = before
        self.user_ns.update({name: value for name, value in made.items() if not name.startswith("__")})

    def _magic_reset(self, _: str) -> None:
        kept = ("get_ipython", "display", "Out", "exit", "quit")
        for name in [name for name in self.user_ns if not name.startswith("__") and name not in kept]:
            del self.user_ns[name]
        self.user_ns["Out"].clear()

    def _magic_xdel(self, name: str) -> None:
        self.user_ns.pop(name, None)

    def _magic_capture(self, line: str) -> None:
        """The first line of a cell, whose output is shown nevertheless."""
        for name in (word for word in line.split() if not word.startswith("-")):
            nothing = SimpleNamespace(stdout="", stderr="", outputs=[], show=lambda: None)
            self.user_ns[name] = nothing

    def _leave_out(self, what: str, how: str = "") -> None:
        words = " ".join(what.split())
        shown = words if len(words) <= _SHOWN else f"{words[: _SHOWN - 3]}..."
        self._left_out(f"{shown} (cell {self._number})", how)

    def _expanded(self, text: str) -> str:
        """With values of the notebook for `{name}` and `$name`."""

        def value(match: re.Match[str]) -> str:
            try:
                return str(eval(match[1], self.user_ns) if match[1] else self.user_ns[match[2]])
            except Exception:  # it is the shell's
                return match[0]

        return re.sub(r"\{([^{}]+)\}|\$([A-Za-z_]\w*)", value, text)

    # Commands -----------------------------------------------------------------------------------------

    def system(self, command: str) -> None:
        command = self._expanded(command)
        words = command.split()
        plain = not set(command) & set("|&;<>`$*?{}'\"\\")
        if words[:1] == ["mkdir"] and plain:  # a folder that later cells write to
            for folder in (word for word in words[1:] if not word.startswith("-")):
                os.makedirs(os.path.expanduser(folder), exist_ok=True)
            return
        self._start(command, f"!{command}", command, shell=True)

    def getoutput(self, command: str) -> list[str]:
        command = self._expanded(command)
        started = self._start(command, f"!{command}", command, shell=True, stdout=subprocess.PIPE)
        return [] if started is None else started.stdout.splitlines()

    def _start(self, words: Any, shown: str, command: str, **options: Any) -> Any:
        """`command`: the text in which a training program is looked for."""
        try:
            started = subprocess.run(words, text=True, check=False, **options)
        except PermissionError as error:
            if not isinstance(error, Refused) and not is_isolated():
                raise
            training = notebooks.training_command(command)
            how = f"a program of its own: `{training}`" if training else _ALLOW
            return self._leave_out(shown, how)
        self.user_ns["_exit_code"] = started.returncode
        return started


def display(*values: Any, **options: Any) -> None:
    """As text. What cannot be shown is not: Jupyter does not fail there either."""
    for value in values:
        with contextlib.suppress(Exception):
            print(value if isinstance(value, str) else repr(value))
