"""Micro-batching: the batch goes through the model in parts, with the gradients of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from oomph.errors import UserError
from oomph.fixes.registry import Fix, FixContext, Target, check_choice, check_whole_number
from oomph.fixes.trainers import divide, divided, loss_condition, rows_of_pass, why_not_divided
from oomph.prediction import fake_model
from oomph.prediction.trainers import TrainingLoop
from oomph.torch_internals import tree_flatten_with_path, tree_leaves
from oomph.workload import MicroBatches, Workload, rows_of

_MOST_PARTS = 64  # that are proposed
WEIGHTS = ("auto", "rows", "labels")
LABEL_NAMES = ("labels", "targets", "target", "label")
_CAUSAL = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "DoubleHeadsModel")
# Names of tensors by which rows may count differently in the loss, whatever the labels are.
_WEIGHT_NAMES = (
    "mask loss_mask label_mask labels_mask target_mask targets_mask weight weights loss_weight loss_weights "
    "sample_weight sample_weights len lens length lengths seq_lens seq_lengths"
).split()
_ASSUMED = (
    "assumes a loss that is the mean over labels that count, or over rows where there are no labels; a sum, "
    "or a loss that compares rows of the batch with each other (contrastive), would change"
)
_SHIFTED = "each row's first label is taken not to count, as in Hugging Face's own loss"


class MicroBatching(Fix):
    name = "micro_batches"
    kind = "exact"
    changes = "The batch goes through the model in parts, whose gradients add up to those of the whole."

    def targets(self, context: FixContext) -> Iterable[Target]:
        if context.loop is not None:
            yield from _targets_of_loop(context, context.loop)
            return
        if context.workload.micro_batches is not None or _batch_norm(context.model) is not None:
            return
        try:
            rows = rows_of(context.batch)
        except UserError:
            return
        shifted = shifts_labels(context.model)
        note = "; ".join([*([_SHIFTED] if shifted else []), *_remarks(context.model)])
        condition = _condition(context.batch)
        for parts in _proposed_parts(rows):
            yield Target(("batch",), {"parts": parts}, note, condition, assumes=_ASSUMED)

    def change_loop(self, loop: TrainingLoop, *_: Any, parts: int = 2, **options: Any) -> str:
        if options:
            raise UserError(f"fix {self.name!r}: {', '.join(options)} is for Workloads; a script takes parts")
        check_whole_number(self.name, "parts", parts, 2)
        name = _batch_norm(loop.model)
        if name is not None:
            raise UserError(_of_batch_norm(name))
        return divide(loop, parts)

    def change_workload(
        self,
        workload: Workload,
        *_: Any,
        parts: int = 2,
        weights: str = "auto",
        labels: str | int | None = None,
        ignore_index: int = -100,
        shifted: bool | None = None,
    ) -> Workload:
        """`weights`: what a part's loss is weighted by: its share of the "rows", or of the "labels" that are
        not `ignore_index`; "auto" takes labels where they are named (labels, targets, target, label), else
        rows. `labels`: the name or the position of the labels in the batch, where they have another name.
        `shifted`: the model drops each row's first label, as Hugging Face causal models do; by default
        decided by the class of the model, or of one inside it."""
        check_whole_number(self.name, "parts", parts, 2)
        check_choice(self.name, "weights", weights, WEIGHTS)
        if labels is not None and (isinstance(labels, bool) or not isinstance(labels, str | int)):
            raise UserError(f"fix {self.name!r}: labels={labels!r} is not valid; give a name or a position")
        if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
            raise UserError(
                f"fix {self.name!r}: ignore_index={ignore_index!r} is not valid; give a whole number"
            )
        if workload.micro_batches is not None:
            already = workload.micro_batches.parts
            raise UserError(f"fix {self.name!r}: the workload's batch already comes in {already} parts")
        model = fake_model(workload)
        name = _batch_norm(model)
        if name is not None:
            raise UserError(_of_batch_norm(name))
        share: Callable[..., Any] | None = None  # of the rows
        if weights != "rows":
            share = partial(
                label_share,
                labels=labels,
                ignore_index=ignore_index,
                shifted=shifts_labels(model) if shifted is None else shifted,
                required=weights == "labels" or labels is not None,
            )
        return replace(workload, micro_batches=MicroBatches(parts, share))


def _proposed_parts(rows: int) -> list[int]:
    divisors = [parts for parts in range(2, min(rows, _MOST_PARTS) + 1) if rows % parts == 0]
    return [parts for parts in divisors if parts & (parts - 1) == 0] or divisors[:1]


def _targets_of_loop(context: FixContext, loop: TrainingLoop) -> Iterable[Target]:
    """By the Trainer's own arguments. The batch has the rows that the program moved to the GPU."""
    batch = context.prediction.batch
    if not batch or not batch[0].shape or _batch_norm(context.model) or why_not_divided(loop):
        return
    rows, condition = rows_of_pass(loop, batch[0].shape[0]), loss_condition(loop)
    for parts in _proposed_parts(rows):
        note = "; ".join([divided(loop, rows, parts), *_remarks(context.model)])
        yield Target(("batch",), {"parts": parts}, note, condition)


