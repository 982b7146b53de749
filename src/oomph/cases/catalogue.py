"""The five systems by name: what each report's code did, and what the healthy form does instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module

from oomph.cases.claims import Claim
from oomph.errors import UserError


@dataclass(frozen=True)
class Case:
    name: str
    report: str
    title: str
    sick: str
    healthy: str

    @property
    def claims(self) -> tuple[Claim, ...]:
        """What the report claims; imported when it is asked for."""
        return tuple(import_module(f"oomph.cases.{self.name}.claims").CLAIMS)


_ALL = (
    Case(
        "hatchling",
        "000",
        "spiking Kimi delta attention",
        "a dk x dk transition and a dk x dv write for every token, then a scan over them",
        "chunks in the WY form: no transition is made, one state per 64 tokens is kept",
    ),
    Case(
        "pythia",
        "001",
        "Pythia-70M with block-sparse attention",
        "one-hot vectors from an identity of V x V, matrix products by broadcasting to [B, H, T, T, E]",
        "gathered embedding, real products, fused loss, blocks left out that are not seen",
    ),
    Case(
        "longctx",
        "002",
        "a 4B decoder at 131,072 tokens",
        "full logits, cast to fp32 before the loss; a rotary cache in every layer",
        "a loss that never holds the logits, one rotary table, dense or native sparse attention",
    ),
    Case(
        "npt",
        "003",
        "weights that attention changes for every token",
        "the change of the weight made whole for all tokens, [B, S, d, f], or token by token",
        "h W + ((h A) * mod) B: no change of a weight is ever made",
    ),
    Case(
        "ginr",
        "004",
        "images as functions of position, Mamba encoder, SCENT's decoder",
        "eager self-attention over 1,024 positions in nine places, for every image",
        "fused attention; what depends on positions alone is computed for one image",
    ),
)
CASES: Mapping[str, Case] = {case.name: case for case in _ALL}


def find(name: str) -> Case:
    """By its name, or by the number of its report."""
    for case in _ALL:
        if name in (case.name, case.report):
            return case
    raise UserError(f"there is no case {name!r}; choose from {', '.join(CASES)}")
