"""How memory grows over the first step: parameters, embedding, first layer, all layers, head, loss.

The stages are found in the events of a Prediction: its marks say when each block of a repeated stack begins
and ends. Models without such a stack have no table. The table shows the first step because that starts from
the parameters alone; from the second step on, the optimizer state is there as well.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from oomph.records import Alive, Allocation, Event, Prediction, alive_after
from oomph.report.terminal import columns, group_tensors, section, strip_lines
from oomph.units import counted, format_bytes

_SHOWN = 2  # additions of a row that are named
_MIN_NAMED_SHARE = 0.02  # of a row's change; smaller additions are not named
_MIN_ROUNDING_SHOWN = 0.005  # people compute parameter bytes by hand: a larger difference is explained
# The head is the first of these products after the last block.
_PRODUCTS = re.compile(r"aten\.(mm|addmm|bmm|baddbmm|linear|matmul|_scaled_mm)\b")
_EMBEDDING = re.compile(r"emb|wte|wpe", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Addition:
    """Tensors alive at a stage that were not alive at the one before."""

    bytes: int  # of their blocks
    count: int
    shape: tuple[int, ...]
    dtype: str
    module: str
    what: str  # "parameters", "buffers", "batch", or the op that created them
    requested: int | None = None  # of parameters, buffers and batch: before the allocator rounds up


@dataclass(frozen=True, slots=True)
class StageRow:
    """The bytes allocated at the end of a stage, or at the highest moment within it."""

    stage: str
    allocated: int
    change: int  # since the row before: added less freed
    freed: int
    added: tuple[Addition, ...]  # largest first


def stage_table(prediction: Prediction) -> list[StageRow] | None:
    """The rows in the order of the run; None where there is no stack of blocks."""
    stages = _stage_ends(prediction)
    if stages is None:
        return None
    rows: list[StageRow] = []
    before: dict[int, int] = {}
    ends = [at for _, at in stages]
    for (stage, _), alive in zip(
        stages, alive_after(prediction.events, prediction.timeline, ends), strict=True
    ):
        new = [Alive(size, prediction.allocations[id]) for id, size in alive.items() if id not in before]
        freed = sum(size for id, size in before.items() if id not in alive)
        change = sum(one.bytes for one in new) - freed
        rows.append(StageRow(stage, sum(alive.values()), change, freed, _additions(new)))
        before = alive
    return rows


def stage_table_to_json(rows: Sequence[StageRow] | None) -> list[dict[str, Any]] | None:
    """Plain data, sizes in bytes: the value of "forward_stages"."""
    return None if rows is None else [asdict(row) for row in rows]


def stage_table_text(rows: Sequence[StageRow], console: Console) -> str:
    """The table as `console` would show it."""
    table = columns("left", "right", "right", "fold")
    for number, row in enumerate(rows):
        change = "" if number == 0 else f"{'+' if row.change >= 0 else ''}{format_bytes(row.change)}"
        table.add_row(row.stage, format_bytes(row.allocated), Text(change, "dim"), added_text(row))
    with console.capture() as capture:
        section(console, "Allocated memory over the first step", [table])
    return strip_lines(capture.get())


def added_text(row: StageRow) -> str:
    """A line for each of the largest additions: "640 MiB [1, 131072, 2560] bfloat16 in embedding"."""
    total = sum(one.bytes for one in row.added)
    least = _MIN_NAMED_SHARE * max(total, row.freed)
    named = [one for one in row.added[:_SHOWN] if one.bytes >= least]
    lines = [_addition_text(one) for one in named]
    rest = row.added[len(named) :]
    if (size := sum(one.bytes for one in rest)) > least:
        lines.append(f"{format_bytes(size)} in {sum(one.count for one in rest)} more")
    if row.freed > least:
        lines.append(f"{format_bytes(row.freed)} freed")
    return "\n".join(lines)


def _addition_text(one: Addition) -> str:
    size = format_bytes(one.bytes)
    if one.requested is not None:
        rounded = one.bytes > (1 + _MIN_ROUNDING_SHOWN) * one.requested
        return f"{size} {one.what}" + (f", {format_bytes(one.requested)} without rounding" if rounded else "")
    times = f"{one.count} x " if one.count > 1 else ""
    where = f" in {one.module}" if one.module else f" by {one.what}"
    return f"{size} {times}[{', '.join(map(str, one.shape))}] {one.dtype}{where}"


# ------------------------------------------------------------------------------------------- where stages end


def _stage_ends(prediction: Prediction) -> list[tuple[str, int]] | None:
    """Each stage with the index of the event after which it is taken."""
    events = prediction.events
    start = _find_mark(events, re.compile(r"step \d+"), 0)
    backward = _backward_start(events, start or 0)
    forward_end = len(events) if backward is None else backward
    stack = _largest_stack(prediction, start or 0, forward_end)
    if stack is None:
        return None
    # A script builds its model within its first step.
    start = max(start or 0, _last_model_allocation(prediction, stack.first_enter))
    head = _head(prediction, stack.last_exit, forward_end)
    stages = [
        ("parameters", start),
        (_stage_before_the_layers(prediction, start, stack), stack.first_enter),
        ("after first layer", stack.first_exit),
        (f"after all {counted(stack.blocks, 'layer')}", stack.last_exit),
    ]
    if head is not None:
        stages.append(("after full forward", head))
    if backward is None:
        return stages
    loss = _highest_event(prediction, (head or stack.last_exit) + 1, backward)
    backward_peak = _highest_event(prediction, backward, _backward_end(prediction, backward))
    return [
        *stages,
        ("peak of the loss", loss),
        ("saved for backward", backward),
        ("peak of backward", backward_peak),
    ]


def _find_mark(events: Sequence[Event], label: re.Pattern[str], start: int) -> int | None:
    return next(
        (
            index
            for index in range(start, len(events))
            if events[index].action == "mark" and label.fullmatch(events[index].label)
        ),
        None,
    )


def _backward_start(events: Sequence[Event], start: int) -> int | None:
    """Where the backward pass of the step begins; one inside a module does not count."""
    depth = 0
    for index in range(start, len(events)):
        if events[index].action != "mark":
            continue
        word = events[index].label.partition(" ")[0]
        depth += {"enter": 1, "exit": -1}.get(word, 0)
        if word == "backward" and depth == 0:
            return index
    return None


def _backward_end(prediction: Prediction, start: int) -> int:
    """After its last allocation: an optimizer that updates in backward has its marks in between."""
    end = _find_mark(prediction.events, re.compile(r"forward|step \d+"), start) or len(prediction.events)
    made = [index for index, one in _allocations(prediction, start, end) if one.during == "backward"]
    return max(made, default=start) + 1


@dataclass(frozen=True, slots=True)
class _StackCalls:
    """The calls of the blocks of one stack, by the indices of their marks."""

    first_enter: int
    first_exit: int
    last_exit: int
    blocks: int
    is_first: bool  # no block of another stack runs before it


def _largest_stack(prediction: Prediction, start: int, end: int) -> _StackCalls | None:
    """The stack with the most parameters.

    None where there is none, and where blocks of another stack run between its own or after them: those
    would be taken for the loss.
    """
    calls: list[tuple[str, int, int]] = []
    entered: list[tuple[str, int]] = []
    for index in range(start, end):
        action, _, label = prediction.events[index]
        if action != "mark":
            continue
        word, _, path = label.partition(" ")
        if word == "enter":
            entered.append((path, index))
        elif word == "exit" and entered:
            name, enter = entered.pop()
            if not entered:  # blocks inside others belong to them
                calls.append((name, enter, index))
    stacks = dict.fromkeys(name.rpartition(".")[0] for name, _, _ in calls)
    if not stacks:
        return None
    largest = max(stacks, key=lambda stack: _parameter_bytes(prediction, stack))
    chosen = [call for call in calls if call[0].rpartition(".")[0] == largest]
    if calls[-len(chosen) :] != chosen:
        return None
    first, last = chosen[0], chosen[-1]
    blocks = len({name for name, _, _ in chosen})
    return _StackCalls(first[1], first[2], last[2], blocks, is_first=len(calls) == len(chosen))


def _parameter_bytes(prediction: Prediction, stack: str) -> int:
    prefix = f"{stack}." if stack else ""
    return sum(
        one.bytes
        for one in prediction.allocations
        if one.kind == "parameter" and one.module.startswith(prefix)
    )


def _last_model_allocation(prediction: Prediction, before: int) -> int:
    for index in range(before, -1, -1):
        action, id, _ = prediction.events[index]
        if action == "alloc" and prediction.allocations[id].kind in ("parameter", "buffer"):
            return index
    return 0


def _stage_before_the_layers(prediction: Prediction, start: int, stack: _StackCalls) -> str:
    made = [one for _, one in _allocations(prediction, start + 1, stack.first_enter)]
    embeds = any("embedding" in one.op or _EMBEDDING.search(one.module) for one in made)
    return "after embedding" if embeds and stack.is_first else "before the layers"


def _head(prediction: Prediction, last_exit: int, end: int) -> int | None:
    """The product with the head's weight; or, where only the loss has one, the event before the loss."""
    for index, one in _allocations(prediction, last_exit, end):
        if one.during == "loss":
            return index - 1
        if _PRODUCTS.match(one.op):
            return index
    return None


