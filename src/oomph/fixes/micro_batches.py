"""The batch in parts, one after the other, with the gradients of the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_flatten_with_path, tree_leaves

from oomph.errors import UserError
from oomph.fixes.batches import batch_of
from oomph.fixes.journal import Journal
from oomph.fixes.registry import Fix, FixContext, Target
from oomph.prediction import built
from oomph.workload import MicroBatches, Workload, rows_of

WEIGHTS = ("auto", "rows", "labels")
_KEYS = ("labels", "targets", "target", "label")
_CAUSAL = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "DoubleHeadsModel")
_ASSUMES = "holds for a loss that is the mean over labels that count, or over rows where there are no labels"
_SHIFTED = "each row's first label is taken not to count, as in Hugging Face's own loss"
# Of rows that do not count alike, whatever the labels are.
_WEIGHING = (
    "mask loss_mask label_mask labels_mask target_mask targets_mask weight weights loss_weight loss_weights "
    "sample_weight sample_weights len lens length lengths seq_lens seq_lengths"
).split()
_UNSEEN = "a sum, or a loss that compares rows of the batch with each other (contrastive), would change"


class MicroBatching(Fix):
    name = "micro_batches"
    only_in_workloads = True
    kind = "exact"
    changes = "The batch goes through the model in parts, whose gradients add up to those of the whole."

    def targets(self, context: FixContext) -> Iterable[Target]:
        workload, batch = context.workload, batch_of(context.workload)
        if workload.micro_batches is not None or _batch_statistics(context.model) is not None:
            return
        try:
            rows = rows_of(batch)
        except UserError:
            return
        shifted = shifts_labels(context.model)
        note = "; ".join([_ASSUMES, *([_SHIFTED] if shifted else []), _UNSEEN, *_remarks(context.model)])
        condition = _condition(batch)
        parts = 2
        while parts <= rows:
            if rows % parts == 0:
                yield Target(("batch",), {"parts": parts, "shifted": shifted}, note, condition)
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
        labels where the batch has some, under a usual name or none: where all of them count, rows and labels
        are the same. `shifted`: the model drops each row's first label (Hugging Face causal models do); by
        default the class of the model, or of one inside it, tells."""
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
    pairs = _labels(part, batch, shifted)
    if not pairs:
        if needed:
            raise UserError(
                f"fix {MicroBatching.name!r}: weights='labels', but the batch has no labels: no tensor of "
                "whole numbers with an entry for every row"
            )
        return rows_of(part) / rows_of(batch)
    # Stays on the device: to ask for its value would make the host wait in every step.
    # In float64, so that a float64 loss keeps its precision.
    counted = torch.stack([(whole != ignore_index).sum() for _, whole in pairs]).double()
    shares = torch.stack([(own != ignore_index).sum() for own, _ in pairs]) / counted.clamp(min=1)
    # Without a name, labels are what holds the most that does not count: inputs hold none.
    rates = torch.stack([counted[place] / whole.numel() for place, (_, whole) in enumerate(pairs)])
    return shares.index_select(0, rates.argmin().reshape(1)).squeeze(0)


def _labels(part: Any, batch: Any, shifted: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The labels of the part and of the batch: the tensor under a usual name, or else all that could be."""
    rows, found = rows_of(batch), {}
    leaves, _ = tree_flatten_with_path(batch)
    on_host = all(leaf.device.type == "cpu" for _, leaf in leaves if isinstance(leaf, torch.Tensor))
    for (path, whole), own in zip(leaves, tree_leaves(part), strict=True):
        if _may_be_labels(whole, rows) and (on_host or whole.device.type != "cpu"):
            cut = shifted and whole.dim() > 1 and _name(path) in ("labels", None)
            found[path] = (own[:, 1:], whole[:, 1:]) if cut else (own, whole)
    for key in _KEYS:
        for path, pair in found.items():
            if _name(path) == key:
                return [pair]
    return list(found.values())


def _condition(batch: Any) -> str:
    """What the loss must be like where the batch does not tell what its parts count; "" where it does."""
    if isinstance(batch, Mapping) and batch.get("num_items_in_batch") is not None:
        return ""
    rows = rows_of(batch)
    tensors = [
        (_name(path), leaf)
        for path, leaf in tree_flatten_with_path(batch)[0]
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == rows
    ]
    names = [name for name, _ in tensors]
    weighing = next((name for name in names if isinstance(name, str) and name.lower() in _WEIGHING), None)
    if weighing is not None:
        return f"all rows count the same in the loss, whatever {weighing!r} of the batch says"
    if len(tensors) == 1 or any(name in _KEYS for name in names):
        return ""
    # Real numbers, then whole ones: an input and its labels.
    if len(tensors) == 2 and tensors[0][1].is_floating_point() and _may_be_labels(tensors[1][1], rows):
        return ""
    return (
        "all rows count the same in the loss, but for labels of -100: no tensor of the batch is named labels "
        "or targets"
    )


def _may_be_labels(leaf: Any, rows: int) -> bool:
    return (
        isinstance(leaf, torch.Tensor)
        and leaf.dim() > 0
        and leaf.shape[0] == rows
        and leaf.numel() > 0
        and not (leaf.is_floating_point() or leaf.is_complex() or leaf.dtype == torch.bool)
    )


def _name(path: Sequence[Any]) -> str | None:
    """What a tensor is called in its batch; None in a tuple or list."""
    return getattr(path[-1], "key", None) or getattr(path[-1], "name", None) if path else None


def shifts_labels(model: nn.Module) -> bool:
    """Does the model compare a token's prediction with the next label, as Hugging Face's causal ones do?

    It may be inside another: a wrapper of the user's own, or an adapter's.
    """
    theirs = [kind.__name__ for kind in type(model).__mro__ if kind.__module__.startswith("transformers.")]
    if theirs and getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    return any(name.endswith(_CAUSAL) for name in theirs) or any(map(shifts_labels, model.children()))


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
