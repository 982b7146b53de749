"""From a config to the data of a run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from oomph.errors import UserError
from oomph.training.config import Curriculum, TrainConfig
from oomph.training.data.images import ImageBatches, Images, Photographs, TableImages, validation_images
from oomph.training.data.loader import Batch, Batches
from oomph.training.data.sources import HUB_IMAGES, IMAGE_NAMES, Corpus, Split, load_hub, open_text
from oomph.training.data.text import PackedText, TokenStream, validation_batches
from oomph.training.data.tokenizers import Tokenizer, learn
from oomph.units import counted, format_bytes


@dataclass(frozen=True)
class DataOptions:
    """shuffle_window: rows that are shuffled with each other, besides the order of the blocks.
    validation: the fraction of the blocks that is held out. workers: 0 reads in the training process, 1 in a
    process of its own, ahead of time; the batches are the same. image_size None: text."""

    source: str
    curriculum: Curriculum
    tokenizer: str = "bpe"
    vocab_size: int | None = 8192
    field: str = "text"
    shuffle: bool = True
    shuffle_window: int = 1024
    seed: int = 0
    validation: float = 0.02
    workers: int = 0
    epochs: int | None = None
    image_size: int | None = None

    @classmethod
    def from_config(cls, config: TrainConfig, workers: int = 0) -> DataOptions:
        """workers: if the config does not say."""
        data = config.data
        images = config.system == "ginr"
        assert data.source is not None
        assert data.seed is not None
        if data.source in IMAGE_NAMES and not images:
            raise UserError(f"data.source={data.source!r} has images, and {config.system} reads text")
        return cls(
            source=data.source,
            curriculum=config.curriculum,
            tokenizer=data.tokenizer or "bytes",
            vocab_size=None if data.tokenizer == "bytes" else data.vocab_size,
            field=data.field,
            shuffle=data.shuffle,
            shuffle_window=data.shuffle_window,
            seed=data.seed,
            validation=data.validation,
            workers=workers if data.workers is None else data.workers,
            epochs=config.training.epochs,
            image_size=config.model_config.image_size if images else None,
        )


@dataclass(frozen=True)
class Data:
    """train: batches without end (or for some epochs), with state_dict() and load_state_dict().
    validation: makes an iterator over the held-out batches, the same every time."""

    train: Batches
    validation: Callable[[], Iterator[Batch]]
    tokenizer: Tokenizer | None
    description: str


def open_data(config: TrainConfig | DataOptions, folder: str | Path, workers: int = 0) -> Data:
    """The data of a run; the tokenizer is kept in `folder`. workers: if the config does not say."""
    options = config if isinstance(config, DataOptions) else DataOptions.from_config(config, workers)
    return _open_text(options, Path(folder)) if options.image_size is None else _open_images(options)


def _open_text(options: DataOptions, folder: Path) -> Data:
    corpus = open_text(options.source, options.field)
    split = _split(corpus.blocks, options, corpus.name)
    tokenizer = _tokenizer(options, corpus, split, folder)
    stream = TokenStream(corpus, split, tokenizer, options.shuffle, options.seed, options.epochs)
    curriculum = options.curriculum
    _check_length(stream, curriculum)
    last = curriculum.stages[-1]
    names = ("source", "validation", "shuffle", "shuffle_window", "seed")
    identity = {name: getattr(options, name) for name in names}
    identity |= {"size": corpus.size, "blocks": corpus.blocks, "stages": curriculum.identity()}
    identity |= {"tokenizer": tokenizer.kind, "vocab_size": tokenizer.vocab_size}
    shapes = ", ".join(f"{stage.batch_size} x {stage.seq_len}" for stage in curriculum.stages)
    return Data(
        Batches(PackedText(stream, curriculum, options.shuffle_window), options.workers, identity),
        lambda: validation_batches(corpus, split, tokenizer, last.seq_len or 1, last.batch_size),
        tokenizer,
        f"{corpus.name}: {format_bytes(corpus.size)} in {counted(len(corpus.parts), 'file')}, "
        f"{split.held_out} of {corpus.blocks} blocks held out; "
        f"{tokenizer.vocab_size} {tokenizer.kind}; batches of {shapes}",
    )


def _open_images(options: DataOptions) -> Data:
    size, batch_size = options.image_size or 0, options.curriculum.stages[-1].batch_size
    images: Images
    if options.source == "photographs":
        images = Photographs(size, options.seed)
    elif options.source in HUB_IMAGES:
        table = load_hub(options.source, HUB_IMAGES[options.source])
        images = TableImages(options.source, table, size, _split(len(table), options, options.source))
    else:
        valid = ", ".join(IMAGE_NAMES)
        raise UserError(f"there is no data source {options.source!r} of images; choose from {valid}")
    largest = options.curriculum.largest.batch_size
    if options.epochs is not None and largest > options.epochs * images.training_size:
        raise UserError(
            f"batch_size={largest} is larger than the data: {images.name} has {images.training_size} images "
            f"for training, {options.epochs} epochs of them; give a smaller batch or more epochs"
        )
    batches = ImageBatches(images, options.curriculum, options.shuffle, options.seed, options.epochs)
    names = ("source", "image_size", "shuffle", "seed", "validation")
    identity = {name: getattr(options, name) for name in names}
    return Data(
        Batches(batches, options.workers, {**identity, "stages": options.curriculum.identity()}),
        lambda: validation_images(images, batch_size),
        None,
        f"{images.name}: {images.training_size} images of {size} x {size} an epoch, "
        f"{images.validation_size} held out; batches of {batch_size}",
    )


def _split(size: int, options: DataOptions, name: str) -> Split:
    if options.validation > 0 and size < 2:
        raise UserError(
            f"{name} is too small to hold a part out for validation; give more data, or validation=0"
        )
    return Split(size, options.validation)


def _tokenizer(options: DataOptions, corpus: Corpus, split: Split, folder: Path) -> Tokenizer:
    """The folder's tokenizer if there is one: a resumed run must read its tokens as before."""
    path, record = folder / "tokenizer.json", folder / "tokenizer_source.json"
    asked = {name: getattr(options, name) for name in ("source", "tokenizer", "vocab_size", "field")}
    if path.exists():
        known = json.loads(record.read_text(encoding="utf-8")) if record.exists() else asked
        for name, value in asked.items():
            if known.get(name) != value:
                raise UserError(
                    f"{path} was made with {name}={known.get(name)!r}, and the config asks for {value!r}; "
                    "use another folder, or delete it"
                )
        return Tokenizer.load(path)
    tokenizer = learn(options.tokenizer, options.vocab_size, corpus, split)
    folder.mkdir(parents=True, exist_ok=True)
    # The tokenizer comes last, and is renamed when it is complete.
    record.write_text(json.dumps(asked, indent=2) + "\n", encoding="utf-8")
    partial = path.with_suffix(".partial")
    tokenizer.save(partial)
    os.replace(partial, path)
    return tokenizer


def _check_length(stream: TokenStream, curriculum: Curriculum) -> None:
    longest, most = curriculum.longest, max(stage.tokens for stage in curriculum.stages)
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
