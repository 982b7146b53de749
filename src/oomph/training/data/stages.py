"""The shapes of batches along a run: seq_len and batch size by batch number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oomph.errors import UserError


@dataclass(frozen=True)
class Stage:
    """`batches` batches of [batch_size, seq_len]; None: until the end of the run."""

    seq_len: int
    batch_size: int
    batches: int | None = None

    def __post_init__(self) -> None:
        for name in ("seq_len", "batch_size", "batches"):
            value = getattr(self, name)
            if value is None and name == "batches":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UserError(f"{name}={value!r} is not valid; give a whole number >= 1")

    @property
    def tokens(self) -> int:
        return self.seq_len * self.batch_size


@dataclass(frozen=True)
class Schedule:
    """Stages one after the other; the last one goes on for ever."""

    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        if not self.stages:
            raise UserError("there is no stage of batches; give seq_len and batch_size, or a curriculum")

    def at(self, batch: int) -> tuple[Stage, int | None]:
        """The stage of the batch of that number, and how many batches the stage still has from there on."""
        for stage in self.stages[:-1]:
            if stage.batches is None:
                break
            if batch < stage.batches:
                return stage, stage.batches - batch
            batch -= stage.batches
        else:
            stage = self.stages[-1]
        return stage, None

    def identity(self) -> list[list[int | None]]:
        """What a place in the data depends on; how long the last stage goes on is not part of it."""
        shapes = [[stage.seq_len, stage.batch_size, stage.batches] for stage in self.stages]
        shapes[-1][2] = None
        return shapes

    @property
    def longest(self) -> int:
        return max(stage.seq_len for stage in self.stages)


def from_curriculum(entries: Sequence[object], accumulate: int = 1) -> Schedule:
    """Stages of a curriculum, whose steps are the optimizer's: `accumulate` batches, or the stage's."""
    stages = []
    for entry in entries:
        names = ("seq_len", "batch_size", "batch_tokens", "steps")
        seq_len, batch_size, tokens, steps = (_field(entry, name) for name in names)
        if seq_len is None or (tokens is None and batch_size is None):
            raise UserError("a stage of the curriculum needs seq_len and batch_tokens (or batch_size)")
        if tokens is not None and tokens < seq_len:
            raise UserError(f"batch_tokens={tokens} is less than one sequence of seq_len={seq_len}")
        rows = batch_size if tokens is None else tokens // seq_len
        batches = None if steps is None else steps * (_field(entry, "accumulate") or accumulate)
        stages.append(Stage(seq_len, rows or 0, batches))
    return Schedule(tuple(stages))


def _field(entry: object, name: str) -> int | None:
    return entry.get(name) if isinstance(entry, dict) else getattr(entry, name, None)
