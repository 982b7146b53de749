"""Align two op logs by op and outputs, in time that grows with their length.

A plain longest-common-subsequence is quadratic and too slow for the tens of thousands of rows of a
large model; two logs of one program agree almost everywhere, so it is enough to walk them together
and, where they part, to look a short way ahead for the place at which they meet again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from typing import NamedTuple

from oomph.measurement.oplog import OpRow

_WINDOW = 400  # rows looked ahead on each side: more than a transformer block's forward or backward
_RUNS = (4, 2, 1)  # rows in a row that must agree before two places count as the same; longest first
_NAMESPACE = "aten."

# Ops whose result shares its input's storage; whether they are logged at all is a detail of the tracer.
_VIEWS = frozenset(
    {
        "alias",
        "as_strided",
        "chunk",
        "detach",
        "diagonal",
        "expand",
        "expand_as",
        "lift_fresh",
        "movedim",
        "narrow",
        "permute",
        "reshape",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "squeeze",
        "swapaxes",
        "t",
        "transpose",
        "unbind",
        "unfold",
        "unsafe_chunk",
        "unsafe_split",
        "unsqueeze",
        "view",
        "view_as",
        "view_as_complex",
        "view_as_real",
        "_reshape_alias",
        "_unsafe_view",
        "_conj",
        "real",
        "imag",
        "detach_",
    }
)
# One op, two names: what a CPU trace calls an op that CUDA dispatches under another name.
_SAME = {
    "cudnn_convolution": "convolution",
    "_convolution": "convolution",
    "mkldnn_convolution": "convolution",
    "_cudnn_rnn_flatten_weight": "cudnn_rnn_flatten_weight",
    "cudnn_batch_norm": "native_batch_norm",
    "_native_batch_norm_legit": "native_batch_norm",
    "cudnn_batch_norm_backward": "native_batch_norm_backward",
    "lift_fresh_copy": "lift_fresh",
    "copy": "copy_",
}


class Pair(NamedTuple):
    """Positions of one op in the two logs; None where it ran on the other side alone."""

    measured: int | None
    predicted: int | None


def short_name(op: str) -> str:
    """The op's name without namespace and overload: "aten.mm.default" -> "mm"."""
    name = op.replace("::", ".")
    parts = name.removeprefix(_NAMESPACE).split(".")
    if not name.startswith(_NAMESPACE) and len(parts) > 1:
        # Another library's op keeps its namespace ("mylib.scan"), and loses only its overload.
        return ".".join(parts[:2])
    return _SAME.get(parts[0], parts[0])


def is_view(row: OpRow) -> bool:
    """Whether the op only looks at existing memory (and the log agrees that it took none)."""
    takes_none = row.n_allocs == 0 and row.after == row.before
    # An optimizer's step is bracketed by profiler marks, which are ops in name alone.
    return takes_none and (short_name(row.op) in _VIEWS or row.op.startswith("profiler"))


def align(measured: Sequence[OpRow], predicted: Sequence[OpRow]) -> list[Pair]:
    """Pairs in program order; each row of either log appears exactly once."""
    if _phases(measured) == _phases(predicted):
        return _by_phase(measured, predicted)
    return _walk(measured, predicted, 0, 0)


def _phases(rows: Sequence[OpRow]) -> list[str]:
    """The phases in the order in which they come, each run of rows once."""
    return [phase for phase, _, _ in _runs(rows)]


def _runs(rows: Sequence[OpRow]) -> list[tuple[str, int, int]]:
    runs: list[tuple[str, int, int]] = []
    for index, row in enumerate(rows):
        if runs and runs[-1][0] == row.phase:
            runs[-1] = (row.phase, runs[-1][1], index + 1)
        else:
            runs.append((row.phase, index, index + 1))
    return runs


def _by_phase(measured: Sequence[OpRow], predicted: Sequence[OpRow]) -> list[Pair]:
    """Phase by phase, so that a difference in one cannot push the next out of step."""
    pairs: list[Pair] = []
    for (_, m_from, m_to), (_, p_from, p_to) in zip(_runs(measured), _runs(predicted), strict=True):
        pairs += _walk(measured[m_from:m_to], predicted[p_from:p_to], m_from, p_from)
    return pairs


def _walk(measured: Sequence[OpRow], predicted: Sequence[OpRow], m_at: int, p_at: int) -> list[Pair]:
    """Walk the logs together; `m_at` and `p_at` are the positions of their first rows."""
    a = [(short_name(row.op), row.outputs) for row in measured]
    b = [(short_name(row.op), row.outputs) for row in predicted]
    pairs: list[Pair] = []
    i = j = 0
    while i < len(a) and j < len(b):
        if a[i] == b[j]:
            pairs.append(Pair(m_at + i, p_at + j))
            i, j = i + 1, j + 1
            continue
        skip_a, skip_b = _meet(a, b, i, j)
        pairs += _fill(a[i : i + skip_a], b[j : j + skip_b], m_at + i, p_at + j)
        i, j = i + skip_a, j + skip_b
    pairs += _fill(a[i:], b[j:], m_at + i, p_at + j)
    return pairs


Key = tuple[str, str]


def _meet(a: list[Key], b: list[Key], i: int, j: int) -> tuple[int, int]:
    """How many rows to skip on each side until the logs agree again: the fewest in sum."""
    ahead_a, ahead_b = len(a) - i, len(b) - j
    for run in _RUNS:
        # Positions of every run of keys within the window, nearest first.
        places: dict[tuple[Key, ...], int] = {}
        for y in range(min(_WINDOW, ahead_b - run + 1)):
            places.setdefault(tuple(b[j + y : j + y + run]), y)
        best: tuple[int, int] | None = None
        for x in range(min(_WINDOW, ahead_a - run + 1)):
            if best is not None and x >= sum(best):
                break
            y = places.get(tuple(a[i + x : i + x + run]), -1)
            if y >= 0 and (best is None or x + y < sum(best)):
                best = (x, y)
        if best is not None:
            return best
    return min(_WINDOW, ahead_a), min(_WINDOW, ahead_b)


def _fill(a: list[Key], b: list[Key], m_at: int, p_at: int) -> Iterable[Pair]:
    """Rows between two meeting places: the same op with other outputs still makes a pair."""
    names_a, names_b = [name for name, _ in a], [name for name, _ in b]
    if len(a) > _WINDOW or len(b) > _WINDOW:  # a tail that one side alone has
        yield from _one_sided(range(len(a)), range(len(b)), m_at, p_at)
        return
    matcher = SequenceMatcher(None, names_a, names_b, autojunk=False)
    for tag, a_from, a_to, b_from, b_to in matcher.get_opcodes():
        if tag == "equal":
            for offset in range(a_to - a_from):
                yield Pair(m_at + a_from + offset, p_at + b_from + offset)
        else:
            yield from _one_sided(range(a_from, a_to), range(b_from, b_to), m_at, p_at)


def _one_sided(a: Iterable[int], b: Iterable[int], m_at: int, p_at: int) -> Iterable[Pair]:
    yield from (Pair(m_at + x, None) for x in a)
    yield from (Pair(None, p_at + y) for y in b)
