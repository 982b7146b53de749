"""Compute rotary cosines and sines once per forward, for layers that each own a rotary module.

Within one forward of the module that contains them, the first rotary module computes, and the others return
the same tensors, provided that they would compute the same: their class, attributes and buffers are equal,
the positions are the same tensor, and of other tensors (hidden states are often passed) only shape, dtype or
device is read. A TorchFunctionMode records what the first computation reads. The results are dropped when
the forward ends; what a checkpoint recomputes in backward, it computes by itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from oomph.errors import UserError
from oomph.fixes.activation_checkpointing import KeepResults, ReuseResults
from oomph.fixes.journal import Journal
from oomph.fixes.modules import chosen_modules, common_parent, equal_groups
from oomph.fixes.registry import Fix, FixContext, Target
from oomph.fixes.shared_buffers import same_attributes_and_buffers
from oomph.nn.blocks import NamedModule
from oomph.torch_internals import SELECTIVE_CHECKPOINT, current_dispatch_modes, tree_flatten, tree_leaves

_ROTARY_CLASS = re.compile(r"rotary|rope(?![a-z])|rope(emb|cache)", re.IGNORECASE)
# Functions that do not read a tensor's numbers.
_METADATA = frozenset(
    "shape dtype device ndim layout is_cuda is_cpu is_meta requires_grad size dim ndimension numel nelement "
    "element_size is_floating_point is_complex get_device new_empty new_zeros new_ones new_full new_tensor "
    "empty_like zeros_like ones_like full_like __len__ itemsize nbytes".split()
)
# Functions that read only metadata of their second argument.
_LIKE_ANOTHER = frozenset(("to", "type_as", "expand_as", "view_as", "reshape_as"))


class SharedRotaryEmbedding(Fix):
    name = "shared_rotary_embedding"
    kind = "exact"
    changes = "Rotary cosines and sines are computed by the first layer and used by all."

    def targets(self, context: FixContext) -> Iterable[Target]:
        at_peak = {alive.allocation.module for alive in context.prediction.at_peak}
        names = [
            name
            for group in _equal_modules(_rotary_modules(context.model))
            for name, _ in group
            if any(other in at_peak for other, _ in group[1:])
        ]
        if names:
            yield Target(tuple(names))

    def change_model(
        self, model: nn.Module, journal: Journal, *, modules: Sequence[str] | None = None
    ) -> None:
        """`modules`: names; by default all whose class is called rotary or rope."""
        if modules is None:
            chosen = _rotary_modules(model)
        else:
            named = chosen_modules(model, modules, self.name)
            chosen = [NamedModule(name, module) for name, module in named.items()]
            for name, module in chosen:
                if next(module.parameters(), None) is not None:
                    raise UserError(f"fix {self.name!r}: {name!r} has parameters, so its results differ")
        groups = _equal_modules(chosen)
        if not groups:
            raise UserError(f"fix {self.name!r}: the model has no two rotary modules that are equal")
        for group in groups:
            parent = common_parent(model, [name for name, _ in group])
            cache = ForwardCache()
            journal.wrap_forward(
                parent.module, partial(_with_cache, cache=cache), parent.name, "shares rotary results"
            )
            for name, module in group:
                what = f"computed once per forward of {parent.name or 'the model'}, for all"
                journal.wrap_forward(module, partial(_cached, cache=cache), name, what)


def _rotary_modules(model: nn.Module) -> list[NamedModule]:
    """Without parameters and children, so only the arguments distinguish their results."""
    return [
        NamedModule(name, module)
        for name, module in model.named_modules()
        if _ROTARY_CLASS.search(type(module).__name__)
        and next(module.parameters(), None) is None
        and next(module.children(), None) is None
    ]


def _equal_modules(modules: Sequence[NamedModule]) -> list[list[NamedModule]]:
    return equal_groups(modules, lambda one, other: same_attributes_and_buffers(one.module, other.module))


class ForwardCache:
    """The results of the forward that is running; None outside of a forward."""

    def __init__(self) -> None:
        self.results: list[_Call] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"results": None}


class _Call:
    """Arguments of one call, and its result. Holds the tensors, so that no other tensor takes their id."""

    read: set[int]  # which of the tensors' numbers the result depends on, by index
    result: Any

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves, structure = tree_flatten((args, kwargs))
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        others = [type(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        autocast = [(torch.is_autocast_enabled(on), torch.get_autocast_dtype(on)) for on in ("cpu", "cuda")]
        self.rest = structure, others, autocast
        self.versions = _versions(self.tensors)

    def keep(self, read: set[int], result: Any) -> None:
        self.read, self.result, self.result_versions = read, result, _versions(result)

    def answers(self, other: _Call) -> bool:
        """Tensors whose numbers were read are the same and unmodified, others the same in metadata; and the
        result was not modified in place."""
        return (
            self.rest == other.rest
            and self.result_versions == _versions(self.result)
            and all(
                (one is two and self.versions[index] == other.versions[index])
                if index in self.read
                else (one.shape, one.dtype, one.device) == (two.shape, two.dtype, two.device)
                for index, (one, two) in enumerate(zip(self.tensors, other.tensors, strict=True))
            )
        )


class _RecordReads(TorchFunctionMode):
    """Records which of these tensors' numbers a computation reads, by index."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.index = {id(tensor): index for index, tensor in enumerate(tensors)}
        self.read: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        if name not in _METADATA:
            given = args[:1] if name in _LIKE_ANOTHER else (args, kwargs)
            self.read.update(self.index[id(leaf)] for leaf in tree_leaves(given) if id(leaf) in self.index)
        return func(*args, **(kwargs or {}))


def _with_cache(forward: Callable[..., Any], *args: Any, cache: ForwardCache, **kwargs: Any) -> Any:
    outer, cache.results = cache.results, []
    try:
        return forward(*args, **kwargs)
    finally:
        cache.results = outer


def _cached(forward: Callable[..., Any], *args: Any, cache: ForwardCache, **kwargs: Any) -> Any:
    if cache.results is None or torch.is_inference_mode_enabled() or _in_selective_checkpoint():
        return forward(*args, **kwargs)
    call = _Call(args, kwargs)
    for known in cache.results:
        if known.answers(call):
            return known.result
    with _RecordReads(call.tensors) as recorded:
        result = forward(*args, **kwargs)
    has_gradient = any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(result))
    if not has_gradient and not any(call.tensors[index].requires_grad for index in recorded.read):
        call.keep(recorded.read, result)
        cache.results.append(call)
    return result


def _in_selective_checkpoint() -> bool:
    """It expects the same ops in backward, when this forward's results are gone."""
    modes = (*SELECTIVE_CHECKPOINT, KeepResults, ReuseResults)
    return any(isinstance(mode, modes) for mode in current_dispatch_modes())


def _versions(tree: Any) -> list[int]:
    return [leaf._version for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
