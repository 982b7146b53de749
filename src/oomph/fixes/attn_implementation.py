"""Sets `attn_implementation` of Hugging Face models that use eager attention to a fused kernel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from oomph.errors import UserError
from oomph.fixes.fused_attention import attention_matrices
from oomph.fixes.journal import Journal
from oomph.fixes.modules import copy_configs
from oomph.fixes.registry import Fix, FixContext, Target, check_choice
from oomph.nn.blocks import NamedModule

_EAGER = ("eager", None)
# transformers reports itself where a package or a kernel is missing.
IMPLEMENTATIONS = ("sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
_ASSUMED = "assumes that attention drops weights and caps scores only where attributes of these names say so"
# Parts of the names of dropout that is not applied to attention weights.
_OTHER_DROPOUT = ("resid", "hidden", "output", "proj", "path", "activation", "embd", "layer")


class AttnImplementation(Fix):
    name = "attn_implementation"
    kind = "exact"
    changes = "Hugging Face attention runs in a fused kernel, which never stores the matrix of its weights."

    def targets(self, context: FixContext) -> Iterable[Target]:
        eager = [model for model in _models(context.model) if _is_eager(model.module)]
        prefixes = tuple(f"{name}." if name else "" for name, _ in eager)
        if not eager or any(_obstacle(model.module, "sdpa", False) for model in eager):
            return
        where = [module for module in attention_matrices(context.prediction) if module.startswith(prefixes)]
        if where:
            yield Target(tuple(where), {"implementation": "sdpa"}, assumes=_ASSUMED)

    def change_model(
        self,
        model: nn.Module,
        journal: Journal,
        *,
        implementation: str = "sdpa",
        other_random_numbers: bool = False,
    ) -> None:
        """`implementation`: as transformers' attn_implementation. `other_random_numbers`: allow it where
        attention dropout is on; the same dropout then draws other numbers, so that steps differ by chance."""
        check_choice(self.name, "implementation", implementation, IMPLEMENTATIONS)
        found = list(_models(model))
        if not found:
            raise UserError(f"fix {self.name!r}: {type(model).__name__} holds no Hugging Face model")
        eager = [each for each in found if _is_eager(each.module)]
        if not eager:
            config: Any = found[0].module.config
            set_to = config._attn_implementation
            raise UserError(f"fix {self.name!r}: attention is not eager; it is {set_to!r} already")
        for each in eager:
            obstacle = _obstacle(each.module, implementation, other_random_numbers)
            if obstacle is not None:
                raise UserError(f"fix {self.name!r}: {obstacle}")
        copy_configs(model, journal)
        _set_implementation(model, journal, implementation)


def _models(model: nn.Module) -> Iterator[NamedModule]:
    """The Hugging Face models in it: itself and those inside."""
    for name, module in model.named_modules():
        if hasattr(module, "_supports_sdpa") and hasattr(module, "config"):
            yield NamedModule(name, module)


def _is_eager(model: nn.Module) -> bool:
    return getattr(model.config, "_attn_implementation", "") in _EAGER


def _obstacle(model: Any, implementation: str, other_random_numbers: bool) -> str | None:
    """Why this model cannot use the implementation, in one line."""
    kind = type(model).__name__
    if not model._can_set_attn_implementation():
        return f"{kind} does not let its attention be chosen"
    try:
        model.get_correct_attn_implementation(implementation)
    except (ValueError, ImportError) as error:
        if implementation == "sdpa":
            return f"{kind} does not support implementation='sdpa'"
        return f"{kind} cannot use implementation={implementation!r}: {str(error).splitlines()[0]}"
    if getattr(model.config, "output_attentions", False):
        return f"{kind} returns attention weights (config.output_attentions), which no fused kernel has"
    for module in model.modules():
        cap = getattr(module, "attn_logit_softcapping", None)
        if cap and implementation == "sdpa":
            return f"{kind} caps its attention scores (attn_logit_softcapping={cap}), which sdpa leaves out"
        rate = attention_dropout(module)
        if rate and implementation == "flex_attention":
            return f"{kind} has attention dropout of {rate}, which flex_attention does not support"
        if rate and not other_random_numbers:
            return (
                f"{kind} has attention dropout of {rate}, for which a fused kernel draws other random "
                "numbers; set it to 0, or allow it with other_random_numbers=True"
            )
    return None


def attention_dropout(module: nn.Module) -> float:
    """The rate at which an attention module drops weights; 0 for other modules."""
    if "Attention" not in type(module).__name__:
        return 0.0
    rates = [0.0]
    for name, value in [*vars(module).items(), *module._modules.items()]:
        if "drop" not in name or any(part in name for part in _OTHER_DROPOUT):
            continue
        rate = value.p if isinstance(value, nn.Dropout) else value
        if isinstance(rate, int | float) and not isinstance(rate, bool):
            rates.append(float(rate))
    return max(rates)


def _set_implementation(model: nn.Module, journal: Journal, implementation: str) -> None:
    seen: set[int] = set()

    def set_in(config: Any, where: str) -> None:
        if id(config) in seen or not hasattr(config, "_attn_implementation_internal"):
            return
        seen.add(id(config))
        if config._attn_implementation in _EAGER:
            what = f"_attn_implementation: {config._attn_implementation} -> {implementation}"
            journal.set(config, "_attn_implementation_internal", implementation, where, what)
        for key in getattr(config, "sub_configs", {}):
            set_in(getattr(config, key, None), f"{where}.{key}")

    for name, module in model.named_modules():
        for attribute, value in list(vars(module).items()):
            set_in(value, f"{name}.{attribute}".lstrip("."))
        # Some modules keep a copy of it.
        if vars(module).get("_attn_implementation", "") in _EAGER:
            journal.set(module, "_attn_implementation", implementation, name, "_attn_implementation")
