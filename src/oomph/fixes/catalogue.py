"""All fixes, in the order in which they are applied to a model; found by name."""

from __future__ import annotations

import difflib
from functools import cache
from importlib import import_module

from oomph.errors import UserError
from oomph.fixes.fix import Fix
from oomph.fixes.other_names import hint_for
from oomph.records import FixUse

# Module of oomph.fixes -> its class. Shapes and dtypes change first; then what modules compute; then what is
# kept of it (recomputation encloses all of that, and offloading the recomputation); then batch and optimizer;
# what is left is not part of the model.
_ORDER: tuple[tuple[str, str], ...] = (
    ("fewer_converted_layers", "FewerConvertedLayers"),
    ("cheaper_mixing", "CheaperMixing"),
    ("vocabulary_cap", "VocabularyCap"),
    ("smaller_batch", "SmallerBatch"),
    ("shorter_sequence", "ShorterSequence"),
    ("bf16_parameters", "BFloat16Parameters"),
    ("autocast", "Autocast"),
    ("shared_buffers", "SharedBuffers"),
    ("shared_rope", "SharedRope"),
    ("attention_backend", "AttentionBackend"),
    ("fused_attention", "FusedAttention"),
    ("delta_attention", "DeltaAttention"),
    ("modulated_linear", "ModulatedLinear"),
    ("tiled_mlp", "TiledMLP"),
    ("fused_loss", "FusedLoss"),
    ("gradients_in_place", "GradientsInPlace"),
    ("computed_once", "ComputedOnce"),
    ("recompute", "Recompute"),
    ("offload_activations", "OffloadActivations"),
    ("micro_batches", "MicroBatching"),
    ("fused_optimizer", "FusedOptimizer"),
    ("no_foreach", "NoForeach"),
    ("optimizer_8bit", "Optimizer8Bit"),
    ("stochastic_rounding", "StochasticRounding"),
    ("optimizer_in_backward", "OptimizerInBackward"),
    ("optimizer_offload", "OptimizerOffload"),
    ("set_to_none", "SetToNone"),
    ("allocator", "Allocator"),
    ("shard", "Shard"),
)


@cache
def all_fixes() -> tuple[Fix, ...]:
    return tuple(getattr(import_module(f"oomph.fixes.{module}"), name)() for module, name in _ORDER)


@cache
def _by_name() -> dict[str, tuple[int, Fix]]:
    return {fix.name: (rank, fix) for rank, fix in enumerate(all_fixes())}


def find(name: str) -> Fix:
    if name not in _by_name():
        raise UserError(f"there is no fix {name!r}; {_hint(name)}")
    return _by_name()[name][1]


def _hint(name: str) -> str:
    elsewhere = hint_for(name)
    if elsewhere is not None:
        return elsewhere
    close = difflib.get_close_matches(name, _by_name(), n=1)
    return f"did you mean {close[0]!r}?" if close else f"the fixes are {', '.join(_by_name())}"


def rank(name: str) -> int:
    find(name)
    return _by_name()[name][0]


def are_the_same(one: FixUse, other: FixUse) -> bool:
    """An option that is left out is its default."""
    return one.fix == other.fix and find(one.fix).whole(one.options) == find(one.fix).whole(other.options)


def why_not_both(one: FixUse, other: FixUse) -> str | None:
    """Why two uses cannot be combined, in one line; None where they can."""
    if one.fix == other.fix:
        return (
            f"fix {one.fix!r} is there with the options {dict(other.options)}, and was given again with "
            f"{dict(one.options)}; give it once"
        )
    for a, b in ((one, other), (other, one)):
        why = find(a.fix).excludes.get(b.fix)
        if why is not None:
            return f"fixes {a.fix!r} and {b.fix!r} cannot be combined: {why}"
    return None
