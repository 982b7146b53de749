"""What fixes change of a script: arguments of its Trainer, of transformers or of Lightning."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterable, Mapping
from typing import Any

from torch.utils.data import DataLoader

from oomph.errors import UserError
from oomph.fixes.registry import Fix, FixContext, Target, check_choice
from oomph.prediction.compat.library import class_names
from oomph.prediction.compat.transformers import TRAINER
from oomph.prediction.trainers import TrainingLoop
from oomph.workload import Workload

_MARK = "_oomph_parts"  # on what has been divided


def is_transformers(loop: TrainingLoop) -> bool:
    return TRAINER in class_names(loop.trainer)


def why_not_divided(loop: TrainingLoop) -> str:
    """Why the batch of a loop cannot be divided by its Trainer's arguments; "" where it can."""
    trainer = loop.trainer
    if is_transformers(loop):
        if getattr(trainer, "is_deepspeed_enabled", False):
            return "DeepSpeed's own configuration has its batch"
        finds = trainer.args.auto_find_batch_size
        return "the Trainer sets the batch size itself (auto_find_batch_size)" if finds else ""
    if not getattr(loop.model, "automatic_optimization", True):
        return "the module steps its optimizers itself (automatic_optimization=False)"
    if isinstance(trainer.limit_train_batches, int) or trainer.overfit_batches:
        return "limit_train_batches or overfit_batches counts its batches"
    if any(type(each).__name__ == "GradientAccumulationScheduler" for each in trainer.callbacks):
        return "GradientAccumulationScheduler sets how many batches it accumulates"
    return ""


def loss_condition(loop: TrainingLoop) -> str:
    """What the loss must be like for the mean of its parts to be the whole's; "" where the Trainer divides by
    the labels of all parts."""
    if is_transformers(loop):
        trainer = loop.trainer
        counts = getattr(trainer, "model_accepts_loss_kwargs", False) or trainer.compute_loss_func
        return "" if counts else "all rows count the same in the loss"
    return "training_step returns a mean in which all rows count the same"


def rows_of_pass(loop: TrainingLoop, moved: int) -> int:
    """`moved`: rows that the program moved to the GPU."""
    return loop.trainer.args.per_device_train_batch_size if is_transformers(loop) else moved


def divided(loop: TrainingLoop, rows: int, parts: int) -> str:
    """How the arguments read."""
    if is_transformers(loop):
        args = loop.trainer.args
        size, passes = args.per_device_train_batch_size, args.gradient_accumulation_steps
        return f"per_device_train_batch_size={size // parts}, gradient_accumulation_steps={passes * parts}"
    passes = loop.trainer.accumulate_grad_batches
    return f"batch_size={rows // parts} of the DataLoader, accumulate_grad_batches={passes * parts}"


def divide(loop: TrainingLoop, parts: int) -> str:
    """Cut the batch into parts and accumulate as many more. What was changed. Once for each object."""
    if why := why_not_divided(loop):
        raise UserError(f"fix 'micro_batches': {why}")
    if is_transformers(loop):
        return _divide_transformers(loop, parts)
    trainer, arguments = loop.trainer, loop.arguments
    if _is_new(trainer, parts):
        trainer.accumulate_grad_batches *= parts
    given = arguments.get("train_dataloaders")
    if given is not None and not hasattr(given, "train_dataloader"):
        _divide_loaders(given, parts)
    else:
        source = given if given is not None else arguments.get("datamodule") or loop.model
        if _is_new(source, parts):
            make = source.train_dataloader

            @functools.wraps(make)
            def train_dataloader(*args: Any, **kwargs: Any) -> Any:
                found = make(*args, **kwargs)
                _divide_loaders(found, parts)
                return found

            source.train_dataloader = train_dataloader
    passes = trainer.accumulate_grad_batches
    return f"accumulate_grad_batches={passes}, batch_size of the DataLoader divided by {parts}"


