"""Sets the mode and the chunk size of Kimi delta attention layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from oomph.errors import UserError
from oomph.fixes.journal import Journal
from oomph.fixes.modules import chosen_modules
from oomph.fixes.registry import Fix, FixContext, Target, check_choice, check_whole_number
from oomph.nn import KimiDeltaAttention, SpikingKDABlock
from oomph.ops.delta_attention.api import MODES

_LAYERS = (KimiDeltaAttention, SpikingKDABlock)
_PER_TOKEN = ("scan", "sequential")  # modes that save a matrix or a state per token for backward
_SMALL_CHUNK = 512  # tokens: with fewer, the states between chunks take what the chunks save


class ChunkwiseKDA(Fix):
    name = "chunkwise_kda"
    kind = "exact"
    changes = "Delta attention works on chunks of tokens and keeps no state per token for backward."

    def targets(self, context: FixContext) -> Iterable[Target]:
        layers = _layers(context.model)
        per_token = tuple(name for name, module in layers.items() if module.mode in _PER_TOKEN)
        if per_token:
            yield Target(per_token, {"modules": list(per_token)})
        whole = tuple(
            name
            for name, module in layers.items()
            if module.mode not in _PER_TOKEN
            and (module.memory_chunk_size is None or module.memory_chunk_size > _SMALL_CHUNK)
        )
        if whole:
            options = {"modules": list(whole), "memory_chunk_size": _SMALL_CHUNK}
            yield Target(whole, options, "smaller chunks; the states between them are saved")

    def change_model(
        self,
        model: nn.Module,
        journal: Journal,
        *,
        mode: str = "auto",
        memory_chunk_size: int | None = None,
        modules: Sequence[str] | None = None,
    ) -> None:
        """mode and memory_chunk_size are those of oomph.ops.kda. `modules`: names; by default all layers."""
        check_choice(self.name, "mode", mode, MODES)
        size = memory_chunk_size
        if size is not None:
            check_whole_number(self.name, "memory_chunk_size", size, 1)
        if size is not None and mode == "sequential":
            raise UserError(
                f"fix {self.name!r}: mode='sequential' has no chunks; leave memory_chunk_size out"
            )
        kinds = " or ".join(kind.__name__ for kind in _LAYERS)
        layers = _layers(model) if modules is None else chosen_modules(model, modules, self.name)
        if not layers:
            raise UserError(f"fix {self.name!r}: the model has no {kinds}")
        for name, module in layers.items():
            if not isinstance(module, _LAYERS):
                raise UserError(f"fix {self.name!r}: {name!r} is a {type(module).__name__}, not a {kinds}")
            journal.set(module, "mode", mode, name, f"mode={mode!r} instead of {module.mode!r}")
            what = f"memory_chunk_size={size} instead of {module.memory_chunk_size}"
            journal.set(module, "memory_chunk_size", size, name, what)


def _layers(model: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if isinstance(module, _LAYERS)}
