"""How memory grows along the first step: parameters, embedding, first layer, all layers, head, loss.

The stages are found in the events of a Prediction: repeated blocks tell when each begins and ends. So it
works for whatever has a stack of them, and gives None for the rest. The first step is shown because it starts
from the parameters alone; the optimizer's state comes on top from the second on.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from oomph.records import Alive, Allocation, Event, Prediction
from oomph.report.grouping import Group, group_alike
from oomph.units import counted, format_bytes

if TYPE_CHECKING:
    from rich.console import Console

_SHOWN = 2  # additions of a row that are named
_NAMED_SHARE = 0.02  # less than this of a row's change is not worth a name
_ROUNDING_TOLD = 0.005  # parameters are what people work out by hand: blocks larger by this are explained
# What a head is made with: the first of these after the last block.
_PRODUCTS = re.compile(r"aten\.(mm|addmm|bmm|baddbmm|linear|matmul|_scaled_mm)\b")
_EMBEDDING = re.compile(r"emb|wte|wpe", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Addition:
    """Tensors alive at a stage that were not there at the one before, as one."""

    bytes: int  # of their blocks
    count: int
    shape: tuple[int, ...]
    dtype: str
    module: str
    what: str  # "parameters", "buffers", "batch", or what made them
    requested: int | None = None  # of the first two and the batch: before the allocator rounds up


@dataclass(frozen=True, slots=True)
class StageRow:
    """The bytes allocated when a stage is over, or at the highest moment within it."""

    stage: str
    allocated: int
    change: int  # against the row before: added less freed
    freed: int
    added: tuple[Addition, ...]  # largest first


def stage_table(prediction: Prediction) -> list[StageRow] | None:
    """The rows in the order of the run; None where there are no repeated blocks to go by."""
    moments = _moments(prediction)
    if moments is None:
        return None
    rows: list[StageRow] = []
    before: dict[int, int] = {}
    for (stage, _), alive in zip(moments, _alive_after(prediction, [at for _, at in moments]), strict=True):
        new = [Alive(size, prediction.allocations[id]) for id, size in alive.items() if id not in before]
        freed = sum(size for id, size in before.items() if id not in alive)
        change = sum(one.bytes for one in new) - freed
        rows.append(StageRow(stage, sum(alive.values()), change, freed, _additions(new)))
        before = alive
    return rows


def stage_table_to_json(rows: Sequence[StageRow] | None) -> list[dict[str, Any]] | None:
    """Plain data, sizes in bytes: the value of "forward_stages"."""
    if rows is None:
        return None
    return [
        {
            "stage": row.stage,
            "allocated": row.allocated,
            "change": row.change,
            "freed": row.freed,
            "added": [
                {
                    "what": one.what,
                    "bytes": one.bytes,
                    "requested": one.requested,
                    "count": one.count,
                    "shape": list(one.shape),
                    "dtype": one.dtype,
                    "module": one.module,
                }
                for one in row.added
            ],
        }
        for row in rows
    ]


def stage_table_text(rows: Sequence[StageRow], console: Console) -> str:
    """The table as `console` would show it."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for number, row in enumerate(rows):
        change = "" if number == 0 else f"{'+' if row.change >= 0 else ''}{format_bytes(row.change)}"
        table.add_row(row.stage, format_bytes(row.allocated), Text(change, "dim"), what_was_added(row))
    with console.capture() as capture:
        console.print()
        console.print(Text("Along the first step, allocated", "bold"))
        console.print(Padding(table, (0, 0, 0, 2)))
    return "".join(line.rstrip() + "\n" for line in capture.get().splitlines())


def what_was_added(row: StageRow) -> str:
    """A line for each of the largest additions: "640 MiB [1, 131072, 2560] bfloat16 in embedding"."""
    total = sum(one.bytes for one in row.added)
    least = _NAMED_SHARE * max(total, row.freed)
    named = [one for one in row.added[:_SHOWN] if one.bytes >= least]
    words = [_in_words(one) for one in named]
    rest = row.added[len(named) :]
    if (size := sum(one.bytes for one in rest)) > least:
        words.append(f"{format_bytes(size)} in {sum(one.count for one in rest)} more")
    if row.freed > least:
        words.append(f"{format_bytes(row.freed)} freed")
    return "\n".join(words)


