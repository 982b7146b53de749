"""All keys of a system's config, their other names, and where a key that someone wrote belongs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from typing import Any, get_type_hints

from oomph.errors import warn_deprecated
from oomph.systems import System
from oomph.training.config.data import DataConfig
from oomph.training.config.problems import nearest
from oomph.training.config.section import Section
from oomph.training.config.training import OptimizerConfig, OutputConfig, TrainingConfig

SECTIONS: Mapping[str, type[Section]] = {
    "data": DataConfig,
    "optimizer": OptimizerConfig,
    "training": TrainingConfig,
    "output": OutputConfig,
}
TOP = ("system", "form", "fixes")
_OLD_FORMS = {"sick": "naive", "healthy": "model"}

# The reports' names -> ours. The first target that the system has is meant.
ALIASES: Mapping[str, tuple[str, ...]] = {
    "accumulation": ("training.accumulate",),
    "attention_type": ("model.attention",),
    "batch_size": ("data.batch_size",),
    "batch_tokens": ("data.batch_tokens",),
    "context_length": ("data.seq_len",),
    "curriculum": ("data.curriculum",),
    "dataset": ("data.source",),
    "gradient_accumulation_steps": ("training.accumulate",),
    "gradient_checkpointing": ("training.gradient_checkpointing",),
    "grad_clip": ("training.clip",),
    "learning_rate": ("optimizer.learning_rate",),
    "lr": ("optimizer.learning_rate",),
    "max_length": ("data.seq_len",),
    "memory_chunk_size": ("model.kda_memory_chunk_size",),
    "model_size": ("model.preset",),
    "num_epochs": ("training.epochs",),
    "optimization.mixed_precision": ("model.optimization.mixed_precision",),
    "optimization.use_8bit": ("model.optimization.use_8bit",),
    "optimization.use_cpu_offload": ("model.optimization.use_cpu_offload",),
    "seed": ("training.seed",),
    "seq_len": ("data.seq_len",),
    "use_sparse_attention": ("model.sparse",),
    "vocab_size": ("model.vocab_size", "data.vocab_size"),
}


@dataclass(frozen=True)
class Schema:
    system: System

    @cached_property
    def model_keys(self) -> Mapping[str, Any]:
        """Dotted key below `model` -> its type; a dataclass in the config is keys of its own."""
        return dict(_typed_fields(self.system.config))

    @cached_property
    def keys(self) -> tuple[str, ...]:
        sections = [f"{name}.{key}" for name, section in SECTIONS.items() for key in section.model_fields]
        return (*TOP, "model.preset", *(f"model.{key}" for key in self.model_keys), *sections)

    def find(self, key: str) -> str | None:
        """The key that `key` stands for: itself, an alias, or one whose last part it is. None: there is none.

        An alias may stand by itself or in any section, since the reports kept them in sections of their own.
        """
        if key in self.keys:
            return key
        section, _, rest = key.partition(".")
        name = rest if section in (*SECTIONS, "model") and rest else key
        for target in ALIASES.get(name, ()):
            if target in self.keys:
                return target
        if name == key:  # by itself
            ends = [known for known in self.keys if _last(known) == name]
            return ends[0] if len(ends) == 1 else None
        return None

    def hint(self, key: str) -> str:
        """What a key that does not exist may have been meant for: one near it in its section, or anywhere."""
        section, _, name = key.rpartition(".")
        inside = {_last(known): known for known in self.keys if known.rpartition(".")[0] == section}
        if not section:
            inside |= {one: one for one in ("model", *SECTIONS)}
        anywhere = {_last(known): known for known in self.keys}
        anywhere |= {alias: alias for alias in ALIASES if self.find(alias)}
        known = {**anywhere, **inside}  # of two with the same name, the one in the section
        close = nearest(name, known)
        if close is not None:
            meant = self.find(known[close]) or known[close]
            name = f"{meant!r}" if _last(meant) == close else f"{close!r} (which is {meant!r})"
            return f"did you mean {name}?"
        if inside and section:
            return f"the keys of {section!r} are {', '.join(inside)}"
        return f"the sections are model, {', '.join(SECTIONS)}; besides them there are {', '.join(TOP)}"


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def converted(target: str, value: Any) -> Any:
    """The value for the target, where an older word is still accepted."""
    if target == "form" and isinstance(value, str) and value in _OLD_FORMS:
        warn_deprecated(f"form: {value}", f"form: {_OLD_FORMS[value]}")
        return _OLD_FORMS[value]
    if target == "model.sparse" and isinstance(value, bool):
        return "local" if value else None
    return value


def _typed_fields(config: type[Any], prefix: str = "") -> list[tuple[str, Any]]:
    hints = get_type_hints(config)
    found: list[tuple[str, Any]] = []
    for field in fields(config):
        hint = hints[field.name]
        if is_dataclass(hint) and isinstance(hint, type):
            found += _typed_fields(hint, f"{prefix}{field.name}.")
        else:
            found.append((f"{prefix}{field.name}", hint))
    return found
