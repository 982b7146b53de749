"""From a config to the data of a run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oomph.errors import UserError
from oomph.training.data.images import ImageBatches, Images, TableImages, check_enough, validation_batches
from oomph.training.data.loader import Batches
from oomph.training.data.packing import Batch, PackedText, packed_once
from oomph.training.data.permutation import Split
from oomph.training.data.photographs import Photographs
from oomph.training.data.settings import DataSettings, settings_of
from oomph.training.data.sources import hub
from oomph.training.data.sources.corpus import Corpus
from oomph.training.data.sources.named import IMAGE_NAMES, open_text
from oomph.training.data.stages import Schedule
from oomph.training.data.stream import TokenStream, validation_tokens
from oomph.training.data.tokens import Tokenizer
from oomph.training.data.vocabulary import learn
from oomph.units import counted, format_bytes


@dataclass(frozen=True)
class Data:
    """`train`: batches without end (or for the epochs given), with state_dict() and load_state_dict()."""

    train: Batches[Any]
    tokenizer: Tokenizer | None
    description: str
    _validation: Callable[[], Iterable[Batch]]

    def validation(self) -> Iterator[Batch]:
        """The batches held out, from the first one; the same every time."""
        return iter(self._validation())

    def describe(self) -> str:
        return self.description


def open_data(config: Any, folder: str | Path, workers: int = 0) -> Data:
    """The data of a TrainConfig or of DataSettings; the tokenizer is kept in `folder`.

    `workers`: for a config that does not say."""
    settings = config if isinstance(config, DataSettings) else settings_of(config, workers)
    return _open_images(settings) if settings.images else _open_text(settings, Path(folder))


def _open_text(settings: DataSettings, folder: Path) -> Data:
    corpus = open_text(settings.source, settings.field)
    split = _split(corpus.blocks, settings, corpus.name)
    tokenizer = _tokenizer(settings, corpus, split, folder)
    stream = TokenStream(corpus, split, tokenizer, settings.shuffle, settings.seed, settings.epochs)
    _check_length(stream, settings.schedule)
    stage = settings.schedule.stages[-1]
    identity = {
        "source": settings.source,
        "size": corpus.size,
        "blocks": corpus.blocks,
        "tokenizer": tokenizer.kind,
        "vocab_size": tokenizer.vocab_size,
        "validation": settings.validation,
        "shuffle": settings.shuffle,
        "shuffle_window": settings.shuffle_window,
        "seed": settings.seed,
        "stages": settings.schedule.identity(),
    }
    held_out = f"{split.held_out} of {corpus.blocks} blocks held out"
    return Data(
        Batches(PackedText(stream, settings.schedule, settings.shuffle_window), settings.workers, identity),
        tokenizer,
        f"{corpus.name}: {format_bytes(corpus.size)} in {counted(len(corpus.parts), 'file')}, {held_out}; "
        f"{tokenizer.vocab_size} {tokenizer.kind}; {_shapes(settings.schedule)}",
        lambda: packed_once(
            validation_tokens(corpus, split, tokenizer), stage.seq_len, stage.batch_size, tokenizer.pad
        ),
    )


def _open_images(settings: DataSettings) -> Data:
    if settings.source not in IMAGE_NAMES:
        raise UserError(
            f"there is no data source {settings.source!r} of images; choose from {', '.join(IMAGE_NAMES)}"
        )
    images: Images
    if settings.source == "photographs":
        images = Photographs(settings.image_size, settings.seed)
    else:
        table = hub.open_hub_images(settings.source)
        split = _split(len(table), settings, settings.source)
        images = TableImages(settings.source, table, settings.image_size, split)
    check_enough(images, settings.schedule, settings.epochs)
    batches = ImageBatches(images, settings.schedule, settings.shuffle, settings.seed, settings.epochs)
    names = ("source", "image_size", "shuffle", "seed", "validation")
    size = settings.schedule.stages[-1].batch_size
    return Data(
        Batches(
            batches,
            settings.workers,
            {name: getattr(settings, name) for name in names} | {"stages": settings.schedule.identity()},
        ),
        None,
        f"{images.name}: {images.training_size} images of {settings.image_size} x {settings.image_size} an "
        f"epoch, {images.validation_size} held out; batches of {size}",
        lambda: validation_batches(images, size),
    )


def _split(size: int, settings: DataSettings, name: str) -> Split:
    if settings.validation > 0 and size < 2:
        raise UserError(
            f"{name} is too small to hold a part out for validation; give more data, or validation=0"
        )
    return Split(size, settings.validation)


def _tokenizer(settings: DataSettings, corpus: Corpus, split: Split, folder: Path) -> Tokenizer:
    """The one of the folder where there is one: a run that goes on must read its tokens as it did."""
    path, record = folder / "tokenizer.json", folder / "tokenizer_source.json"
    asked = {name: getattr(settings, name) for name in ("source", "tokenizer", "vocab_size", "field")}
    if path.exists():
        known = json.loads(record.read_text(encoding="utf-8")) if record.exists() else asked
        for name, value in asked.items():
            if known.get(name) != value:
                raise UserError(
                    f"{path} was made with {name}={known.get(name)!r}, and the config asks for {value!r}; "
                    "use another folder, or delete it"
                )
        return Tokenizer.load(path)
    tokenizer = learn(settings.tokenizer, settings.vocab_size, corpus, split)
    folder.mkdir(parents=True, exist_ok=True)
    # Whole or not at all: the tokenizer comes last, and under another name until it is complete.
    record.write_text(json.dumps(asked, indent=2) + "\n", encoding="utf-8")
    unfinished = path.with_suffix(".unfinished")
    tokenizer.save(unfinished)
    os.replace(unfinished, path)
    return tokenizer


def _check_length(stream: TokenStream, schedule: Schedule) -> None:
    longest = schedule.longest
    most = max(stage.tokens for stage in schedule.stages)
    enough = longest if stream.epochs is None else max(longest, -(-most // stream.epochs))
    tokens = stream.count(enough)
    has = f"{stream.corpus.name} has {tokens} tokens for training"
    if tokens < longest:
        raise UserError(
            f"seq_len={longest} is longer than the data: {has}; give seq_len <= {tokens} or more data"
        )
    if tokens < enough:
        raise UserError(
            f"a batch of {most} tokens is larger than the data: {has}, and epochs={stream.epochs}; "
            "give a smaller batch, more epochs or more data"
        )


def _shapes(schedule: Schedule) -> str:
    return "batches of " + ", ".join(f"{stage.batch_size} x {stage.seq_len}" for stage in schedule.stages)
