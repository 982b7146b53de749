"""The sections `optimizer`, `training` and `output`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from oomph.training.config.section import (
    Count,
    DtypeName,
    NotNegative,
    Positive,
    Section,
    Seed,
    Share,
    Size,
    SizeWord,
    Whole,
)


class OptimizerConfig(Section):
    """AdamW's. Other forms of it (8 bits, fused, in backward) are fixes."""

    learning_rate: Positive = 3e-4
    weight_decay: NotNegative = 0.01
    betas: tuple[Share, Share] = (0.9, 0.999)
    eps: Positive = 1e-8


class TrainingConfig(Section):
    """In a loaded config either steps or epochs is given.

    steps: of the optimizer. accumulate: batches per step. dtype: of the parameters; null is as they are made,
        which is float32 (for npt: what model.optimization says).
    warmup: steps until the learning rate is full. min_learning_rate: where the schedule ends, as a share.
    eval_every, save_every: steps; null is at the end only. eval_at_start: of the untrained model too.
    keep: so many checkpoints.
    device: null is a GPU where there is one, else the CPU. gradient_checkpointing: the fix
    "activation_checkpointing".
    on_nan: what a loss that is not finite does. save: false writes no checkpoints at all.
    cuda_graph: record a pass once and replay it; for models so small that starting kernels is most of a step.
    deterministic: the same bits at every run; on a GPU attention's backward does not give them by itself.
    memory_limit: "23GiB"; the GPU may hold more, but this process does not use it.
    """

    steps: Count | None = None
    epochs: Count | None = None
    accumulate: Count = 1
    dtype: Annotated[Literal["float32", "bfloat16"] | None, DtypeName] = None
    autocast: Annotated[Literal["bfloat16", "float16"] | None, DtypeName] = None
    clip: Positive | None = None
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup: Whole = 0
    min_learning_rate: Annotated[float, Field(ge=0, le=1)] = 0.0
    eval_every: Count | None = 200
    eval_at_start: bool = False
    eval_batches: Count = 20
    save_every: Count | None = 500
    keep: Count = 3
    log_every: Count = 10
    seed: Seed = 0
    device: str | None = None
    on_nan: Literal["stop", "skip"] = "stop"
    gradient_checkpointing: bool = False
    save: bool = True
    cuda_graph: bool = False
    deterministic: bool = False
    memory_limit: Annotated[str | None, SizeWord, Size] = None


class OutputConfig(Section):
    """dir: where a run writes; null is runs/<the config's name>."""

    dir: str | None = None
