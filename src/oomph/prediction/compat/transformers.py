"""transformers: a Trainer as a target, and when the Trainer that runs will evaluate."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

from oomph.prediction.compat.library import Library, class_names
from oomph.prediction.patches import Patches

if TYPE_CHECKING:
    from oomph.prediction.tracer.tracer import Tracer

TRAINER = "transformers.trainer.Trainer"
_STEPS = 3


def _as_program(target: Any) -> Any:
    return _trainer_steps(target) if TRAINER in class_names(target) else target


def _trainer_steps(trainer: Any) -> Callable[[], None]:
    """Trains a copy of the model with a copy of the Trainer, on the GPU that is there when it is called."""

    def train() -> None:
        from transformers import DefaultFlowCallback

        one = copy.copy(trainer)
        one.args = args = copy.copy(trainer.args)
        args.max_steps = _STEPS
        args.eval_strategy = args.save_strategy = "no"
        args.disable_tqdm = True
        for cached in ("_setup_devices", "distributed_state"):  # of the machine without the GPU
            vars(args).pop(cached, None)
        device = args.device  # made again
        one.model = one.model_wrapped = copy.deepcopy(trainer.model).to(device)
        one.create_accelerator_and_postprocess()
        one.callback_handler = copy.copy(trainer.callback_handler)
        one.callback_handler.model = one.model
        one.callback_handler.callbacks = [DefaultFlowCallback()]  # those that report need a network
        one.state, one.control = copy.deepcopy(trainer.state), copy.deepcopy(trainer.control)
        if trainer.optimizer is not None:  # given, with the parameters of the model itself
            one.optimizer = type(trainer.optimizer)(one.model.parameters(), **trainer.optimizer.defaults)
            one.lr_scheduler = None
        one.train()

    return train


def _next_evaluation() -> int | None:
    """The step after which the Trainer that runs now evaluates for the first time; None where none will."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and TRAINER not in class_names(frame.f_locals.get("self")):
        frame = frame.f_back
    if frame is None:
        return None
    trainer: Any = frame.f_locals["self"]
    args, done = trainer.args, trainer.state.global_step
    strategy = getattr(args.eval_strategy, "value", args.eval_strategy)
    if strategy == "steps":
        step = int(trainer.state.eval_steps or args.eval_steps)
    elif strategy == "epoch":
        step = -(-len(trainer.callback_handler.train_dataloader) // args.gradient_accumulation_steps)
    else:
        return None
    return step if done < step < trainer.state.max_steps else None


def _forget_the_machine(patches: Patches, tracer: Tracer) -> None:
    """What it found out before: whether there is CUDA, and with bf16, is asked once in a process and kept."""
    for function in vars(sys.modules["transformers.utils.import_utils"]).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()


LIBRARY = Library(
    "transformers",
    "transformers",
    in_trace=_forget_the_machine,
    as_program=_as_program,
    next_evaluation=_next_evaluation,
    unread_results=("transformers.cache_utils.Cache",),
    training_loops={"transformers.trainer": "_inner_training_loop"},
)
