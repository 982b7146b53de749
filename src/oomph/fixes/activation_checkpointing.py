"""Activation checkpointing: blocks save only their inputs and run forward a second time in backward."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from oomph.errors import UserError
from oomph.fixes.activation_offloading import BlockActivations, OffloadedTensor, ResidentTensor, current_block
from oomph.fixes.journal import Journal, module_of
from oomph.fixes.modules import chosen_blocks, disable_kv_cache, own_checkpointing, refuse_own_checkpointing
from oomph.fixes.registry import Fix, FixContext, Target, check_choice
from oomph.nn.blocks import blocks as blocks_of
from oomph.ops.common import version_of
from oomph.torch_internals import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    storage_id,
    tree_leaves,
    tree_map_only,
)

aten = torch.ops.aten
# Its time grows with the square of the sequence, the size of its results (and their log-sum-exp) linearly.
_ATTENTION = {
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
}
# The ops of a block's forward that take longest to recompute for the size of their results.
_MATMULS = _ATTENTION | {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.convolution.default,
}
_KEPT_OPS = {"nothing": set[Any](), "attention": _ATTENTION, "matmuls": _MATMULS}
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
        yield Target(names, {"keep": "matmuls"}, "keeps the results of matrix products and attention")
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
        "matmuls" (matrix products, convolutions and attention). Attention counts where it is torch's
        scaled_dot_product_attention. With the fix "activation_offloading", they wait in host memory."""
        check_choice(self.name, "keep", keep, KEEP)
        refuse_own_checkpointing(model, self.name)
        for name, module in chosen_blocks(model, blocks, self.name).items():
            journal.wrap_forward(module, partial(_checkpointed, keep=keep), name, "recomputed in backward")
        disable_kv_cache(model, journal, "recomputation would fill it a second time")


def _checkpointed(forward: Callable[..., Any], *args: Any, keep: str, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    module, ops = module_of(forward), _KEPT_OPS[keep]
    norms = [each for each in (module.modules() if module is not None else ()) if _has_statistics(each)]
    kept = _KeptResults(ops, current_block())
    options: dict[str, Any] = {}
    if torch.compiler.is_compiling():  # the compiler takes torch's policy alone, and follows writes itself
        if ops or norms:
            options = {"context_fn": partial(_policy_contexts, ops, norms), **_HOOKS_BYPASSED}
    else:
        others = [*(one for one in args if not isinstance(one, torch.Tensor)), *kwargs.values()]
        forward = _Unchanged(forward, module, norms, others)
        if ops or norms:
            options = {"context_fn": partial(_contexts, kept, norms)}
    result = checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)
    kept.pack(result)
    return result


