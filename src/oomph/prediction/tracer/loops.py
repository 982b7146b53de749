"""Loops whose end depends on a guess.

A trace answers `while tensor:` and `if tensor: break` by a guess, which may be the same forever, or end a
loop at once that takes rounds with real values. Loops that ask too often are left. A number that the program
reads and compares to end a loop, such as the error of a solver, halves after a few rounds. Where each round
keeps memory, as with an adaptive ODE solver, and the guess allows only a few, their number is assumed.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import linecache
import math
import sys
from collections.abc import Callable, Collection, Iterator
from types import FrameType
from typing import Any, NamedTuple

from oomph.records import Note, Site

_ROUNDS = {"fewest": 1, "typical": 4, "most": 12}  # of a loop that keeps memory and that a guess ends earlier
_MOST_ASKED = 100  # times that a loop asks the same before it gets the other answer
_MOST_ASKED_BY_CALLS = 1000  # by `if condition: return` outside a loop, which every layer of a model may ask
_MOST_HALVED = 40  # times that a number is halved that a loop waits for
_MOST_ASKED_ANYWHERE = 10_000  # of a line that does not look like the end of a loop


class Answered(NamedTuple):
    """`value` is the guess, or its opposite where the loop is `prolonged`. `cut`: the program gets the other
    answer, once. `rounds`: how often in a row the line got the value. `halved`: it is a part of the guess."""

    value: Any
    rounds: int
    prolonged: bool
    cut: bool
    halved: bool


class _Asked(NamedTuple):
    """The last answer of a line, how often in a row, and the bytes allocated then, in one execution of the
    loop's function: the next execution starts its loop again. `left_at`: where in the bytecode the answer was
    given that ends the loop. Conditions behind it get it too, as b in `if a and b: break`."""

    answer: Any = None
    repeated: int = 0
    allocated: int = 0
    execution: object = None
    left_at: float = math.inf


class Loops:
    """`sizes`: "fewest", "typical" or "most" rounds. `as_guessed`: files and lines of loops that are not
    prolonged. `allocated`: bytes, now. `kept_memory`: a loop was cut that kept memory in its rounds."""

    def __init__(
        self, sizes: str, as_guessed: Collection[tuple[str, int]], allocated: Callable[[], int]
    ) -> None:
        self._sizes, self._as_guessed, self._allocated = sizes, as_guessed, allocated
        self._asked: dict[tuple[str, int], _Asked] = {}
        self._short: set[tuple[str, int]] = set()  # loops that a guess ends after few rounds
        self.cut: list[Note] = []
        self.kept_memory = False

    def answer(self, site: Site, value: Any) -> Answered:
        """The program reads a guess at this line."""
        end = _loop_ends(site.file).get(site.line)
        before = self._last(site)
        frame = _frame(site)
        place = math.inf if frame is None else frame.f_lasti
        if before.left_at < place and end is not None and end.goes_on is not None:
            self._asked[site.file, site.line] = before._replace(left_at=place)
            return Answered(not end.goes_on, 1, False, False, False)
        grew = self._allocated() > before.allocated
        ends = end is not None and end.goes_on is not None and value is (not end.goes_on)
        prolonged = end is not None and ends and self._runs_longer(site, end, before, grew)
        value = not value if prolonged else value
        repeated = self.count(site, value)
        if end is None:
            most = _MOST_ASKED_ANYWHERE
        elif not end.in_loop:
            most = _MOST_ASKED_BY_CALLS
        else:
            most = _ROUNDS["typical"] if self._sizes == "fewest" and grew else _MOST_ASKED
        if repeated > most:
            self._asked[site.file, site.line] = _Asked(execution=before.execution, left_at=place)
            self._leave(site, repeated, grew)
        halved = min(repeated - _ROUNDS[self._sizes], _MOST_HALVED)
        halves = end is not None and end.of_number and isinstance(value, float) and halved > 0
        if halves:
            value *= 0.5**halved  # not 0: the program may divide by it
        return Answered(value, repeated, prolonged, repeated > most, halves)

    def count(self, site: Site, value: Any) -> int:
        """How often in a row the line got this answer."""
        last = self._last(site)
        end = _loop_ends(site.file).get(site.line)
        if end is not None and end.together and value is not end.goes_on:  # the other conditions decide
            return last.repeated
        repeated = last.repeated + 1 if last.answer == value or not isinstance(value, bool) else 1
        self._asked[site.file, site.line] = _Asked(value, repeated, self._allocated(), last.execution)
        return repeated

    def _last(self, site: Site) -> _Asked:
        last = self._asked.get((site.file, site.line), _Asked())
        end = _loop_ends(site.file).get(site.line)
        execution = _execution(site) if end is not None and end.in_loop else None
        return last if last.execution is execution else _Asked(execution=execution)

    def _runs_longer(self, site: Site, end: _LoopEnd, last: _Asked, grew: bool) -> bool:
        """Whether a loop goes on that a guess would end."""
        line = site.file, site.line
        again = last.answer == end.goes_on
        rounds = last.repeated * again + end.after_round
        if not end.in_loop or not rounds or (again and not grew):
            return False
        if rounds < _ROUNDS["typical"]:
            self._short.add(line)
        if line not in self._short or line in self._as_guessed:
            return False
        if rounds < _ROUNDS[self._sizes]:
            return True
        self._leave(site, rounds, grew)
        return False

    def _leave(self, site: Site, rounds: int, grew: bool) -> None:
        self.kept_memory |= grew
        if not any(note.site == site for note in self.cut):
            text = f"a loop whose end depends on values was left after {rounds} rounds"
            self.cut.append(Note(text, site))


def _frame(site: Site) -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_lineno != site.line or frame.f_code.co_filename != site.file):
        frame = frame.f_back
    return frame


def _execution(site: Site) -> object:
    """What the line's frame is marked with: ids of frames are used again. The mark is in the place of a
    function for sys.settrace, which only debuggers use."""
    frame = _frame(site)
    if frame is not None and frame.f_trace is None:
        frame.f_trace = lambda *event: None
    return None if frame is None else frame.f_trace


class _LoopEnd(NamedTuple):
    """A condition that can end a loop: with which answer the loop goes on, and whether it is asked after a
    round, not before. Outside a loop, `if condition: return` may end one of a caller. `together`: several
    conditions have to agree for the loop to end, as in `if a and b: break`."""

    goes_on: bool | None  # None: either, as in `if not a and b: break`, whose line asks for both
    after_round: bool
    in_loop: bool
    together: bool = False
    of_number: bool = False  # not the condition, but a number that it compares: `error = x.max().item()`


@functools.lru_cache(maxsize=256)
def _loop_ends(file: str) -> dict[int, _LoopEnd]:
    """Line -> `while condition:`, or `if condition:` whose last statement is break or return. Also the lines
    that assign to a name which such a condition of the loop around them has."""
    found: dict[int, _LoopEnd] = {}

    def state(
        test: ast.expr, goes_on: bool, after_round: bool, in_loop: bool, together: bool = False
    ) -> None:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            state(test.operand, not goes_on, after_round, in_loop, together)
        elif isinstance(test, ast.BoolOp):
            together |= isinstance(test.op, ast.Or) is goes_on
            for operand in test.values:
                state(operand, goes_on, after_round, in_loop, together)
        else:
            for line in range(test.lineno, (test.end_lineno or test.lineno) + 1):
                either = line in found and found[line].goes_on is not goes_on
                answer = None if either else goes_on
                found[line] = _LoopEnd(answer, after_round, in_loop, together and not either)

    def visit(node: ast.AST, in_loop: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.While):
                state(child.test, True, False, True)
            elif isinstance(child, ast.If) and isinstance(child.body[-1], (ast.Break, ast.Return)):
                state(child.test, False, True, in_loop)
            loop = isinstance(child, (ast.While, ast.For))
            if loop:
                for line in _lines_of_tested(child):
                    found.setdefault(line, _LoopEnd(None, False, True, of_number=True))
            visit(child, loop or (in_loop and not isinstance(child, (ast.FunctionDef, ast.Lambda))))

    with contextlib.suppress(SyntaxError, ValueError):
        visit(ast.parse("".join(linecache.getlines(file))), False)
    return found


def _lines_of_tested(loop: ast.AST) -> Iterator[int]:
    """Of the assignments in a loop to names that the conditions which end it have."""
    inside = list(ast.walk(loop))
    ends = [each for each in inside if isinstance(each, ast.If)]
    tests = [each.test for each in ends if isinstance(each.body[-1], ast.Break | ast.Return)]
    tests += [loop.test] if isinstance(loop, ast.While) else []
    tested = {name.id for test in tests for name in ast.walk(test) if isinstance(name, ast.Name)}
    for each in inside:
        if isinstance(each, ast.Assign) and any(getattr(one, "id", None) in tested for one in each.targets):
            yield from range(each.lineno, (each.end_lineno or each.lineno) + 1)
