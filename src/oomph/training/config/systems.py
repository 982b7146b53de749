"""What configs need to know of the five systems. Their modules are imported when one is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class System:
    """preset: the one that is taken where none is named.

    length: the field of the model's config that says how many tokens it is made for, and follows the data
        unless it is given; None where the model does not ask. seq_len: of the data, where nothing says it.
    """

    name: str
    module: str
    config_name: str
    preset: str
    tokenizer: str | None = "bpe"  # None: images
    length: str | None = None
    seq_len: int = 512

    @property
    def has_text(self) -> bool:
        return self.tokenizer is not None

    @cached_property
    def config(self) -> type[Any]:
        found: type[Any] = getattr(import_module(self.module), self.config_name)
        return found

    @cached_property
    def presets(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = import_module(self.module).PRESETS
        return found


SYSTEMS: Mapping[str, System] = {
    system.name: system
    for system in (
        System("hatchling", "oomph.models.hatchling", "HatchlingConfig", "hn_xs", length="context_length"),
        System("pythia", "oomph.models.pythia", "PythiaConfig", "report", "words", length="seq_len"),
        System("longctx", "oomph.models.longctx", "LongContextConfig", "4B", seq_len=4096),
        System("npt", "oomph.models.npt", "NPTConfig", "default"),
        System("ginr", "oomph.models.ginr", "GINRConfig", "default", tokenizer=None),
    )
}
