"""From a config to the data of a run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from oomph.errors import UserError
from oomph.training.config import Curriculum, DataConfig, TrainConfig
from oomph.training.data.images import ImageBatches, Photographs, TableImages, validation_images
from oomph.training.data.loader import Batch, Batches
from oomph.training.data.sources import HUB_IMAGES, IMAGE_NAMES, Corpus, Split, load_hub, open_text
from oomph.training.data.text import PackedText, TokenStream, validation_batches
from oomph.training.data.tokenizers import Tokenizer, learn, pretrained
from oomph.units import counted, format_bytes


@dataclass(frozen=True)
class Data:
    """train: batches without end (or for some epochs), with state_dict() and load_state_dict().
    validation: makes an iterator over the held-out batches, the same every time."""

    train: Batches
    validation: Callable[[], Iterator[Batch]]
    tokenizer: Tokenizer | None
    description: str


def open_data(config: TrainConfig, folder: str | Path, workers: int = 0) -> Data:
    """The data of a run; the tokenizer is kept in `folder`. workers: if the config does not say."""
    if config.data.workers is not None:
        workers = config.data.workers
    if config.system == "ginr":
        return _open_images(config, workers)
    return _open_text(config, Path(folder), workers)


def _open_text(config: TrainConfig, folder: Path, workers: int) -> Data:
    data, curriculum = config.data, config.curriculum
    assert data.source is not None
    assert data.seed is not None
    corpus = open_text(data.source, data.field)
    split = _split(corpus.blocks, data.validation, corpus.name)
    own = data.tokenizer == "pretrained"
    tokenizer = pretrained(config.model_config.weights) if own else _tokenizer(data, corpus, split, folder)
    stream = TokenStream(corpus, split, tokenizer, data.shuffle, data.seed, config.training.epochs)
    _check_length(stream, curriculum)
    last = curriculum.stages[-1]
    identity = _identity(config, ("source", "validation", "shuffle", "shuffle_window", "seed"))
    identity |= {"size": corpus.size, "blocks": corpus.blocks, "contents": corpus.fingerprint()}
    identity |= {"tokenizer": tokenizer.kind, "vocab_size": tokenizer.vocab_size}
    identity["tokens"] = sha256(tokenizer.to_json().encode()).hexdigest()[:16]
    shapes = ", ".join(f"{stage.batch_size} x {stage.seq_len}" for stage in curriculum.stages)
    return Data(
        Batches(PackedText(stream, curriculum, data.shuffle_window), workers, identity),
        lambda: validation_batches(corpus, split, tokenizer, last.seq_len or 1, last.batch_size),
        tokenizer,
        f"{corpus.name}: {format_bytes(corpus.size)} in {counted(len(corpus.parts), 'file')}, "
        f"{split.held_out} of {corpus.blocks} blocks held out; "
        f"{tokenizer.vocab_size} {tokenizer.kind}; batches of {shapes}",
    )


def _open_images(config: TrainConfig, workers: int) -> Data:
    data, curriculum, epochs = config.data, config.curriculum, config.training.epochs
    name, seed, size = data.source, data.seed, config.model_config.image_size
    assert seed is not None
    batch_size = curriculum.stages[-1].batch_size
    images: Photographs | TableImages
    if name == "photographs":
        images = Photographs(size, seed)
    elif name in HUB_IMAGES:
        table = load_hub(name, HUB_IMAGES[name])
        images = TableImages(name, table, size, _split(len(table), data.validation, name))
    else:
        valid = ", ".join(IMAGE_NAMES)
        raise UserError(f"there is no data source {name!r} of images; choose from {valid}")
    largest = curriculum.largest.batch_size
    if epochs is not None and largest > epochs * images.training_size:
        raise UserError(
            f"batch_size={largest} is larger than the data: {images.name} has {images.training_size} images "
            f"for training, {epochs} epochs of them; give a smaller batch or more epochs"
        )
    identity = _identity(config, ("source", "shuffle", "seed", "validation"))
    batches = ImageBatches(images, curriculum, data.shuffle, seed, epochs)
    return Data(
        Batches(batches, workers, {**identity, "image_size": size}),
        lambda: validation_images(images, batch_size),
        None,
        f"{images.name}: {images.training_size} images of {size} x {size} an epoch, "
        f"{images.validation_size} held out; batches of {batch_size}",
    )


def _identity(config: TrainConfig, names: tuple[str, ...]) -> dict[str, Any]:
    stages = config.curriculum.identity()
    return {"stages": stages, **{name: getattr(config.data, name) for name in names}}


def _split(size: int, validation: float, name: str) -> Split:
    if validation > 0 and size < 2:
        raise UserError(
            f"{name} is too small to hold a part out for validation; give more data, or validation=0"
        )
    return Split(size, validation)


def _tokenizer(data: DataConfig, corpus: Corpus, split: Split, folder: Path) -> Tokenizer:
    """The folder's tokenizer if there is one: a resumed run must read its tokens as before."""
    path, record = folder / "tokenizer.json", folder / "tokenizer_source.json"
    asked = {name: getattr(data, name) for name in ("source", "tokenizer", "vocab_size", "field")}
    if data.tokenizer == "bytes":
        asked["vocab_size"] = None  # always 260
    if path.exists():
        try:
            known = dict(json.loads(record.read_bytes())) if record.exists() else asked
        except (ValueError, TypeError, RecursionError):
            raise UserError(f"{record} is not the record that oomph wrote; use another folder") from None
        for name, value in asked.items():
            if known.get(name) != value:
                raise UserError(
                    f"{path} was made with {name}={known.get(name)!r}, and the config asks for {value!r}; "
                    "use another folder, or delete it"
                )
        loaded = Tokenizer.load(path)
        if data.vocab_size is not None and loaded.vocab_size > data.vocab_size:
            raise UserError(
                f"{path} has {loaded.vocab_size} tokens, and data.vocab_size is {data.vocab_size}"
            )
        return loaded
    tokenizer = learn(data.tokenizer or "bytes", asked["vocab_size"], corpus, split)
    folder.mkdir(parents=True, exist_ok=True)
    # The tokenizer comes last, and is renamed when it is complete.
    record.write_text(json.dumps(asked, indent=2) + "\n", encoding="utf-8")
    partial = path.with_suffix(".partial")
    tokenizer.save(partial)
    os.replace(partial, path)
    return tokenizer


def _check_length(stream: TokenStream, curriculum: Curriculum) -> None:
    longest = max(stage.seq_len or 0 for stage in curriculum.stages)
    most = max(stage.tokens for stage in curriculum.stages)
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
