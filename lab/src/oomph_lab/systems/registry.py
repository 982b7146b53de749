"""The five reference systems by name. A system's modules are imported when one of them is needed."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from oomph.errors import UserError

if TYPE_CHECKING:
    from torch import nn

    from oomph_lab.systems.reports import Report

FORMS = ("model", "naive")


@dataclass(frozen=True)
class System:
    """One reference system: what its report describes, and what a training config needs to know.

    naive, model: what each form does, in one line.
    preset: the default preset.
    tokenizer: the default tokenizer; None for images.
    length: the field of the model's config that holds the sequence length and follows the data's, if any.
    seq_len: the default sequence length of the data.
    report_forms: the report's own fixes, in addition to FORMS.
    """

    name: str
    report: str
    title: str
    naive: str
    model: str
    config_name: str
    preset: str
    tokenizer: str | None = "bpe"
    length: str | None = None
    seq_len: int = 512
    report_forms: tuple[str, ...] = ()

    @property
    def forms(self) -> tuple[str, ...]:
        return (*FORMS, *self.report_forms)

    @property
    def has_text(self) -> bool:
        return self.tokenizer is not None

    @cached_property
    def config(self) -> type[Any]:
        """The dataclass that configures the model."""
        found: type[Any] = getattr(self._module(), self.config_name)
        return found

    @cached_property
    def presets(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._module().PRESETS
        return found

    @property
    def claims(self) -> list[dict[str, str]]:
        """The claims of the report, each with our figures, a verdict and the reason for it."""
        lines = files("oomph_lab.systems").joinpath("claims.csv").read_text(encoding="utf-8").splitlines()
        return [row for row in csv.DictReader(lines) if row.pop("report") == self.report]

    @property
    def story(self) -> Report:
        """What failed, the report's commands, and its forms."""
        from oomph_lab.systems.reports import REPORTS

        return REPORTS[self.name]

    def build(self, config: Any, form: str = "model", seq_len: int | None = None) -> nn.Module:
        """A model of `config`. seq_len: the tokens for which a naive form allocates caches in advance."""
        if form not in self.forms:
            raise UserError(f"form={form!r} is not valid; choose from {', '.join(map(repr, self.forms))}")
        made: nn.Module = (
            config.build() if form == "model" else self._module(".naive").build(config, form, seq_len=seq_len)
        )
        return made

    def _module(self, name: str = "") -> Any:
        return import_module(f"oomph_lab.systems.{self.name}{name}")


_ALL = (
    System(
        "hatchling",
        "000",
        "spiking Kimi delta attention",
        naive="a dk x dk transition and a dk x dv write for every token, then an associative scan over them",
        model="chunkwise WY form: no transition matrix is formed; one state per chunk of tokens is saved",
        config_name="HatchlingConfig",
        preset="hn_xs",
        length="context_length",
        report_forms=("chunked_updates",),
    ),
    System(
        "pythia",
        "001",
        "Pythia-70M with block-sparse attention",
        naive="one-hot vectors from a V x V identity; matrix products by broadcasting to [B, H, T, T, E]",
        model="embedding lookup, batched GEMM, fused linear cross-entropy; masked blocks are skipped",
        config_name="PythiaConfig",
        preset="report",
        tokenizer="words",
        length="seq_len",
        report_forms=("all_words", "all_batches"),
    ),
    System(
        "longctx",
        "002",
        "a 4B decoder at 131,072 tokens",
        naive="full logits, cast to fp32 before the loss; a rotary cache in every layer",
        model="fused linear cross-entropy, one shared rotary table, dense or native sparse attention",
        config_name="LongContextConfig",
        preset="4B",
        seq_len=4096,
        report_forms=("chunked_loss", "rope_on_cpu", "rope_rounded"),
    ),
    System(
        "npt",
        "003",
        "per-token low-rank weight deltas, set by attention",
        naive="the weight delta of every token is materialised: [B, S, d, f] at once, or token by token",
        model="h W + ((h A) * mod) B: no weight delta is formed",
        config_name="NPTConfig",
        preset="default",
        report_forms=("per_token", "per_chunk", "per_token_offloaded"),
    ),
    System(
        "ginr",
        "004",
        "implicit neural representation of images: Mamba encoder, SCENT-style decoder",
        naive="eager self-attention over 1,024 query positions in nine layers, for every image",
        model="fused attention; what depends on positions alone is computed once per batch",
        config_name="GINRConfig",
        preset="default",
        tokenizer=None,
    ),
)
SYSTEMS: Mapping[str, System] = {system.name: system for system in _ALL}


def find_system(name: str) -> System:
    """By its name, or by the number of its report."""
    for system in _ALL:
        if name in (system.name, system.report):
            return system
    raise UserError(
        f"there is no system {name!r}; choose from {', '.join(SYSTEMS)}, or a report's number, 000 to 004"
    )