def _in_words(one: Addition) -> str:
    size = format_bytes(one.bytes)
    if one.requested is not None:
        rounded = one.bytes > (1 + _ROUNDING_TOLD) * one.requested
        return f"{size} {one.what}" + (f", {format_bytes(one.requested)} without rounding" if rounded else "")
    times = f"{one.count} x " if one.count > 1 else ""
    where = f" in {one.module}" if one.module else f" by {one.what}"
    return f"{size} {times}[{', '.join(map(str, one.shape))}] {one.dtype}{where}"


# -- which moments --------------------------------------------------------------------------------------


def _moments(prediction: Prediction) -> list[tuple[str, int]] | None:
    """Stages with the index of the event after which each is taken."""
    events = prediction.events
    start = _index_of(events, re.compile(r"step \d+"), 0)
    backward = _backward(events, start or 0)
    limit = len(events) if backward is None else backward
    stack = _stack(prediction, start or 0, limit)
    if stack is None:
        return None
    if start is None:  # a program that builds its model and calls it, once
        start = _last_of_the_model(prediction, stack.enter)
    head = _head(prediction, stack.last_exit, limit)
    moments = [
        ("parameters", start),
        (_before_the_blocks(prediction, start, stack), stack.enter),
        ("after first layer", stack.first_exit),
        (f"after all {counted(stack.blocks, 'layer')}", stack.last_exit),
    ]
    if head is not None:
        moments.append(("after full forward", head))
    if backward is None:
        return moments
    moments.append(("loss, at its highest", _highest(prediction, (head or stack.last_exit) + 1, limit)))
    moments.append(("kept for backward", limit))
    over = _end_of_backward(prediction, limit)
    moments.append(("backward, at its highest", _highest(prediction, limit, over)))
    return moments


def _index_of(events: Sequence[Event], label: re.Pattern[str], start: int) -> int | None:
    return next(
        (
            index
            for index in range(start, len(events))
            if events[index].action == "mark" and label.fullmatch(events[index].label)
        ),
        None,
    )


def _backward(events: Sequence[Event], start: int) -> int | None:
    """Where the step's backward pass begins; a layer may make gradients of its own on the way there."""
    inside = 0
    for index in range(start, len(events)):
        if events[index].action != "mark":
            continue
        word = events[index].label.partition(" ")[0]
        inside += {"enter": 1, "exit": -1}.get(word, 0)
        if word == "backward" and inside == 0:
            return index
    return None


def _end_of_backward(prediction: Prediction, start: int) -> int:
    """After the last that it makes: an optimizer that updates in backward has its turns in between."""
    end = _index_of(prediction.events, re.compile(r"forward|step \d+"), start) or len(prediction.events)
    made = [index for index, one in _made(prediction, start, end) if one.during == "backward"]
    return max(made, default=start) + 1


@dataclass(frozen=True, slots=True)
class _Stack:
    """The calls of the stack that holds most parameters, by the indices of their marks."""

    enter: int  # of the first block
    first_exit: int
    last_exit: int
    blocks: int
    alone: bool  # no block of another stack runs before it


def _stack(prediction: Prediction, start: int, end: int) -> _Stack | None:
    """None too where blocks of another stack run among its own, or after: those would pass for the loss."""
    calls: list[tuple[str, int, int]] = []
    inside: list[tuple[str, int]] = []
    for index in range(start, end):
        action, _, label = prediction.events[index]
        if action != "mark":
            continue
        word, _, path = label.partition(" ")
        if word == "enter":
            inside.append((path, index))
        elif word == "exit" and inside:
            name, begun = inside.pop()
            if not inside:  # blocks inside others belong to them
                calls.append((name, begun, index))
    stacks = dict.fromkeys(name.rpartition(".")[0] for name, _, _ in calls)
    if not stacks:
        return None
    largest = max(stacks, key=lambda stack: _parameter_bytes(prediction, stack))
    chosen = [call for call in calls if call[0].rpartition(".")[0] == largest]
    first, last = chosen[0], chosen[-1]
    if calls[-len(chosen) :] != chosen:
        return None
    names = {name for name, _, _ in chosen}
    return _Stack(first[1], first[2], last[2], len(names), alone=len(calls) == len(chosen))


