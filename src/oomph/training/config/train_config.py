"""A whole config, checked and complete."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from oomph.records import FixUse
from oomph.training.config.data import DataConfig
from oomph.training.config.training import OptimizerConfig, OutputConfig, TrainingConfig


@dataclass(frozen=True)
class Stage:
    """A part of the training, with batches of one shape. seq_len None: images. steps None: to the end."""

    seq_len: int | None
    batch_size: int
    accumulate: int
    steps: int | None = None

    @property
    def tokens(self) -> int:
        """Of a batch; of images, how many there are."""
        return self.batch_size * (self.seq_len or 1)


@dataclass(frozen=True)
class TrainConfig:
    """name: the file's, without its ending. preset: what model_config started from."""

    name: str
    system: str
    form: str
    preset: str
    model_config: Any
    data: DataConfig
    optimizer: OptimizerConfig
    training: TrainingConfig
    fixes: tuple[FixUse, ...]
    output: OutputConfig

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The curriculum; one stage where there is none."""
        accumulate = self.training.accumulate
        if self.data.curriculum is None:
            assert self.data.batch_size is not None
            return (Stage(self.data.seq_len, self.data.batch_size, accumulate),)
        return tuple(
            Stage(one.seq_len, one.batch_size or 1, one.accumulate or accumulate, one.steps)
            for one in self.data.curriculum
        )

    @property
    def largest_stage(self) -> Stage:
        """The one with the most tokens in a batch; of several, that of the longest sequences."""
        return max(self.stages, key=lambda stage: (stage.tokens, stage.seq_len or 0))

    def to_dict(self) -> dict[str, Any]:
        """Complete, by canonical keys, of what JSON and YAML can hold; `load_dict` makes the same of it."""
        return {
            "system": self.system,
            "form": self.form,
            "model": {"preset": self.preset, **_plain(asdict(self.model_config))},
            "data": self.data.model_dump(mode="json"),
            "optimizer": self.optimizer.model_dump(mode="json"),
            "training": self.training.model_dump(mode="json"),
            "fixes": [{"fix": use.fix, "options": _plain(dict(use.options))} for use in self.fixes],
            "output": self.output.model_dump(mode="json"),
        }


def _plain(value: Any) -> Any:
    """Tuples as lists."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value