def label_share(
    part: Any, batch: Any, *, labels: str | int | None, ignore_index: int, shifted: bool, required: bool
) -> float | torch.Tensor:
    """The weight of a part's mean loss in the batch's: its share of the labels that count.

    Where the labels cannot be identified, its share of the rows.
    """
    if isinstance(batch, Mapping) and batch.get("num_items_in_batch") is not None:
        return 1.0  # the model divides by the batch's number of labels itself
    leaves, _ = tree_flatten_with_path(batch)
    position = _label_position(leaves, labels, rows_of(batch))
    if position is None:
        if required:
            raise UserError(
                f"fix {MicroBatching.name!r}: the batch has no tensor of whole numbers, with an entry for "
                f"every row, "
                + (f"at {labels!r}" if labels is not None else f"named {', '.join(LABEL_NAMES)}")
                + "; give labels=NAME or labels=POSITION, or weights=rows"
            )
        return rows_of(part) / rows_of(batch)
    path, whole = leaves[position]
    own = tree_leaves(part)[position]
    # Of the usual names, only "labels" is what Hugging Face models shift.
    if shifted and whole.dim() > 1 and (labels is not None or leaf_name(path) == "labels"):
        own, whole = own[:, 1:], whole[:, 1:]
    # Stays on the device: reading it would synchronize. In float64, for float64 losses.
    counted = (whole != ignore_index).sum().double().clamp(min=1)
    return (own != ignore_index).sum() / counted


def _label_position(leaves: Sequence[tuple[Any, Any]], labels: str | int | None, rows: int) -> int | None:
    """Which of the batch's leaves holds the labels: the one the user names, or one with a usual name."""
    # Labels on the host of a batch on a GPU are left: the share is computed where the loss is.
    on_host = all(leaf.device.type == "cpu" for _, leaf in leaves if isinstance(leaf, torch.Tensor))
    candidates = {
        position: leaf_name(path)
        for position, (path, leaf) in enumerate(leaves)
        if _is_whole_numbers(leaf, rows) and (on_host or leaf.device.type != "cpu")
    }
    if isinstance(labels, int):
        return labels if labels in candidates else None
    for wanted in LABEL_NAMES if labels is None else (labels,):
        for position, name in candidates.items():
            if name == wanted:
                return position
    return None


def _condition(batch: Any) -> str:
    """What the loss must be like where the batch does not determine the weights; "" where it does."""
    if isinstance(batch, Mapping) and batch.get("num_items_in_batch") is not None:
        return ""
    rows = rows_of(batch)
    names = [
        leaf_name(path)
        for path, leaf in tree_flatten_with_path(batch)[0]
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == rows
    ]
    weighting = next(
        (name for name in names if isinstance(name, str) and name.lower() in _WEIGHT_NAMES), None
    )
    if weighting is not None:
        return f"all rows count the same in the loss, whatever {weighting!r} of the batch says"
    if len(names) == 1 or any(name in LABEL_NAMES for name in names):
        return ""
    return (
        "all rows count the same in the loss: no tensor of the batch is named labels or targets (name it in "
        "labels=NAME or labels=POSITION)"
    )


def _is_whole_numbers(leaf: Any, rows: int) -> bool:
    return (
        isinstance(leaf, torch.Tensor)
        and leaf.dim() > 0
        and leaf.shape[0] == rows
        and leaf.numel() > 0
        and not (leaf.is_floating_point() or leaf.is_complex() or leaf.dtype == torch.bool)
    )


def leaf_name(path: Sequence[Any]) -> str | None:
    """A tensor's key or attribute in its batch; None in a tuple or list."""
    return getattr(path[-1], "key", None) or getattr(path[-1], "name", None) if path else None


def shifts_labels(model: nn.Module) -> bool:
    """Whether the model, or one inside it, compares predictions with the next label, as Hugging Face's
    causal models do."""
    classes = [kind.__name__ for kind in type(model).__mro__ if kind.__module__.startswith("transformers.")]
    if classes and getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    return any(name.endswith(_CAUSAL) for name in classes) or any(map(shifts_labels, model.children()))


def _of_batch_norm(name: str) -> str:
    return (
        f"fix {MicroBatching.name!r}: {name} normalises by the statistics of the batch, so parts would give "
        "other results than the whole"
    )


def _batch_norm(model: nn.Module) -> str | None:
    """The first module that uses statistics over the rows of a batch."""
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    return next((name for name, module in model.named_modules() if isinstance(module, kinds)), None)


def _remarks(model: nn.Module) -> list[str]:
    found = []
    if any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules()):
        found.append("dropout draws other masks")
    names = {type(module).__name__.lower() for module in model.modules()}
    if any("router" in name or "moe" in name or "experts" in name for name in names):
        found.append("auxiliary losses of a mixture of experts are averaged over parts")
    return found
