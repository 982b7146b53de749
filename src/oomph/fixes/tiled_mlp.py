"""Tiled MLP: a few thousand tokens at a time, so that the wide activations are never all there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from oomph.errors import ArgumentError, UserError
from oomph.fixes import mlps
from oomph.fixes.journal import Journal, WrappedForward
from oomph.fixes.modules import module_at, names_option
from oomph.fixes.registry import Fix, FixContext, Target
from oomph.ops.mlp import check_options
from oomph.units import counted


class TiledMLP(Fix):
    name = "tiled_mlp"
    kind = "exact"
    changes = "MLPs run a few thousand tokens at a time, in forward and again in backward."

    def targets(self, context: FixContext) -> Iterable[Target]:
        found = mlps.mlps(context.model)
        names = [one.name for one in found if mlps.why_not(one) is None]
        if names:
            yield Target(tuple(names), {} if len(names) == len(found) else {"modules": names})

    def change_model(
        self,
        model: nn.Module,
        journal: Journal,
        *,
        modules: Sequence[str] | None = None,
        tile: int | None = None,
        memory_budget: str | int | None = None,
    ) -> None:
        """`modules`: names; by default every MLP that is found. `tile`: its tokens; or `memory_budget`: bytes
        for a tile's buffers, e.g. "64MiB"."""
        try:
            check_options(tile, memory_budget, "auto")
        except ArgumentError as error:
            raise UserError(f"fix 'tiled_mlp': {error}") from None
        if modules is None:
            found = mlps.mlps(model)
        else:
            names = names_option(self.name, "modules", modules)
            named = {module_at(model, name, self.name): name for name in names}  # a shared one once
            found = [mlps.at(name, module) for module, name in named.items()]
        if not found:
            raise UserError(
                "fix 'tiled_mlp': the model has no MLPs that are found and not tiled already; "
                "name modules=[...]"
            )
        for mlp in found:
            why = mlps.why_not(mlp)
            if why is not None:
                raise UserError(f"fix 'tiled_mlp': {mlp.name or 'the model'}: {why}")
        mlps.check(found, self.name)
        around = partial(_tiled, tile=tile, memory_budget=memory_budget)
        size = (
            counted(tile, "token") if tile is not None else str(memory_budget or "tiles of the default size")
        )
        for mlp in found:
            inner = getattr(mlp.module, mlp.method)
            journal.set(mlp.module, mlp.method, WrappedForward(inner, around), mlp.name, f"tiled: {size}")


def _tiled(
    method: Callable[..., Any], *args: Any, tile: int | None, memory_budget: str | int | None, **kwargs: Any
) -> Any:
    given = [*args, *kwargs.values()]
    module = getattr(method, "__self__", None)
    if len(given) != 1 or not isinstance(given[0], torch.Tensor) or not isinstance(module, nn.Module):
        return method(*args, **kwargs)
    return mlps.run(method, module, given[0], tile=tile, memory_budget=memory_budget)
