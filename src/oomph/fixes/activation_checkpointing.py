"""Activation checkpointing: blocks save only their inputs and run forward a second time in backward."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from oomph.fixes.activation_offloading import BlockActivations, OffloadedTensor, ResidentTensor, current_block
from oomph.fixes.journal import Journal, module_of
from oomph.fixes.modules import chosen_blocks, disable_kv_cache, own_checkpointing, refuse_own_checkpointing
from oomph.fixes.registry import Fix, FixContext, Target, check_choice
from oomph.nn.blocks import blocks as blocks_of
from oomph.torch_internals import TorchDispatchMode, tree_map_only

aten = torch.ops.aten
# Its time grows with the square of the sequence, the size of its results (and their log-sum-exp) linearly.
_ATTENTION = {
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
}
# The ops of a block's forward that take longest to recompute for the size of their results.
_PRODUCTS = _ATTENTION | {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.convolution.default,
}
_KEPT_OPS = {"nothing": set[Any](), "attention": _ATTENTION, "products": _PRODUCTS}
KEEP = tuple(_KEPT_OPS)


class ActivationCheckpointing(Fix):
    name = "activation_checkpointing"
    kind = "exact"
    changes = "Blocks save only their inputs for backward and run forward a second time there."

    def targets(self, context: FixContext) -> Iterable[Target]:
        groups = blocks_of(context.model)
        names = tuple(name for group in groups for name, _ in group)
        if not names or own_checkpointing(context.model) is not None:
            return
        yield Target(names, {"keep": "nothing"})
        yield Target(names, {"keep": "products"}, "keeps the results of matrix products and attention")
        if any("scaled_dot_product" in made.op for made in context.prediction.allocations):
            yield Target(names, {"keep": "attention"}, "keeps the results of attention")
        every_second = tuple(name for group in groups for name, _ in group[::2])
        if len(names) > 2:
            yield Target(every_second, {"blocks": list(every_second)}, "every second block")

    def change_model(
        self,
        model: nn.Module,
        journal: Journal,
        *,
        blocks: Sequence[str] | None = None,
        keep: str = "nothing",
    ) -> None:
        """`blocks`: names of modules ("layers.*.mlp" is one in each layer); by default every repeated block.
        `keep`: what is saved in addition to the inputs: "nothing", results of "attention", or results of
        "products" (matrix products, convolutions and attention). Attention counts where it is torch's
        scaled_dot_product_attention. With the fix "activation_offloading", they wait in host memory."""
        check_choice(self.name, "keep", keep, KEEP)
        refuse_own_checkpointing(model, self.name)
        for name, module in chosen_blocks(model, blocks, self.name).items():
            journal.wrap_forward(module, partial(_checkpointed, keep=keep), name, "recomputed in backward")
        disable_kv_cache(model, journal, "recomputation would fill it a second time")


def _checkpointed(forward: Callable[..., Any], *args: Any, keep: str, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    module = module_of(forward)
    norms = [each for each in (module.modules() if module is not None else ()) if _has_statistics(each)]
    if keep == "nothing" and not norms:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    contexts = partial(_contexts, _KEPT_OPS[keep], norms)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **_HOOKS_BYPASSED, **kwargs)


def _has_statistics(module: nn.Module) -> bool:
    """BatchNorm and its like."""
    return module.training and bool(getattr(module, "track_running_stats", False))


def _contexts(kept: set[Any], norms: Sequence[nn.Module]) -> tuple[Any, Any]:
    """Of the forward pass and of the recomputation, which does not update running statistics again."""
    first: Any = contextlib.nullcontext()
    again: Any = contextlib.nullcontext()
    block = current_block()
    if kept and block is not None:
        saved: list[Any] = []
        first, again = _KeptResults(kept, saved, block), _ReusedResults(kept, saved, block)
    elif kept:
        first, again = create_selective_checkpoint_contexts(partial(_save, kept))
    return first, _without_statistics(again, norms) if norms else again


@contextlib.contextmanager
def _without_statistics(inner: Any, norms: Sequence[Any]) -> Iterator[None]:
    """With a momentum of 0 the statistics stay, and as many tensors are saved as in the first pass."""
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        with inner:
            yield
    finally:
        for norm, (momentum, batches) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, batches


class _BlockResults(TorchDispatchMode):
    def __init__(self, ops: set[Any], saved: list[Any], block: BlockActivations) -> None:
        super().__init__()
        self._ops, self._saved, self._block = ops, saved, block


class _KeptResults(_BlockResults):
    """In forward: the results of `ops` go where a block's activations go. torch's policy keeps them on the
    device, beyond the reach of hooks."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if func in self._ops:
            self._saved.append(results)
        return results

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._saved[:] = tree_map_only(torch.Tensor, self._block.pack, self._saved)


class _ReusedResults(_BlockResults):
    """In the recomputation: these come back instead of being computed, in the same order."""

    def __enter__(self) -> Any:
        packed = (ResidentTensor, OffloadedTensor)
        self._next = iter(
            tree_map_only(
                packed, self._block.unpack, self._saved, is_leaf=lambda leaf: isinstance(leaf, packed)
            )
        )
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return next(self._next) if func in self._ops else func(*args, **(kwargs or {}))


# What the policy saves bypasses saved-tensor hooks; from torch 2.15 on that has to be said.
_HOOKS_BYPASSED: dict[str, Any] = (
    {"respect_saved_tensors_hooks": False}
    if "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters
    else {}
)


def _save(kept: set[Any], context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE
