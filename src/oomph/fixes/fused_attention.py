"""Attention that a module writes out, product by product, runs in a fused kernel instead."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from oomph.errors import UserError
from oomph.fixes.attention.anatomy import attention_matrices, drops_weights, writes_attention_out
from oomph.fixes.attention.mode import with_fused_attention
from oomph.fixes.attention.stored_masks import Watched, drop_stored_masks
from oomph.fixes.journal import Journal, WrappedForward
from oomph.fixes.modules import module_at
from oomph.fixes.registry import Fix, FixContext, Target
from oomph.workload import Workload


class FusedAttention(Fix):
    name = "fused_attention"
    kind = "exact"
    changes = "Attention written out as products and a softmax runs fused, without the matrix of its weights."

    def targets(self, context: FixContext) -> Iterable[Target]:
        names: list[str] = []
        for path in attention_matrices(context.prediction):
            name = _own_code(context.model, path)
            if name is None or name in names or drops_weights(context.prediction, path):
                continue
            if not _is_fixed(context.model.get_submodule(name)):
                names.append(name)
        if names:
            yield Target(tuple(names), {"modules": names})

    def change_workload(self, workload: Workload, *_: Any, modules: Sequence[str] | None = None) -> Workload:
        return replace(workload, model=Watched(workload.model))

    def change_model(
        self, model: nn.Module, journal: Journal, *_: Any, modules: Sequence[str] | None = None
    ) -> None:
        """`modules`: whose forward holds the attention; by default all whose own code mentions a softmax and
        a product. What the code does besides is left as it is."""
        if isinstance(modules, str) or not isinstance(modules, Sequence | None):
            raise UserError(
                f"fix {self.name!r}: modules={modules!r} is not valid; valid: a list of module names, or None"
            )
        names = _found(model) if modules is None else list(modules)
        if not names:
            raise UserError(
                f"fix {self.name!r}: no module writes attention out in its own code; "
                "name some in modules=[...]"
            )
        seen: set[int] = set()
        for name in names:
            module = module_at(model, name, self.name)
            if id(module) in seen:
                continue
            seen.add(id(module))
            drop_stored_masks(module, name, journal)
            journal.wrap_forward(module, with_fused_attention, name, "attention is fused")


def _found(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if writes_attention_out(module)]


def _is_fixed(module: nn.Module) -> bool:
    forward = vars(module).get("forward")
    while isinstance(forward, WrappedForward):
        if forward.around is with_fused_attention:
            return True
        forward = forward.inner
    return False


def _own_code(model: nn.Module, path: str) -> str | None:
    """The module of the user's own at or above a path, with parameters; None inside a library's."""
    while True:
        try:
            module = model.get_submodule(path)
        except AttributeError:  # not a part of this model
            return None
        kind = type(module).__module__
        if kind.startswith("transformers.") or isinstance(module, nn.MultiheadAttention):
            return None
        if not kind.startswith("torch.") and next(module.parameters(), None) is not None:
            return path
        if not path:
            return None
        path = path.rpartition(".")[0]
