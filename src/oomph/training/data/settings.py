"""What the data need to know of a config, in one flat record, and how it is read out of a TrainConfig."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from oomph.errors import UserError
from oomph.training.data.sources.named import IMAGE_NAMES
from oomph.training.data.stages import Schedule, Stage, from_curriculum

WINDOW_ROWS = 1024


@dataclass(frozen=True)
class DataSettings:
    """`shuffle_window`: rows that are mixed with each other, besides the order of the blocks.

    `validation`: the fraction of the blocks that is held out. `workers`: 0 reads in the training process, 1
    in a process of its own, ahead of time; the batches are the same.
    """

    source: str
    schedule: Schedule
    tokenizer: str = "bpe"
    vocab_size: int | None = 8192
    field: str = "text"
    shuffle: bool = True
    shuffle_window: int = WINDOW_ROWS
    seed: int = 0
    validation: float = 0.02
    workers: int = 0
    epochs: int | None = None
    image_size: int = 32
    images: bool = False

    def __post_init__(self) -> None:
        if self.workers not in (0, 1):
            raise UserError(
                f"workers={self.workers!r} is not valid; choose from 0 and 1 "
                "(packing is one stream, which a second process could not share)"
            )
        if isinstance(self.validation, bool) or not 0 <= self.validation < 1:
            raise UserError(f"validation={self.validation!r} is not valid; give a fraction >= 0 and < 1")
        if self.shuffle_window < 1:
            raise UserError(f"shuffle_window={self.shuffle_window!r} is not valid; give a whole number >= 1")
        if self.epochs is not None and self.epochs < 1:
            raise UserError(f"epochs={self.epochs!r} is not valid; give a whole number >= 1")


def settings_of(config: Any, workers: int = 0) -> DataSettings:
    """From a TrainConfig, or anything with the same names; what is absent has its default.

    `workers`: where the config does not say."""
    data = config.data
    training = getattr(config, "training", None)
    model = getattr(config, "model_config", None)
    system = getattr(config, "system", None)
    images = system == "ginr" or _given(data, "source") in IMAGE_NAMES
    if images and system not in (None, "ginr"):
        raise UserError(f"data.source={data.source!r} is made of images, and {system} reads text; give text")
    source = _given(data, "source") or ("photographs" if images else "stdlib")
    given = {
        name: _given(data, name) for name in ("field", "shuffle", "shuffle_window", "seed", "validation")
    }
    given |= {name: _given(data, name) for name in ("workers", "tokenizer", "vocab_size")}
    given |= {"epochs": _given(training, "epochs"), "image_size": _given(model, "image_size")}
    known = {"workers": workers} | {name: value for name, value in given.items() if value is not None}
    if given["tokenizer"] == "bytes":
        known.pop("vocab_size", None)  # a cap for what is learned; bytes are always 260
    return DataSettings(
        source=str(source), schedule=_schedule(data, training, images), images=images, **known
    )


def _schedule(data: Any, training: Any, images: bool) -> Schedule:
    curriculum = _given(data, "curriculum")
    if curriculum:
        return from_curriculum(curriculum, _given(training, "accumulate") or 1)
    seq_len, batch_size, tokens = (_given(data, name) for name in ("seq_len", "batch_size", "batch_tokens"))
    if images:
        seq_len = 1
    if seq_len is None:
        raise UserError("data.seq_len is missing; give the tokens of a sequence, e.g. data.seq_len=128")
    if tokens is not None:
        return from_curriculum([{"seq_len": seq_len, "batch_tokens": tokens}])
    if batch_size is None:
        raise UserError("data.batch_size is missing; give it, or data.batch_tokens")
    return Schedule((Stage(seq_len, batch_size),))


def _given(section: Any, name: str) -> Any:
    return getattr(section, name, None)
