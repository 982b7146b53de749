"""Fewer layers made plastic: for models that convert some of a frozen model's layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from oomph.errors import UserError
from oomph.fixes.model_options import option, with_option
from oomph.fixes.registry import Fix, FixContext, Target
from oomph.prediction import built
from oomph.workload import Workload

_FIELD = "convert_layers"


class FewerConvertedLayers(Fix):
    name = "fewer_converted_layers"
    kind = "training"
    changes = "Fewer of the frozen model's layers are converted, the last ones: fewer learn."

    def targets(self, context: FixContext) -> Iterable[Target]:
        if option(context.workload, _FIELD) is None:
            return
        now = _count(context.model)
        if now >= 2:
            yield Target((_FIELD,), {"layers": now // 2}, f"the last {now // 2} layers instead of {now}")

    def change_workload(self, workload: Workload, *_: Any, layers: int) -> Workload:
        """`layers`: how many are converted, counted from the last."""
        changed = with_option(workload, _FIELD, layers, self.name)
        now = _count(built(workload))
        if isinstance(layers, bool) or not isinstance(layers, int) or not 1 <= layers < now:
            raise UserError(
                f"fix {self.name!r}: layers={layers!r} is not valid; {now} are converted: give 1 to {now - 1}"
            )
        return changed


def _count(model: Any) -> int:
    return len(getattr(model, "converted", ()))
