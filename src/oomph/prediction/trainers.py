"""A Trainer of transformers: as a program of three optimizer steps, and when it evaluates in a script."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from oomph.errors import UserError

_STEPS = 3
_TRAINER = "transformers.trainer.Trainer"


def as_program(target: Any) -> Any:
    """A function for a Trainer; everything else as it is."""
    names = _class_names(target)
    if _TRAINER in names:
        return _steps_of(target)
    if names & {"lightning.pytorch.trainer.trainer.Trainer", "pytorch_lightning.trainer.trainer.Trainer"}:
        raise UserError(
            "a Trainer of Lightning has no model before fit; give a function that makes the trainer with "
            "accelerator='gpu' and calls fit"
        )
    return target


def _steps_of(trainer: Any) -> Callable[[], None]:
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


def next_evaluation() -> int | None:
    """The step after which the Trainer that runs now evaluates for the first time; None where none will."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _TRAINER not in _class_names(frame.f_locals.get("self")):
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


def _class_names(value: Any) -> set[str]:
    return {f"{kind.__module__}.{kind.__qualname__}" for kind in type(value).__mro__}
