"""A config as a Workload: the step that is predicted, measured and trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from oomph.fixes import apply
from oomph.systems import SYSTEMS
from oomph.training.config import OptimizerConfig, Stage, TrainConfig
from oomph.workload import Workload

PASSES_PREDICTED = 2  # later passes of a step allocate nothing new


def predicted_workload(config: TrainConfig) -> Workload:
    """The step that a prediction traces."""
    step = workload(config, most_passes=PASSES_PREDICTED)
    if config.training.cuda_graph and step.optimizer is not None:
        step = replace(step, optimizer=KeepsGradients(step.optimizer))
    return step


def workload(config: TrainConfig, *, stage: Stage | None = None, most_passes: int | None = None) -> Workload:
    """One step at the config's largest shape (or a stage's), on random data, with its fixes applied.

    most_passes: the most batches per step.
    """
    stage = stage or config.largest_stage
    passes = stage.accumulate if most_passes is None else min(stage.accumulate, most_passes)
    factory = ModelFactory(config.system, config.form, config.model_config, stage.seq_len)
    batch, sizes = _batch(config, stage)
    plain = Workload(
        model=factory,
        batch=batch,
        optimizer=AdamW(config.optimizer),
        dtype=config.training.dtype,
        autocast=config.training.autocast,
        accumulate=passes,
        sizes=sizes,
        deterministic=config.training.deterministic,
    )
    return apply(config.fixes, plain)


@dataclass(frozen=True)
class ModelFactory:
    """Builds a system's model. seq_len: of the caches that a naive form allocates in advance."""

    system: str
    form: str
    config: Any
    seq_len: int | None = None

    def __call__(self) -> nn.Module:
        return SYSTEMS[self.system].build(self.config, self.form, self.seq_len)

    def with_options(self, **fields: Any) -> ModelFactory:
        """The same with other fields of the system's config."""
        return replace(self, config=replace(self.config, **fields))


@dataclass(frozen=True)
class AdamW:
    """AdamW over the parameters that are trained: npt's base is frozen."""

    options: OptimizerConfig

    def __call__(self, params: Iterable[Tensor]) -> torch.optim.Optimizer:
        o = self.options
        trained = [param for param in params if param.requires_grad]
        # Fused, it needs no temporaries, and skips a step with infinite gradients without the host looking.
        # Fixes look for what they could change on meta, which stands for a GPU.
        devices = {param.device.type for param in trained}
        fused = devices in ({"cuda"}, {"meta"}) and all(param.is_floating_point() for param in trained)
        return torch.optim.AdamW(
            trained,
            lr=o.learning_rate,
            betas=o.betas,
            eps=o.eps,
            weight_decay=o.weight_decay,
            fused=fused or None,
        )


@dataclass(frozen=True)
class KeepsGradients:
    """An optimizer that zeroes gradients in place: a captured CUDA graph adds to them there."""

    make: Callable[[Iterable[Tensor]], torch.optim.Optimizer]
    gradients_must_stay: ClassVar[bool] = True  # so that set_to_none is not proposed

    def __call__(self, params: Iterable[Tensor]) -> torch.optim.Optimizer:
        optimizer = self.make(params)
        optimizer.zero_grad = partial(optimizer.zero_grad, set_to_none=False)  # type: ignore[method-assign]
        return optimizer


@dataclass(frozen=True)
class RandomText:
    vocab_size: int

    def __call__(self, device: torch.device, B: int, T: int) -> dict[str, Tensor]:
        ids = torch.randint(self.vocab_size, (B, T), device=device)
        return {"input_ids": ids, "labels": ids.clone()}


@dataclass(frozen=True)
class RandomImages:
    channels: int
    size: int

    def __call__(self, device: torch.device, B: int) -> dict[str, Tensor]:
        return {"images": torch.rand(B, self.channels, self.size, self.size, device=device)}


def _batch(config: TrainConfig, stage: Stage) -> tuple[Callable[..., Any], dict[str, int]]:
    if stage.seq_len is None:
        shape = config.model_config
        return RandomImages(shape.channels, shape.image_size), {"B": stage.batch_size}
    return RandomText(config.data.vocab_size or 1), {"B": stage.batch_size, "T": stage.seq_len}
