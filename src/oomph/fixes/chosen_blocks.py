"""The blocks that a fix puts something around, which changes what they save for backward."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from oomph.errors import UserError
from oomph.fixes.anatomy import module_at, name_of

_SHOWN = 3
_MOST_OF_A_MODEL = 0.7
_FLAGS = ("gradient_checkpointing", "grad_checkpointing")  # Hugging Face's, timm's


def blocks_at(model: nn.Module, names: Sequence[str], fix: str) -> dict[str, nn.Module]:
    """By name, each once and by its first name, though a model may list one block several times.

    In a name, `*` stands for one part between dots: "layers.*.mlp" is the mlp of every layer.
    """
    found: dict[str, nn.Module] = {}
    for name in _spelt_out(model, names, fix):
        module = module_at(model, name, fix)
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            member = next(iter(module._modules), "0")
            raise UserError(
                f"fix {fix!r}: {name!r} is a {type(module).__name__}, which has no forward; name its "
                f"members, such as '{name}.{member}'"
            )
        found[name_of(model, module)] = module
    return found


def no_blocks_found(model: nn.Module, fix: str) -> UserError:
    """What to say where a model has no list of blocks: modules of its own that could be named instead."""
    sizes = {
        name: sum(parameter.numel() for parameter in module.parameters())
        for name, module in model.named_modules()
        if name and not isinstance(module, nn.ModuleList | nn.ModuleDict)
    }
    whole = sum(parameter.numel() for parameter in model.parameters())
    largest = sorted((name for name in sizes if sizes[name]), key=lambda name: -sizes[name])
    with_parts = [name for name in largest if next(model.get_submodule(name).children(), None) is not None]
    # One that holds nearly everything would be computed again while all of it is there.
    named = [name for name in with_parts if sizes[name] <= _MOST_OF_A_MODEL * whole] or with_parts
    shown = (named or largest)[:_SHOWN]
    said = f"fix {fix!r}: no list of blocks found"
    if not shown:
        return UserError(f"{said}, and no module in the model has parameters")
    listed = ", ".join(shown)
    if named:
        return UserError(f"{said}; name modules, such as blocks={shown[0]} (the largest are {listed})")
    return UserError(
        f"{said}: the model's own forward does the work, and no module in it has parts (the largest are "
        f"{listed}); make the blocks modules of their own"
    )


def _spelt_out(model: nn.Module, names: Sequence[str], fix: str) -> list[str]:
    found: list[str] = []
    for name in names:
        if "*" not in name:
            found.append(name)
            continue
        parts = [re.escape(part).replace(r"\*", "[^.]*") for part in name.split(".")]
        pattern = re.compile(r"\.".join(parts))
        matching = [known for known, _ in model.named_modules() if pattern.fullmatch(known)]
        if not matching:
            raise UserError(f"fix {fix!r}: the model has no module like {name!r}")
        found += matching
    return found


def recomputes_itself(model: nn.Module) -> str | None:
    """The first module whose own checkpointing is on, in words; None where there is none."""
    for name, module in model.named_modules():
        for flag in _FLAGS:
            if getattr(module, flag, False) is True:
                return f"{name or 'the model'} recomputes by itself ({flag})"
    return None


def refuse_own_checkpointing(model: nn.Module, fix: str) -> None:
    where = recomputes_itself(model)
    if where is not None:
        raise UserError(f"fix {fix!r}: {where}; switch that off and use the fix 'recompute'")