def _divide_transformers(loop: TrainingLoop, parts: int) -> str:
    trainer = loop.trainer
    args = trainer.args
    if args.per_device_train_batch_size % parts and _MARK not in vars(args):
        raise UserError(
            f"fix 'micro_batches': per_device_train_batch_size={args.per_device_train_batch_size} cannot be "
            f"divided into {parts} parts"
        )
    if _is_new(args, parts):
        args.per_device_train_batch_size //= parts
        args.gradient_accumulation_steps *= parts
    trainer._train_batch_size = args.train_batch_size
    if "batch_size" in loop.arguments:
        loop.arguments["batch_size"] = trainer._train_batch_size
    accelerator: Any = getattr(trainer, "accelerator", None)
    if getattr(accelerator, "gradient_accumulation_steps", 1) > 1:  # earlier releases of transformers
        accelerator.gradient_accumulation_steps = args.gradient_accumulation_steps
    return (
        f"per_device_train_batch_size={args.per_device_train_batch_size}, "
        f"gradient_accumulation_steps={args.gradient_accumulation_steps}"
    )


def _divide_loaders(loaders: Any, parts: int) -> None:
    if isinstance(loaders, Mapping | list | tuple):
        for each in loaders.values() if isinstance(loaders, Mapping) else loaders:
            _divide_loaders(each, parts)
        return
    sampler = getattr(loaders, "batch_sampler", None)
    size = getattr(sampler, "batch_size", None)
    if not isinstance(loaders, DataLoader) or not isinstance(size, int):
        raise UserError(
            f"fix 'micro_batches': {type(loaders).__name__} has no batch size that can be changed"
        )
    if size % parts and _MARK not in vars(loaders):
        raise UserError(f"fix 'micro_batches': batch_size={size} cannot be divided into {parts} parts")
    if _is_new(loaders, parts):
        sampler.batch_size = size // parts  # type: ignore[union-attr]
        vars(loaders)["batch_size"] = size // parts  # which DataLoader refuses to set


def _is_new(changed: Any, parts: int) -> bool:
    """The same arguments, Trainer or DataLoader may train several times."""
    if _MARK in vars(changed):
        return False
    vars(changed)[_MARK] = parts
    return True


class TrainerOptim(Fix):
    name = "trainer_optim"
    kind = "training"
    changes = "The Trainer of transformers makes another optimizer, which keeps less state."

    def targets(self, context: FixContext) -> Iterable[Target]:
        loop = context.loop
        if loop is None or _why_no_optim(loop):
            return
        names = ["adafactor"]
        names += ["adamw_torch_8bit"] if importlib.util.find_spec("torchao") else []
        names += ["adamw_bnb_8bit"] if importlib.util.find_spec("bitsandbytes") else []
        for name in names:
            note = f"optim={name} of TrainingArguments; the learning rate may have to follow"
            yield Target(("parameters",), {"optim": name}, note)

    def change_workload(self, workload: Workload, *_: Any, **options: Any) -> Workload:
        raise UserError(f"fix {self.name!r} is for scripts that use the Trainer of transformers")

    def change_loop(self, loop: TrainingLoop, *_: Any, optim: str) -> str:
        """`optim`: as in TrainingArguments."""
        if why := _why_no_optim(loop):
            raise UserError(f"fix {self.name!r}: {why}")
        from transformers.training_args import OptimizerNames

        check_choice(self.name, "optim", optim, [each.value for each in OptimizerNames])
        loop.trainer.args.optim = OptimizerNames(optim)
        return f"optim={optim}"


def _why_no_optim(loop: TrainingLoop) -> str:
    if not is_transformers(loop):
        return "Lightning's modules make their optimizers themselves"
    if loop.trainer.optimizer is not None or getattr(loop.trainer, "optimizer_cls_and_kwargs", None):
        return "the Trainer was given its optimizer"
    return ""