class _Unchanged:
    """A block's forward that refuses to run again on buffers or arguments that were written since.

    Of tensors that are given by position, autograd checks that: `arguments` are the others.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        module: nn.Module | None,
        norms: Sequence[nn.Module],
        arguments: Sequence[Any],
    ) -> None:
        self._forward = forward
        self._arguments = [
            (leaf, version_of(leaf)) for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)
        ]
        self._buffers = [
            (owner, name, buffer, version_of(buffer))
            for owner in (module.modules() if module is not None else ())
            if owner._buffers and owner not in norms
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        written = ["an argument" for leaf, version in self._arguments if version_of(leaf) != version]
        for owner, name, buffer, version in self._buffers:
            if owner._buffers.get(name) is not buffer or version_of(buffer) != version:
                written.append(f"buffer {name!r} of a {type(owner).__name__}")
        if written:
            raise UserError(
                f"fix 'activation_checkpointing': {written[0]} was written after the forward of its block "
                "began, so backward would recompute other numbers; name other blocks=[...]"
            )
        return self._forward(*args, **kwargs)


def _has_statistics(module: nn.Module) -> bool:
    """BatchNorm and its like."""
    return module.training and bool(getattr(module, "track_running_stats", False))


def _contexts(kept: _KeptResults, norms: Sequence[nn.Module]) -> tuple[Any, Any]:
    """Of the forward pass and of the recomputation, which does not update running statistics again."""
    first: Any = KeepResults(kept) if kept.ops else contextlib.nullcontext()
    again: Any = ReuseResults(kept) if kept.ops else contextlib.nullcontext()
    return first, _WithoutStatistics(again, norms) if norms else again


def _policy_contexts(ops: set[Any], norms: Sequence[nn.Module]) -> tuple[Any, Any]:
    first: Any = contextlib.nullcontext()
    again: Any = contextlib.nullcontext()
    if ops:
        first, again = create_selective_checkpoint_contexts(partial(_save, ops))
    return first, _WithoutStatistics(again, norms) if norms else again


class _WithoutStatistics:
    """`inner`, in which running statistics stay as they are: with a momentum of 0, as many tensors are saved
    as in the first pass. Entered once for every backward pass."""

    def __init__(self, inner: Any, norms: Sequence[Any]) -> None:
        self._inner, self._norms = inner, norms

    def __enter__(self) -> None:
        self._before = [(norm.momentum, norm.num_batches_tracked) for norm in self._norms]
        for norm in self._norms:
            norm.momentum, norm.num_batches_tracked = 0.0, None
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        try:
            self._inner.__exit__(*error)
        finally:
            for norm, (momentum, batches) in zip(self._norms, self._before, strict=True):
                norm.momentum, norm.num_batches_tracked = momentum, batches


class _KeptResults:
    """Results of `ops` in the forward of a block, which its recomputation takes instead of computing them.

    They go where the block's activations go. torch's own policy keeps them on the device, beyond the reach of
    hooks, and reuses what was written since where autograd sees no view, as in the result of a 3-D matmul.
    """

    def __init__(self, ops: set[Any], block: BlockActivations | None) -> None:
        self.ops = ops
        self._results: list[tuple[Any, Any]] = []  # op and results in order; None: to be computed
        self._pack = _resident if block is None else block.pack
        self._unpack = _value if block is None else block.unpack

    def draws(self, op: Any, args: Any, kwargs: Any) -> bool:
        """Whether it advances the random numbers, which those after it depend on."""
        given = dict(zip((one.name for one in op._schema.arguments), args, strict=False)) | kwargs
        return bool(given.get("dropout_p"))

    def add(self, op: Any, results: Any) -> None:
        self._results.append((op, results))

    def forget(self, written: Any) -> None:
        """The memory of these tensors is written, or may be."""
        storages = _storages(written)
        for number, (op, results) in enumerate(self._results):
            if not storages.isdisjoint(_storages(results)):
                self._results[number] = op, None

    def pack(self, result: Any) -> None:
        """After the forward. The program may write what the block returns."""
        if self._results:
            self.forget(result)
            self._results = tree_map_only(torch.Tensor, self._pack, self._results)

    def take(self, number: int, op: Any) -> Any:
        """Once: what it computes from then on belongs to the recomputation."""
        expected, packed = self._results[number]
        if op is not expected:
            raise UserError(
                "fix 'activation_checkpointing': a block recomputes other ops in backward than it ran in "
                "forward; use keep=nothing"
            )
        self._results[number] = op, None
        kinds = (ResidentTensor, OffloadedTensor)
        return tree_map_only(kinds, self._unpack, packed, is_leaf=lambda leaf: isinstance(leaf, kinds))


def _resident(tensor: torch.Tensor) -> ResidentTensor:
    with torch.no_grad():
        return ResidentTensor(tensor.detach(), tensor._version)


def _value(saved: Any) -> torch.Tensor:
    return saved.tensor()


def _storages(tree: Any) -> set[int]:
    found: set[int] = set()
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor) and is_traceable_wrapper_subclass(leaf):
            found |= _storages([getattr(leaf, name) for name in leaf.__tensor_flatten__()[0]])  # type: ignore[attr-defined]
        elif isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            found.add(storage_id(leaf.untyped_storage()))
    return found


class KeepResults(TorchDispatchMode):
    def __init__(self, kept: _KeptResults) -> None:
        super().__init__()
        self._kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        if func in self._kept.ops:
            if not self._kept.draws(func, args, kwargs):
                self._kept.add(func, results)
        elif func._schema.is_mutable:
            given = zip(func._schema.arguments, args, strict=False)
            written = [one for argument, one in given if argument.is_write]
            self._kept.forget([*written, *kwargs.values()])
        return results


class ReuseResults(TorchDispatchMode):
    def __init__(self, kept: _KeptResults) -> None:
        super().__init__()
        self._kept = kept

    def __enter__(self) -> Any:
        self._next = count()
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        results = None
        if func in self._kept.ops and not self._kept.draws(func, args, kwargs):
            results = self._kept.take(next(self._next), func)
        return func(*args, **kwargs) if results is None else results


# What the policy saves bypasses saved-tensor hooks; from torch 2.15 on that has to be said.
_HOOKS_BYPASSED: dict[str, Any] = (
    {"respect_saved_tensors_hooks": False}
    if "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters
    else {}
)


def _save(kept: set[Any], context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE
