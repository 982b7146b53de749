"""The section `data`: what is read, how it is cut into tokens and batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from oomph.training.config.section import Count, Length, Section, Seed, Share


class CurriculumStage(Section):
    """steps: of the optimizer; left out, the stage lasts until the end. accumulate: training's, if left out.

    batch_size may stand for batch_tokens, which is divided by seq_len.
    """

    seq_len: Length
    batch_tokens: Count | None = None
    batch_size: Count | None = None
    steps: Count | None = None
    accumulate: Count | None = None


class DataConfig(Section):
    """In a loaded config everything that has a default is filled in.

    source: "stdlib" (Python's own source files), "photographs" (of scikit-learn; ginr), a file, folder or
        glob of text, JSONL or parquet, or the name of a hub's data set. field: the one that holds the text.
    vocab_size: the most tokens that the tokenizer makes; the model may know more.
    seq_len, batch_size: with a curriculum, those of its largest stage.
    shuffle_window: how many sequences are mixed at a time. validation: the share that is held out.
    workers: 1 reads in a process of its own, 0 in the training's; left out, 1 where that is on a GPU.
    """

    nested: ClassVar[Mapping[str, type[Section]]] = {"curriculum": CurriculumStage}

    source: str | None = None
    field: str = "text"
    tokenizer: Literal["words", "bpe", "bytes"] | None = None
    vocab_size: Count | None = None
    seq_len: Length | None = None
    batch_size: Count | None = None
    batch_tokens: Count | None = None
    curriculum: tuple[CurriculumStage, ...] | None = None
    shuffle: bool = True
    shuffle_window: Count = 1024
    seed: Seed | None = None
    validation: Share = 0.02
    workers: Annotated[int, Field(ge=0, le=1)] | None = None
