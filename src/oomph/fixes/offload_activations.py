"""Activation offload: what blocks save for backward waits in host memory, copied beside the computation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from oomph.errors import UserError
from oomph.fixes import modules
from oomph.fixes.host_copies import HostCopies
from oomph.fixes.journal import Journal, WrappedForward
from oomph.fixes.modules import (
    blocks_at,
    disable_kv_cache,
    no_blocks_error,
    own_checkpointing,
    refuse_own_checkpointing,
)
from oomph.fixes.registry import Fix, FixContext, Target
from oomph.units import MiB, parse_bytes


class ActivationOffloading(Fix):
    name = "activation_offloading"
    kind = "exact"
    changes = "What blocks keep for backward waits in pinned host memory and is copied back in time."

    def targets(self, context: FixContext) -> Iterable[Target]:
        names = [name for group in modules.blocks(context.model) for name, _ in group]
        if len(names) > 2 and own_checkpointing(context.model) is None:
            yield Target(tuple(names[:-1]), {}, "the last block's stay, backward begins with them")

    def change_model(
        self,
        model: nn.Module,
        journal: Journal,
        *,
        blocks: Sequence[str] | None = None,
        smallest: int | str = MiB,
        ahead: bool = True,
    ) -> None:
        """`blocks`: names of modules ("layers.*.mlp" is one in each layer); by default every repeated block
        but the last, whose activations are needed at once. `smallest`: bytes of a tensor that is worth
        copying. `ahead`: a block's tensors come back while the block after it is in backward; false saves
        their memory then, and the computation waits for each copy.

        With the fix "activation_checkpointing", a block saves its inputs alone, and those are what is copied.
        """
        if not isinstance(ahead, bool):
            raise UserError(f"fix 'activation_offloading': ahead={ahead!r} is not valid; valid: true, false")
        copies = HostCopies(_size(smallest), ahead)
        # Inside a checkpoint of its own, everything would be copied that it means to compute again.
        refuse_own_checkpointing(model, self.name)
        repeated = [name for group in modules.blocks(model) for name, _ in group]
        names = repeated if blocks is None else modules.names_option(self.name, "blocks", blocks)
        if not names:
            raise no_blocks_error(model, self.name)
        wanted = blocks_at(model, names, self.name)
        named = wanted | blocks_at(model, repeated, self.name)
        # In the model's order. The repeated blocks that are not wanted tell how far the computation is.
        order = [name for name, _ in model.named_modules() if name in named]
        last = order[-1] if len(order) > 1 else None
        going = [name for name in order if name in wanted and name != last]
        if not going:
            raise UserError(
                f"fix 'activation_offloading': {last!r} is the last block, and backward needs at once "
                "what it keeps; name blocks before it"
            )
        for name in order:
            goes = name in going
            around = partial(_offloaded, copies=copies, stays=not goes)
            what = "kept on the host for backward" if goes else "stays; marks the time for the others"
            journal.wrap_forward(named[name], around, name, what)
        disable_kv_cache(model, journal, "it would hold on the device what is copied away")


def _offloaded(
    forward: Callable[..., Any], *args: Any, copies: HostCopies, stays: bool, **kwargs: Any
) -> Any:
    # What is computed again during backward is needed at once.
    if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
        return forward(*args, **kwargs)
    visit = copies.visit(stays, _parameters_and_buffers(forward))
    with visit.saving():
        result = forward(*args, **kwargs)
    visit.end()
    return result


def _parameters_and_buffers(forward: Callable[..., Any]) -> list[torch.Tensor]:
    while isinstance(forward, WrappedForward):
        forward = forward.inner
    module = getattr(forward, "__self__", None)
    return [*module.parameters(), *module.buffers()] if isinstance(module, nn.Module) else []


def _size(smallest: Any) -> int:
    if isinstance(smallest, bool) or not isinstance(smallest, int | str):
        raise UserError(
            f"fix 'activation_offloading': smallest={smallest!r} is not valid; give bytes or e.g. '1MiB'"
        )
    try:
        return parse_bytes(smallest)
    except UserError as error:
        raise UserError(f"fix 'activation_offloading': smallest: {error}") from None
