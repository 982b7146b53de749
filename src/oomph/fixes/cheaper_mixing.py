"""Queries mixed by less than self-attention: for decoders that offer it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from oomph.errors import UserError
from oomph.fixes.model_options import option, with_option
from oomph.fixes.registry import Fix, FixContext, Target
from oomph.workload import Workload

_FIELD = "query_mixing"
_KINDS = ("self", "cross", "feedforward", "residual")  # each cheaper than the one before it


class CheaperMixing(Fix):
    name = "cheaper_mixing"
    kind = "training"
    changes = "The decoder's queries attend to the latents, or to nothing, instead of each other."

    def targets(self, context: FixContext) -> Iterable[Target]:
        now = option(context.workload, _FIELD)
        for kind in _cheaper(now):
            yield Target((_FIELD,), {"mixing": kind}, f"{kind} instead of {now}")

    def change_workload(self, workload: Workload, *_: Any, mixing: str) -> Workload:
        """`mixing`: "cross", "feedforward" or "residual"."""
        now = option(workload, _FIELD)
        if now is not None and mixing not in _cheaper(now):
            valid = ", ".join(_cheaper(now)) or "nothing"
            raise UserError(f"fix {self.name!r}: mixing={mixing!r} is not valid; cheaper than {now}: {valid}")
        return with_option(workload, _FIELD, mixing, self.name)


def _cheaper(now: Any) -> tuple[str, ...]:
    return _KINDS[_KINDS.index(now) + 1 :] if now in _KINDS else ()
