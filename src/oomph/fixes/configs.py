"""The config objects of models, Hugging Face's above all, which steer what their modules do."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from oomph.fixes.anatomy import configs
from oomph.fixes.journal import Journal


def give_own_configs(model: nn.Module, journal: Journal) -> None:
    """Configs are often shared with other models, and with the function that builds this one: use copies."""
    memo: dict[int, Any] = {}
    for name, module in model.named_modules():
        for attribute, value in list(vars(module).items()):
            if _is_config(attribute, value):
                own = copy.deepcopy(value, memo)
                journal.set(module, attribute, own, name, f"{attribute} is a copy of its own")


def _is_config(attribute: str, value: Any) -> bool:
    """Hugging Face's under any name; others, which may be of any class, where they are called that."""
    if hasattr(value, "_attn_implementation_internal"):
        return True
    return attribute == "config" and hasattr(value, "__dict__") and not isinstance(value, type | nn.Module)


def switch_off_cache(model: nn.Module, journal: Journal, why: str) -> None:
    """No cache of keys and values in training: the one for generation, which is on by default."""
    if any(getattr(config, "use_cache", False) for _, config in configs(model)):
        give_own_configs(model, journal)
    for where, config in configs(model):
        if getattr(config, "use_cache", False):
            journal.set(config, "use_cache", False, where, f"use_cache off: {why}")
