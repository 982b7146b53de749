"""A launch line while it is followed, and what it is in the end: one program and its surroundings."""

from __future__ import annotations

import difflib
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from oomph.errors import UserError

# Launchers with an option -m that leave what follows it as it is.
_RUN_MODULES = {"torchrun", "torch.distributed.run", "accelerate", "accelerate-launch"}


@dataclass(frozen=True, slots=True)
class Launch:
    """The program of a launch line: a file, a console script, or with `module` a module."""

    words: tuple[str, ...]  # as typed
    program: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    torchrun: bool = False  # with the environment of one of `ranks`
    ranks: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)  # what the line adds
    notes: tuple[str, ...] = ()
    every_gpu: str = ""  # the launcher that would start a rank for each GPU, since it is not told how many

    @property
    def typed(self) -> str:
        return shlex.join(self.words)

    def with_oomph_run(self, *options: str) -> str:
        """The line with `oomph run` before its program; "" where it does not name that, or where its launcher
        may not run `-m oomph`."""
        at = self.words.index(self.program) if self.program in self.words else 0
        if not _RUN_MODULES & {os.path.basename(word) for word in self.words[:at]}:
            return ""
        launcher, program = self.words[: at - self.module], self.words[at:]
        run = ("-m", "oomph", "run", *options, *(["-m"] if self.module else []))
        return shlex.join((*launcher, *run, *program))


@dataclass(slots=True)
class Line:
    """What has been read of it, from the left."""

    words: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    torchrun: bool = False
    ranks: int = 1
    notes: list[str] = field(default_factory=list)
    every_gpu: str = ""
    program: str = ""  # with it, the line has been followed to its end
    module: bool = False
    arguments: tuple[str, ...] = ()

    def variable(self, name: str) -> str | None:
        return self.environment.get(name, os.environ.get(name))

    def runs(self, program: str, arguments: Sequence[str], module: bool = False) -> None:
        self.program, self.arguments, self.module = program, tuple(arguments), module

    def launch(self) -> Launch:
        return Launch(
            self.words,
            self.program,
            self.arguments,
            self.module,
            self.torchrun,
            self.ranks,
            dict(self.environment),
            tuple(self.notes),
            self.every_gpu,
        )


class Options:
    """A launcher's own options, as `--name`, or `--name=` where a value follows.

    `-` and `_` are the same in names, and the beginning of a name stands for it, as argparse has it.
    """

    def __init__(self, *names: str) -> None:
        words = [word for name in names for word in name.split()]
        self._values = {_plain(word): word.endswith("=") for word in words}

    def split(self, launcher: str, words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
        """Those given, and the words from the program on. A flag's value is ""."""
        given, rest = dict[str, str](), list(words)
        while rest and rest[0].startswith("-") and rest[0] != "-":
            word = rest.pop(0)
            if word == "--":
                break
            name, value = self._take(launcher, word, rest)
            given[name] = value
        if not rest:
            raise UserError(f"{launcher} is given no program; give the whole line, as {launcher} train.py")
        return given, rest

    def _take(self, launcher: str, word: str, rest: list[str]) -> tuple[str, str]:
        typed, equals, value = word.partition("=")
        name = self._find(launcher, typed)
        if not self._values[name]:
            return name, ""
        if not equals:
            if not rest:
                raise UserError(f"{launcher}: {typed} needs a value")
            value = rest.pop(0)
        return name, value

    def _find(self, launcher: str, typed: str) -> str:
        name = _plain(typed)
        if name in self._values:
            return name
        begun = [each for each in self._values if each.startswith(name)] if name.startswith("--") else []
        if len(begun) == 1:
            return begun[0]
        close = difflib.get_close_matches(name, self._values, n=1, cutoff=0.7)
        nearest = f"the nearest is {close[0]}; " if close else ""
        raise UserError(
            f"{launcher} has no option {typed}; {nearest}options of oomph come before {launcher}, those of "
            "the script after it"
        )


def _plain(word: str) -> str:
    """`--nproc_per_node=` as `--nproc-per-node`"""
    return word.rstrip("=").replace("_", "-")


NO_OPTIONS = Options()


def number(launcher: str, option: str, value: str) -> int:
    if not value.isdigit() or int(value) < 1:
        raise UserError(f"{launcher}: {option} {value!r} is not valid; give a positive number")
    return int(value)


def refuse(launcher: str, why: str, instead: Sequence[str] = (), ranks: int | None = None) -> NoReturn:
    """One line that says what to give instead: `instead` as a line of its own."""
    options = ("--ranks", str(ranks)) if ranks is not None and ranks > 1 else ()
    give = f"`{shlex.join(('oomph', 'predict', *options, '--', *instead))}`" if instead else "the line itself"
    raise UserError(f"{launcher} {why}; give {give}")
