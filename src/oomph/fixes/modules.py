"""Module discovery: modules by name, and configs of Hugging Face models."""

from __future__ import annotations

import copy
import difflib
import math
import re
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from oomph.errors import UserError
from oomph.fixes.journal import Journal
from oomph.nn.blocks import block_names, has_children
from oomph.ops.common import autocast_enabled
from oomph.torch_internals import FakeTensor, current_functorch_transform

_CHECKPOINTING_FLAGS = ("gradient_checkpointing", "grad_checkpointing")  # Hugging Face's, timm's


# --------------------------------------------------------------------------------- modules that users name


def names_option(fix: str, option: str, value: object) -> list[str]:
    """The module names in an option; a single one may be given without a list."""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names) or not names:
        raise UserError(f"fix {fix!r}: {option}={value!r} is not valid; give a list of names of modules")
    return list(dict.fromkeys(names))


def module_at(model: nn.Module, name: str, fix: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        close = difflib.get_close_matches(name, (known for known, _ in model.named_modules()), n=1)
        children = ", ".join(known for known, _ in model.named_children())
        hint = f"did you mean {close[0]!r}?" if close else f"its modules are {children}"
        raise UserError(f"fix {fix!r}: the model has no module {name!r}; {hint}") from None


def name_of(model: nn.Module, wanted: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is wanted)


def chosen_modules(
    model: nn.Module, names: object, fix: str, option: str = "modules"
) -> dict[str, nn.Module]:
    """The modules that an option names. One that the model lists several times is returned once, by its first
    name.

    In a name, `*` matches one part between dots: "layers.*.mlp" is the mlp of every layer.
    """
    found: dict[str, nn.Module] = {}
    for name in _expand_wildcards(model, names_option(fix, option, names), fix):
        module = module_at(model, name, fix)
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            member = next(iter(module._modules), "0")
            raise UserError(
                f"fix {fix!r}: {name!r} is a {type(module).__name__}, which has no forward; name its "
                f"members, such as '{name}.{member}'"
            )
        found[name_of(model, module)] = module
    return found


def modules_with_code(model: nn.Module, modules: object, fix: str) -> dict[str, nn.Module]:
    """The modules of an option `modules`, and those inside them whose class is not torch's (or
    nn.Sequential), by name; for None, those of the whole model.

    A fix that runs forwards in a mode wraps them all, and the outermost one enters the mode: a checkpoint
    calls modules inside again by themselves in backward, and must compute the same.
    """
    found: dict[nn.Module, str] = {}
    for name, root in chosen_modules(model, [""] if modules is None else modules, fix).items():
        for own, module in root.named_modules():
            of_torch = type(module).__module__.startswith("torch.")
            if not own or not of_torch or isinstance(module, nn.Sequential):
                found.setdefault(module, _join(name, own))
    return {name: module for module, name in found.items()}


def _expand_wildcards(model: nn.Module, names: Sequence[str], fix: str) -> list[str]:
    found: list[str] = []
    for name in names:
        if "*" not in name:
            found.append(name)
            continue
        pattern = re.compile(re.escape(name).replace(r"\*", "[^.]*"))
        matching = [known for known, _ in model.named_modules() if pattern.fullmatch(known)]
        if not matching:
            raise UserError(f"fix {fix!r}: the model has no module like {name!r}")
        found += matching
    return found


def chosen_blocks(model: nn.Module, blocks: object, fix: str) -> dict[str, nn.Module]:
    """The modules of an option `blocks`; for None, every repeated block. UserError where there is none."""
    names = block_names(model) if blocks is None else blocks
    if blocks is None and not names:
        raise _no_blocks_error(model, fix)
    return chosen_modules(model, names, fix, "blocks")


def _no_blocks_error(model: nn.Module, fix: str) -> UserError:
    """Suggests modules that can be named instead."""
    sizes = {
        name: sum(parameter.numel() for parameter in module.parameters())
        for name, module in model.named_modules()
        if name and has_children(module) and not isinstance(module, nn.ModuleList | nn.ModuleDict)
    }
    total = sum(parameter.numel() for parameter in model.parameters())
    # A module that holds nearly the whole model saves nothing: its recomputation needs the same peak.
    shown = [name for name in sorted(sizes, key=lambda name: -sizes[name]) if sizes[name] <= 0.7 * total][:3]
    problem = f"fix {fix!r}: no list of blocks found"
    if not shown:
        return UserError(f"{problem}, and no module to name instead; make the blocks modules of their own")
    return UserError(
        f"{problem}; name modules, such as blocks={shown[0]} (the largest are {', '.join(shown)})"
    )


# ------------------------------------------------------------------------------------ what a module is


def is_plain_linear(module: nn.Module) -> bool:
    """An nn.Linear and nothing else: not quantised, not parametrized, no adapter, no other fix."""
    return (
        type(module) is nn.Linear
        and is_plain_parameter(module.weight)
        and not hasattr(module, "parametrizations")
        and "forward" not in vars(module)
    )


def is_plain_call(linear: nn.Linear, x: Any) -> bool:
    """Whether eager code calls the layer with a plain tensor, in dtypes that F.linear accepts.

    Tracers, transforms of torch.func and errors are left to torch.
    """
    if not (type(x) in (torch.Tensor, nn.Parameter) or isinstance(x, FakeTensor)) or x.dim() < 1:
        return False
    dtypes = {x.dtype, linear.weight.dtype, *(() if linear.bias is None else (linear.bias.dtype,))}
    return (
        x.is_floating_point()
        and x.shape[-1] == linear.in_features
        and (len(dtypes) == 1 or (autocast_enabled(x) and torch.float64 not in dtypes))
        and x.device == linear.weight.device
        and is_plain_parameter(linear.weight)
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and current_functorch_transform() is None
    )


def is_plain_parameter(tensor: object) -> bool:
    """Of no tensor subclass, except the fake tensor that represents a plain parameter in a prediction."""
    return type(tensor) is nn.Parameter or (
        isinstance(tensor, FakeTensor) and isinstance(tensor, nn.Parameter)
    )


def has_data(tensor: torch.Tensor) -> bool:
    """False in a prediction and on the meta device."""
    return not isinstance(tensor, FakeTensor) and tensor.device.type != "meta"


def model_id(model: nn.Module) -> str:
    """`GPT2LMHeadModel 124439808 5f0c3a1b`: class, parameters, and a hash of their names and shapes."""
    shapes = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    number, code = sum(math.prod(shape) for _, shape in shapes), zlib.crc32(repr(shapes).encode())
    return f"{type(model).__name__} {number} {code:08x}"


def check_model_id(wanted: str, model: nn.Module) -> None:
    """UserError where a plan was made for another model."""
    if wanted and (found := model_id(model)) != wanted:
        given, own = (f"{model_in_words(each)} ({each.rpartition(' ')[2]})" for each in (wanted, found))
        raise UserError(f"the plan is for {given}, not for {own}; make one with `oomph fit`")


def model_in_words(id: str) -> str:
    name, _, rest = id.partition(" ")
    return f"{name}, {int(rest.split()[0]):,} parameters" if rest else ""


def own_checkpointing(model: nn.Module) -> str | None:
    """The first module whose own activation checkpointing is on, in words; None where there is none."""
    for name, module in model.named_modules():
        for flag in _CHECKPOINTING_FLAGS:
            if getattr(module, flag, False) is True:
                return f"{name or 'the model'} checkpoints activations by itself ({flag})"
    return None


def refuse_own_checkpointing(model: nn.Module, fix: str) -> None:
    where = own_checkpointing(model)
    if where is not None:
        raise UserError(f"fix {fix!r}: {where}; turn that off and use the fix 'activation_checkpointing'")


def check_can_be_changed(model: nn.Module) -> None:
    """UserError for scripted, compiled, wrapped or sharded models, whose modules cannot be changed."""
    kind = type(model).__name__
    if isinstance(model, torch.jit.ScriptModule):
        raise UserError("the model is scripted by torch.jit, so it cannot be changed; apply fixes before")
    if kind == "OptimizedModule" or any(m._compiled_call_impl is not None for m in model.modules()):
        raise UserError("the model is compiled; apply fixes first, then torch.compile the result")
    wrappers = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    for module in model.modules():
        if isinstance(module, wrappers):
            kind = type(module).__name__
            raise UserError(f"the model is wrapped in {kind}; apply fixes to the model inside, then wrap it")
    if any(type(m).__name__ in ("FullyShardedDataParallel", "DeepSpeedEngine") for m in model.modules()):
        raise UserError("the model is sharded already; apply fixes to the model before it is sharded")


# ------------------------------------------------------------------------------------------- configs


def configs(model: nn.Module) -> list[tuple[str, Any]]:
    """The distinct `config` objects of its modules, named: an encoder and a decoder may have their own."""
    found: dict[int, tuple[str, Any]] = {}
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        if config is not None:
            found.setdefault(id(config), (_join(name, "config"), config))
    return list(found.values())


def copy_configs(model: nn.Module, journal: Journal) -> None:
    """Give the model its own config objects: they are often shared with other models and the factory."""
    memo: dict[int, Any] = {}
    for name, module in model.named_modules():
        for attribute, value in list(vars(module).items()):
            if _is_config(attribute, value):
                own = copy.deepcopy(value, memo)
                journal.set(module, attribute, own, name, f"{attribute} is a copy of its own")


def _is_config(attribute: str, value: Any) -> bool:
    """Hugging Face's under any attribute name; of any other class where the attribute is `config`."""
    if hasattr(value, "_attn_implementation_internal"):
        return True
    return attribute == "config" and hasattr(value, "__dict__") and not isinstance(value, type | nn.Module)


def disable_kv_cache(model: nn.Module, journal: Journal, why: str) -> None:
    """Turn off the key-value cache, which Hugging Face models fill by default in training, too."""
    if any(getattr(config, "use_cache", False) for _, config in configs(model)):
        copy_configs(model, journal)
    for where, config in configs(model):
        if getattr(config, "use_cache", False):
            journal.set(config, "use_cache", False, where, f"use_cache off: {why}")


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}".strip(".")