def _allocations(prediction: Prediction, start: int, end: int) -> Iterator[tuple[int, Allocation]]:
    for index in range(start, end):
        action, id, _ = prediction.events[index]
        if action == "alloc":
            yield index, prediction.allocations[id]


def _highest_event(prediction: Prediction, start: int, end: int) -> int:
    """The event in [start, end) after which the most is allocated; `start` where the range is empty."""
    timeline = prediction.timeline
    first = bisect.bisect_left(timeline, start, key=lambda moment: moment.event)
    last = bisect.bisect_left(timeline, end, key=lambda moment: moment.event)
    moments = timeline[first:last]
    return max(moments, key=lambda moment: moment.allocated).event if moments else start


# ------------------------------------------------------------------------------------------- what is alive


def _additions(new: Sequence[Alive]) -> tuple[Addition, ...]:
    held = {"parameter": "parameters", "buffer": "buffers", "batch": "batch"}
    additions = []
    for kind, what in held.items():
        of_kind = [alive for alive in new if alive.allocation.kind == kind]
        if of_kind:
            blocks = sum(alive.bytes for alive in of_kind)
            requested = sum(alive.allocation.bytes for alive in of_kind)
            additions.append(Addition(blocks, len(of_kind), (), "", "", what, requested))
    groups = group_tensors(alive for alive in new if alive.allocation.kind not in held)
    for group in groups:
        ops = ", ".join(op.removeprefix("aten.") for op in group.ops)
        additions.append(Addition(group.bytes, group.count, group.shape, group.dtype, group.module, ops))
    return tuple(sorted(additions, key=lambda one: -one.bytes))
