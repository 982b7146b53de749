"""The batch in parts, one after the other, with the gradients of the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from oomph.errors import UserError
from oomph.fixes.anatomy import is_hugging_face
from oomph.fixes.batches import batch_of
from oomph.fixes.fix import Fix, Patient, Place
from oomph.fixes.journal import Journal
from oomph.prediction import built
from oomph.workload import MicroBatches, Workload, rows_of

WEIGHTS = ("auto", "rows", "labels")
_KEYS = ("labels", "targets", "target", "label")
_UNSEEN = "a loss that compares rows of the batch with each other (contrastive) would change"


class MicroBatching(Fix):
    name = "micro_batches"
    kind = "exact"
    changes = "The batch goes through the model in parts, whose gradients add up to those of the whole."

    def places(self, patient: Patient) -> Iterable[Place]:
        workload, batch = patient.workload, batch_of(patient.workload)
        if workload.micro_batches is not None or _batch_statistics(patient.model) is not None:
            return
        try:
            rows = rows_of(batch)
        except UserError:
            return
        note = "; ".join([_UNSEEN, *_remarks(patient.model)])
        parts = 2
        while parts <= rows:
            if rows % parts == 0:
                yield Place(("batch",), {"parts": parts, "shifted": shifts_labels(patient.model)}, note)
            parts *= 2

    def change_workload(
        self,
        workload: Workload,
        *_: Any,
        parts: int = 2,
        weights: str = "auto",
        ignore_index: int = -100,
        shifted: bool | None = None,
    ) -> Workload:
        """`weights`: what a part counts by, its rows or its labels that are not `ignore_index`; "auto" takes
        labels where the batch has some for every token. `shifted`: the model drops each row's first label
        (Hugging Face causal models do); by default the model's class tells."""
        _check(self.name, parts, weights, ignore_index, shifted)
        if workload.micro_batches is not None:
            already = workload.micro_batches.parts
            raise UserError(f"fix {self.name!r}: the workload's batch comes in {already} parts already")
        if shifted is None:
            shifted = weights != "rows" and shifts_labels(built(workload))
        share: Callable[..., Any] | None = None
        if weights != "rows":
            share = partial(
                share_of_labels, ignore_index=ignore_index, shifted=shifted, needed=weights == "labels"
            )
        return replace(workload, micro_batches=MicroBatches(parts, share))

    def change_model(
        self,
        model: nn.Module,
        journal: Journal,
        *,
        parts: int = 2,
        weights: str = "auto",
        ignore_index: int = -100,
        shifted: bool | None = None,
    ) -> None:
        """Nothing is changed: the model is looked at."""
        name = _batch_statistics(model)
        if name is not None:
            raise UserError(
                f"fix {self.name!r}: {name} normalises by the statistics of the batch, so parts would give "
                "other results than the whole"
            )


def share_of_labels(
    part: Any, batch: Any, *, ignore_index: int, shifted: bool, needed: bool
) -> float | torch.Tensor:
    """What a part's mean loss counts in the batch's: its share of the labels that are counted."""
    if isinstance(batch, Mapping) and batch.get("num_items_in_batch") is not None:
        return 1.0  # the model divides by the whole's number of labels itself
    labels, own = _labels(batch, shifted), _labels(part, shifted)
    if labels is None or own is None:
        if needed:
            raise UserError(
                f"fix {MicroBatching.name!r}: weights='labels', but the batch has no labels for every token "
                f"under {', '.join(_KEYS)}"
            )
        return rows_of(part) / rows_of(batch)
    # Stays on the device: to ask for its value would make the host wait in every step.
    # In float64, so that a float64 loss keeps its precision.
    return (own != ignore_index).sum().double() / (labels != ignore_index).sum()


def _labels(batch: Any, shifted: bool) -> torch.Tensor | None:
    if not isinstance(batch, Mapping):
        return None
    for key in _KEYS:
        found = batch.get(key)
        if isinstance(found, torch.Tensor) and found.dim() >= 2 and not found.is_floating_point():
            return found[:, 1:] if shifted and key == "labels" else found
    return None


def shifts_labels(model: nn.Module) -> bool:
    """Does the model compare a token's prediction with the next label, as Hugging Face's causal ones do?"""
    if not is_hugging_face(model):
        return False
    kind = type(model).__name__
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    return kind.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "DoubleHeadsModel"))


def _batch_statistics(model: nn.Module) -> str | None:
    """The first module that looks at all rows of a batch in training."""
    return next((name for name, module in model.named_modules() if isinstance(module, _BatchNorm)), None)


def _remarks(model: nn.Module) -> list[str]:
    found = []
    if any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules()):
        found.append("dropout draws other masks")
    names = {type(module).__name__.lower() for module in model.modules()}
    if any("router" in name or "moe" in name or "experts" in name for name in names):
        found.append("auxiliary losses of a mixture of experts are averaged over parts")
    return found


def _check(fix: str, parts: Any, weights: Any, ignore_index: Any, shifted: Any) -> None:
    if isinstance(parts, bool) or not isinstance(parts, int) or parts < 2:
        raise UserError(f"fix {fix!r}: parts={parts!r} is not valid; give a whole number >= 2")
    if weights not in WEIGHTS:
        raise UserError(f"fix {fix!r}: weights={weights!r} is not valid; valid: {', '.join(WEIGHTS)}")
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise UserError(f"fix {fix!r}: ignore_index={ignore_index!r} is not valid; give a whole number")
    if shifted is not None and not isinstance(shifted, bool):
        raise UserError(f"fix {fix!r}: shifted={shifted!r} is not valid; valid: true, false")