def _parameter_bytes(prediction: Prediction, stack: str) -> int:
    inside = f"{stack}." if stack else ""
    return sum(
        one.bytes
        for one in prediction.allocations
        if one.kind == "parameter" and one.module.startswith(inside)
    )


def _last_of_the_model(prediction: Prediction, before: int) -> int:
    for index in range(before, -1, -1):
        action, id, _ = prediction.events[index]
        if action == "alloc" and prediction.allocations[id].kind in ("parameter", "buffer"):
            return index
    return 0


def _before_the_blocks(prediction: Prediction, start: int, stack: _Stack) -> str:
    made = _made(prediction, start + 1, stack.enter)
    embeds = stack.alone and any("embedding" in one.op or _EMBEDDING.search(one.module) for _, one in made)
    return "after embedding" if embeds else "before the layers"


def _head(prediction: Prediction, last_exit: int, end: int) -> int | None:
    """Where the head has been multiplied with; or, where nothing but the loss does so, where that begins."""
    for index, one in _made(prediction, last_exit, end):
        if one.during == "loss":
            return index - 1
        if _PRODUCTS.match(one.op):
            return index
    return None


def _made(prediction: Prediction, start: int, end: int) -> Iterator[tuple[int, Allocation]]:
    for index in range(start, end):
        action, id, _ = prediction.events[index]
        if action == "alloc":
            yield index, prediction.allocations[id]


def _highest(prediction: Prediction, start: int, end: int) -> int:
    """The event from start up to end after which most is allocated; start where there is none."""
    timeline = prediction.timeline
    first = bisect.bisect_left(timeline, start, key=lambda moment: moment.event)
    last = bisect.bisect_left(timeline, end, key=lambda moment: moment.event)
    within = timeline[first:last]
    return max(within, key=lambda moment: moment.allocated).event if within else start


# -- what is there then ---------------------------------------------------------------------------------


def _alive_after(prediction: Prediction, indices: Sequence[int]) -> list[dict[int, int]]:
    """For each index, the bytes by id of what is alive after that event. Indices may come in any order."""
    wanted = set(indices)
    found: dict[int, dict[int, int]] = {}
    alive: dict[int, int] = {}
    timeline = iter(prediction.timeline)
    allocated = 0
    for index, (action, id, _) in enumerate(prediction.events[: max(wanted, default=-1) + 1]):
        if action != "mark":
            moment = next(timeline)
            # The block's own size: the allocator hands out more than was asked for.
            if action == "alloc":
                alive[id] = moment.allocated - allocated
            else:
                alive.pop(id, None)
            allocated = moment.allocated
        if index in wanted:
            found[index] = dict(alive)
    return [found[index] for index in indices]


def _additions(new: Sequence[Alive]) -> tuple[Addition, ...]:
    held = {"parameter": "parameters", "buffer": "buffers", "batch": "batch"}
    additions = []
    for kind, what in held.items():
        of_kind = [alive for alive in new if alive.allocation.kind == kind]
        if of_kind:
            blocks = sum(alive.bytes for alive in of_kind)
            requested = sum(alive.allocation.bytes for alive in of_kind)
            additions.append(Addition(blocks, len(of_kind), (), "", "", what, requested))
    groups = group_alike(alive for alive in new if alive.allocation.kind not in held)
    additions += [_addition(group) for group in groups]
    return tuple(sorted(additions, key=lambda one: -one.bytes))


def _addition(group: Group) -> Addition:
    made_by = ", ".join(op.removeprefix("aten.") for op in group.ops)
    return Addition(group.bytes, group.count, group.shape, group.dtype, group.module, made_by)
