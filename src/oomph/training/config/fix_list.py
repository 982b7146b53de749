"""The list `fixes`: words as after `--fix`, or {fix: ..., options: ...} as `oomph fixes --json` has them."""

from __future__ import annotations

from itertools import combinations
from typing import Any

from oomph.errors import UserError
from oomph.records import FixUse
from oomph.training.config.problems import Problems
from oomph.training.config.training import TrainingConfig


def read_fixes(given: Any, training: TrainingConfig, problems: Problems) -> tuple[FixUse, ...]:
    # Here, so that a file that does not exist is told without waiting for torch.
    from oomph.fixes import uses_of
    from oomph.fixes.registry import conflict, same_use

    listed = [] if given is None else given if isinstance(given, list) else [given]
    uses: list[FixUse] = []
    for number, one in enumerate(listed):
        try:
            uses += uses_of([one])
        except UserError as error:
            problems.add(f"fixes.{number}", f"= {one!r} is not valid; {error}")
    if training.gradient_checkpointing and not any(use.fix == "activation_checkpointing" for use in uses):
        uses.append(FixUse("activation_checkpointing"))
    for one, other in combinations(uses, 2):
        if not same_use(one, other) and (why := conflict(one, other)):
            both = one.fix if one.fix == other.fix else f"{one.fix}.{other.fix}"
            problems.add(f"fixes.{both}", f"cannot be combined; {why}")
    if any(use.fix == "optimizer_in_backward" for use in uses):
        _check_gradients_are_not_needed(training, problems)
    if training.cuda_graph:
        _check_can_be_recorded(uses, training, problems)
    return tuple(uses)


def _check_gradients_are_not_needed(training: TrainingConfig, problems: Problems) -> None:
    """The fix uses up each gradient as soon as it is there."""
    why = "with the fix 'optimizer_in_backward' no gradient is left at the end of backward"
    if training.clip is not None:
        problems.refuse("training.clip", training.clip, f"{why}; give null")
    if training.accumulate > 1:
        problems.refuse("training.accumulate", training.accumulate, f"{why}; give 1")


# What a pass does besides starting kernels: reading the generator's state, copying to the host, stepping; and
# freeing the gradients that a replay adds to.
_NOT_RECORDED = (
    "activation_checkpointing",
    "activation_offloading",
    "optimizer_in_backward",
    "optimizer_cpu_offload",
    "set_to_none",
)


def _check_can_be_recorded(uses: list[FixUse], training: TrainingConfig, problems: Problems) -> None:
    for use in uses:
        if use.fix in _NOT_RECORDED:
            advice = f"a pass with the fix {use.fix!r} cannot be recorded: give false, or leave the fix out"
            problems.refuse("training.cuda_graph", True, advice)
    if training.autocast == "float16":
        problems.refuse(
            "training.cuda_graph", True, "float16 scales the loss anew at every step: give bfloat16"
        )
