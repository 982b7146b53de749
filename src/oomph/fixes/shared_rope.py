"""One computation of cosines and sines for layers that each own a rotary module.

Within one forward of the model around them, the first rotary module computes and the others return the same
tensors, where they would compute the same: their class, settings and buffers are equal, positions are the
same tensor, and of other tensors (hidden states are often given) only shape, dtype or device is looked at.
That is seen by watching the first computation, not assumed. The results are let go when the forward ends;
what a checkpoint recomputes in backward, it computes by itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_flatten, tree_leaves

from oomph.errors import UserError
from oomph.fixes.journal import Journal
from oomph.fixes.modules import NamedModule, common_parent, module_at, names_option
from oomph.fixes.registry import Fix, FixContext, Target
from oomph.fixes.shared_buffers import same_settings_and_buffers

_ROTARY = re.compile(r"rotary|rope(?![a-z])|rope(emb|cache)", re.IGNORECASE)
# What of a tensor may be asked without its numbers mattering.
_METADATA = frozenset(
    "shape dtype device ndim layout is_cuda is_cpu is_meta requires_grad size dim ndimension numel nelement "
    "element_size is_floating_point is_complex get_device new_empty new_zeros new_ones new_full new_tensor "
    "empty_like zeros_like ones_like full_like __len__ itemsize nbytes".split()
)
_LIKE_ANOTHER = frozenset(("to", "type_as", "expand_as", "view_as", "reshape_as"))  # of it, only metadata
_SELECTIVE = ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")


class SharedRotaryEmbedding(Fix):
    name = "shared_rotary_embedding"
    kind = "exact"
    changes = "Rotary cosines and sines are computed by the first layer and used by all."

    def targets(self, context: FixContext) -> Iterable[Target]:
        at_peak = {alive.allocation.module for alive in context.prediction.at_peak}
        names = [
            name
            for group in _groups(context.model, _rotary_modules(context.model))
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
            names = names_option(self.name, "modules", modules)
            named = {module_at(model, name, self.name): name for name in names}  # a shared one once
            chosen = [NamedModule(name, module) for module, name in named.items()]
            for name, module in chosen:
                if next(module.parameters(), None) is not None:
                    raise UserError(f"fix {self.name!r}: {name!r} has parameters, so its results differ")
        groups = _groups(model, chosen)
        if not groups:
            raise UserError(f"fix {self.name!r}: the model has no two rotary modules that are equal")
        for group in groups:
            around = common_parent(model, [name for name, _ in group])
            results = Results()
            journal.wrap_forward(
                around.module, partial(_opened, results=results), around.name, "shares rotary results"
            )
            for name, module in group:
                what = f"computes once per forward of {around.name or 'the model'}, for all"
                journal.wrap_forward(module, partial(_shared, results=results), name, what)


def _rotary_modules(model: nn.Module) -> list[NamedModule]:
    """Without parameters and parts: nothing but positions can tell their results apart."""
    return [
        NamedModule(name, module)
        for name, module in model.named_modules()
        if _ROTARY.search(type(module).__name__)
        and next(module.parameters(), None) is None
        and next(module.children(), None) is None
    ]


def _groups(model: nn.Module, modules: Sequence[NamedModule]) -> list[list[NamedModule]]:
    groups: list[list[NamedModule]] = []
    for one in modules:
        for group in groups:
            if same_settings_and_buffers(group[0].module, one.module):
                group.append(one)
                break
        else:
            groups.append([one])
    return [group for group in groups if len(group) > 1]


class Results:
    """What was computed in the forward that is running; None outside of one."""

    def __init__(self) -> None:
        self.computed: list[_Computed] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"computed": None}


class _Computed:
    def __init__(self, call: _Call, used: set[int], result: Any) -> None:
        self.call, self.used, self.result = call, used, result
        self.versions = _versions(result)

    def serves(self, call: _Call) -> bool:
        return self.call.like(call, self.used) and self.versions == _versions(self.result)


class _Call:
    """The arguments of one call. Tensors are kept, so that no other one takes their place in memory."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves, self.form = tree_flatten((args, kwargs))
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self.others = [type(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.versions = _versions(self.tensors)
        self.mode = tuple(
            (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")
        )

    def like(self, other: _Call, used: set[int]) -> bool:
        """Would it give the same? Tensors whose numbers were used must be the same, unchanged."""
        return (
            (self.form, self.mode) == (other.form, other.mode)
            and self.others == other.others
            and all(
                (one is two and self.versions[place] == other.versions[place])
                if place in used
                else (one.shape, one.dtype, one.device) == (two.shape, two.dtype, two.device)
                for place, (one, two) in enumerate(zip(self.tensors, other.tensors, strict=True))
            )
        )


class _Watch(TorchFunctionMode):
    """Sees which of these tensors' numbers a computation uses."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.places = {id(tensor): place for place, tensor in enumerate(tensors)}
        self.used: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        if name not in _METADATA:
            given = args[:1] if name in _LIKE_ANOTHER else (args, kwargs)
            self.used.update(self.places[id(leaf)] for leaf in tree_leaves(given) if id(leaf) in self.places)
        return func(*args, **(kwargs or {}))


def _opened(forward: Callable[..., Any], *args: Any, results: Results, **kwargs: Any) -> Any:
    outer, results.computed = results.computed, []
    try:
        return forward(*args, **kwargs)
    finally:
        results.computed = outer


def _shared(forward: Callable[..., Any], *args: Any, results: Results, **kwargs: Any) -> Any:
    if results.computed is None or torch.is_inference_mode_enabled() or _selective_checkpoint():
        return forward(*args, **kwargs)
    call = _Call(args, kwargs)
    for known in results.computed:
        if known.serves(call):
            return known.result
    watch = _Watch(call.tensors)
    with watch:
        result = forward(*args, **kwargs)
    learned = any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(result))
    if not learned and not any(call.tensors[place].requires_grad for place in watch.used):
        results.computed.append(_Computed(call, watch.used, result))
    return result


def _selective_checkpoint() -> bool:
    """It counts operations and expects the same in backward, when this forward's results are gone."""
    return any(type(mode).__name__ in _SELECTIVE for mode in _get_current_dispatch_mode_stack())


def _versions(tree: Any) -> list[int]:
    return [leaf._version for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
