"""A weight that changes from token to token, used without making the weights of all tokens."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from functools import partial

from torch import nn

from oomph.errors import UserError
from oomph.fixes.deferral.quiet_calls import QuietCalls
from oomph.fixes.journal import Journal, WrappedForward
from oomph.fixes.modules import NamedModule, module_at, repeated_submodules
from oomph.fixes.outer_products import without_deltas
from oomph.fixes.registry import Fix, FixContext, Target

_PRODUCT = re.compile(r"einsum|unsqueeze|None\]|bmm|matmul|outer|@ ")


class ModulatedLinear(Fix):
    name = "modulated_linear"
    kind = "exact"
    changes = "Weights that differ per token by a low-rank delta are applied without making the deltas."

    def targets(self, context: FixContext) -> Iterable[Target]:
        """Where something at the peak is a weight's matrix, many times."""
        weights = {tuple(one.shape) for one in context.model.parameters() if one.dim() == 2}
        weights |= {shape[::-1] for shape in weights}
        made_in = {
            alive.allocation.module
            for alive in context.prediction.at_peak
            if len(alive.allocation.shape) > 2
            and alive.allocation.kind in ("activation", "temporary")
            and _rank_two_up(alive.allocation.shape, weights)
        }
        # Made in one module, and used in the one that called it.
        callers = sorted({name.rpartition(".")[0] for name in made_in})
        outermost = [
            name for name in callers if not any(_is_inside(name, other) for other in callers if other != name)
        ]
        if outermost and not any(_is_fixed(context.model.get_submodule(name)) for name in outermost):
            yield Target(tuple(sorted(made_in)), {"modules": outermost})

    def change_model(
        self, model: nn.Module, journal: Journal, *, modules: Sequence[str] | None = None
    ) -> None:
        """`modules`: in whose forward weights are changed and used; by default the whole model."""
        if isinstance(modules, str) or not isinstance(modules, Sequence | None):
            raise UserError(
                f"fix {self.name!r}: modules={modules!r} is not valid; valid: a list of names, None"
            )
        wrapped: set[int] = set()
        for name in [""] if modules is None else modules:
            whole = module_at(model, name, self.name)
            # Modules inside as well: a checkpoint calls them again by themselves, and must find the same.
            products = [NamedModule(*one) for one in whole.named_modules() if _may_make_deltas(one[1])]
            for own, module in [NamedModule("", whole), *repeated_submodules(whole), *products]:
                if id(module) in wrapped or not _has_code(module):
                    continue
                wrapped.add(id(module))
                path = ".".join(part for part in (name, own) if part)
                around = partial(without_deltas, quiet=QuietCalls())
                journal.wrap_forward(module, around, path, "makes no weight per token")
        if not wrapped:
            raise UserError(f"fix {self.name!r}: there is no module in {modules!r} that could make a delta")


def _has_code(module: nn.Module) -> bool:
    torch_s_own = type(module).__module__.startswith("torch.")
    return not torch_s_own or (isinstance(module, nn.Sequential) and len(module) > 0)


def _may_make_deltas(module: nn.Module) -> bool:
    """Its own code multiplies, or it has parameters that no layer of its parts uses."""
    if type(module).__module__.startswith("torch."):
        return False
    if module._parameters:
        return True
    try:
        return _PRODUCT.search(inspect.getsource(type(module))) is not None
    except (OSError, TypeError):
        return True


def _rank_two_up(shape: tuple[int, ...], weights: set[tuple[int, ...]]) -> bool:
    return shape[-2:] in weights and min(shape[-2:]) > 1


def _is_inside(name: str, other: str) -> bool:
    return other == "" or name.startswith(other + ".")


def _is_fixed(module: nn.Module) -> bool:
    forward = vars(module).get("forward")
    while isinstance(forward, WrappedForward):
        if getattr(forward.around, "func", None) is without_deltas:
            return True
        forward = forward.inner
    return False
