"""Work that does not depend on the batch, done for one row and used by all.

Query positions, coordinates or learned tokens are often expanded along the batch and then go through layers:
every row computes, and keeps for backward, the same. Inside the chosen modules those operations run on one
row (see one_row.py), whose gradient is the sum over the batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from oomph.errors import OomphError, UserError
from oomph.fixes.deferral.mode_stack import is_in_force
from oomph.fixes.deferral.quiet_calls import QuietCalls, kind_of
from oomph.fixes.journal import Journal, WrappedForward
from oomph.fixes.modules import NamedModule, common_parent, module_at, repeated_submodules
from oomph.fixes.one_row import GiveUp, OneRow, rows_alike
from oomph.fixes.registry import Fix, FixContext, Target
from oomph.prediction import predict
from oomph.units import MiB, format_bytes
from oomph.workload import Workload

_WORTH_PROPOSING = 1 * MiB
_EXPANDING = ("expand", "repeat", "broadcast_to")


class HoistBatchInvariant(Fix):
    name = "hoist_batch_invariant"
    kind = "exact"
    changes = "What is the same for every row of the batch is computed for one row and used by all."

    def targets(self, context: FixContext) -> Iterable[Target]:
        if not _may_expand(context.model):
            return
        spared = _spared(context.workload)
        if sum(spared.values()) < _WORTH_PROPOSING:
            return
        around = common_parent(context.model, [f"{name}.x" if name else "x" for name in spared])
        note = f"{format_bytes(sum(spared.values()))} of results are the same row, repeated"
        yield Target(tuple(sorted(spared)), {"modules": [around.name]}, note)

    def change_model(
        self, model: nn.Module, journal: Journal, *, modules: Sequence[str] | None = None
    ) -> None:
        """`modules`: in which it looks for such work; by default the whole model."""
        state = State()
        wrapped: set[int] = set()
        for name in [""] if modules is None else modules:
            whole = module_at(model, name, self.name)
            for own, module in [NamedModule("", whole), *repeated_submodules(whole)]:
                path = ".".join(part for part in (name, own) if part)
                if id(module) not in wrapped and _has_forward(module):
                    wrapped.add(id(module))
                    what = "rows that are the same are computed once"
                    once = partial(_once, state=state, quiet=QuietCalls())
                    journal.wrap_forward(module, once, path, what)
        if not wrapped:
            raise UserError(f"fix {self.name!r}: no modules were named; leave modules out for all")


class State:
    """Of the model it was applied to."""

    def __init__(self) -> None:
        self.off = False  # a forward writes into such a result, so none may have one row only


def _once(forward: Callable[..., Any], *args: Any, state: State, quiet: QuietCalls, **kwargs: Any) -> Any:
    """The outermost module that is called begins. Blocks inside have this around them too, because a
    checkpoint calls them again in backward, and must see there what it saw in forward."""
    if state.off or is_in_force(OneRow):
        return forward(*args, **kwargs)
    kind = kind_of(forward, args, kwargs)
    if kind in quiet:
        return forward(*args, **kwargs)
    try:
        with OneRow() as mode:
            result = forward(*args, **kwargs)
    except GiveUp:
        state.off = True
        return forward(*args, **kwargs)
    if any(map(rows_alike, tree_leaves(result))):
        # Whoever gets the result may write into it.
        return tree_map(lambda leaf: leaf.contiguous() if rows_alike(leaf) else leaf, result)
    if not mode.changed_something:
        quiet.add(kind)
    return result


def _has_forward(module: nn.Module) -> bool:
    return not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict)


def _may_expand(model: nn.Module) -> bool:
    """Is there anything in the model's own code that could repeat a row? Tracing takes longer."""
    kinds = {type(module) for module in model.modules() if not type(module).__module__.startswith("torch.")}
    for kind in kinds:
        try:
            source = inspect.getsource(kind)
        except (OSError, TypeError):
            return True
        if any(word in source for word in _EXPANDING):
            return True
    return False


def _spared(workload: Workload) -> dict[str, int]:
    """Per module, the bytes of results that need not be made for every row: a prediction, watched."""
    spared: dict[str, int] = {}
    try:
        predict(replace(workload, model=partial(_watched, workload.model, spared)))
    except OomphError:
        return {}
    return spared


def _watched(build: Callable[[], nn.Module], spared: dict[str, int]) -> nn.Module:
    model = build()
    path: list[str] = []
    for name, module in model.named_modules():
        if _has_forward(module):
            watch = partial(_watch, name=name, path=path, spared=spared)
            vars(module)["forward"] = WrappedForward(module.forward, watch)
    return model


def _watch(
    forward: Callable[..., Any], *args: Any, name: str, path: list[str], spared: dict[str, int], **kwargs: Any
) -> Any:
    def count(size: int) -> None:
        spared[path[-1]] = spared.get(path[-1], 0) + size // 3  # there are three steps

    path.append(name)
    try:
        if is_in_force(OneRow):
            return forward(*args, **kwargs)
        with OneRow(count):
            return forward(*args, **kwargs)
    except GiveUp:
        spared.clear()
        raise UserError("rows are written") from None
    finally:
        path.pop()
