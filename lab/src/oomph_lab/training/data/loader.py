"""The data of a run: opened from its config, loaded by torchdata's StatefulDataLoader, also in a worker."""

from __future__ import annotations

import atexit
import json
import os
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from oomph.errors import UserError
from oomph.torch_internals import without_sigchld_handler
from oomph.units import counted, format_bytes
from oomph_lab.training.config import Curriculum, DataConfig, TrainConfig
from oomph_lab.training.data.images import ImageBatches, Photographs, TableImages, validation_images
from oomph_lab.training.data.sources import HUB_IMAGES, IMAGE_NAMES, Corpus, Split, load_hub, open_text
from oomph_lab.training.data.text import PackedText, TokenStream, validation_batches
from oomph_lab.training.data.tokenizers import Tokenizer, learn, pretrained
from oomph_lab.training.libraries import need

# ---------------------------------------------------------------------------------------------------- opening


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
    elif name is not None and Path(name).is_dir():
        images = Photographs(size, seed, Path(name))
    else:
        valid = ", ".join(IMAGE_NAMES)
        raise UserError(f"there is no data source {name!r} of images; choose from {valid}, or give a folder")
    largest = curriculum.largest.batch_size
    if epochs is not None and largest > epochs * images.training_size:
        raise UserError(
            f"batch_size={largest} is larger than the data: {images.name} has {images.training_size} images "
            f"for training, {epochs} epochs of them; give a smaller batch or more epochs"
        )
    identity = _identity(config, ("source", "shuffle", "seed", "validation"))
    if isinstance(images, Photographs) and name != "photographs":
        identity["files"] = [[file.name, file.stat().st_size] for file in images.files]
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
    # The tokenizer comes last, and is renamed when it is complete. Every rank may write it: the same bytes.
    record.write_text(json.dumps(asked, indent=2) + "\n", encoding="utf-8")
    partial = path.with_suffix(f".{os.getpid()}.partial")
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


# ---------------------------------------------------------------------------------------------------- batches

# Ctrl-C, a scheduler's, and that of a closed terminal, which Windows does not have.
STOP_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
_PREFETCH = 8  # batches of a worker: those of a step or two
_POSITION = "oomph_position"  # the key of our state inside the loader's

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class _WorkerError:
    """A UserError in a worker. Raised there, it would arrive wrapped in a traceback."""

    message: str


@dataclass(frozen=True)
class _WorkerBatch:
    """A batch as numpy arrays. Tensors would arrive through shared memory, of which containers have little,
    with a connection for each."""

    arrays: dict[str, Any]

    def tensors(self) -> Batch:
        return {name: torch.from_numpy(array) for name, array in self.arrays.items()}

    def pin_memory(self) -> Batch:
        """Called by the loader's pinning thread."""
        return {name: tensor.pin_memory() for name, tensor in self.tensors().items()}


class _WorkerDataset(IterableDataset[Any]):
    """The data set as the loader sees it."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Batch | _WorkerBatch | _WorkerError:
        if get_worker_info() is None:
            return next(self.dataset)  # type: ignore[no-any-return]
        try:
            batch = next(self.dataset)
        except UserError as error:
            return _WorkerError(str(error))
        return _WorkerBatch({name: tensor.numpy() for name, tensor in batch.items()})

    def state_dict(self) -> dict[str, Any]:
        return {_POSITION: self.dataset.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.dataset.load_state_dict(state[_POSITION])


def _set_up_worker(parent: int, worker: int) -> None:
    """Ignore stop signals, which go to all processes of a run: the run needs its batches until its step is
    done, and then ends the worker. End if the run is killed."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)

    def end_with_parent() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    # Threads inside native code must not run while the interpreter is torn down.
    atexit.register(os._exit, 0)


class Batches:
    """The batches of a training loop. Iterating again continues where it stopped.

    dataset: of whole batches and its own iterator, with state_dict() and load_state_dict(). The state is that
    of the data set alone, so a run may change the number of workers. identity: what must be the same when a
    state is loaded.
    """

    def __init__(self, dataset: Any, workers: int, identity: Mapping[str, Any]) -> None:
        self._loaders = need("torchdata.stateful_dataloader", "loading data")
        self._dataset, self._workers, self._identity = dataset, workers, dict(identity)
        self._loader: Any = None
        self._iterator: Any = None
        self.opened_by = os.getpid()
        _OPEN.add(self)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        try:
            if self._iterator is None:
                self._open()
            batch = next(self._iterator)
        except RuntimeError as error:
            if not str(error).startswith(("DataLoader worker", "Pin memory thread")):
                raise
            if self._iterator is not None:
                self._iterator._shutdown = True  # a thread that waits for the rest of a batch never ends
            raise UserError(
                f"the process that reads the data ended ({str(error).splitlines()[0].rstrip('.')}); continue "
                "with --resume, and data.workers=0 if the host has too little memory for it"
            ) from error
        if isinstance(batch, _WorkerError):
            raise UserError(batch.message)
        return batch.tensors() if isinstance(batch, _WorkerBatch) else batch

    def state_dict(self) -> dict[str, Any]:
        """The position after the batches handed out, not after those prefetched."""
        position = self._dataset.state_dict()
        if self._loader is not None:
            position = _find(self._loader.state_dict(), _POSITION)
        return {"identity": dict(self._identity), "position": dict(position)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, now in self._identity.items():
            before = state["identity"].get(name, now)  # an older checkpoint has fewer
            if before != now:
                raise UserError(
                    f"the data are not those of the checkpoint: {name} was {before!r} and is {now!r}; "
                    "resume with the same data, or start a new run"
                )
        self.close()
        self._dataset.load_state_dict(dict(state["position"]))

    def close(self) -> None:
        """End the worker. The next batch starts at the state loaded last."""
        workers = getattr(self._iterator, "_workers", ())
        self._iterator = self._loader = None
        for worker in workers:
            worker.kill()  # it does not answer a request while it makes a batch

    def _open(self) -> None:
        if self._workers:
            # The tokenizers library's threads do not survive a fork, and it would warn each time.
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        with warnings.catch_warnings():
            # torchdata 0.11 calls a counter that newer torch versions do not have.
            warnings.filterwarnings("ignore", ".*set_vital", UserWarning)
            self._loader = self._loaders.StatefulDataLoader(
                _WorkerDataset(self._dataset),
                batch_size=None,
                num_workers=self._workers,
                prefetch_factor=_PREFETCH if self._workers else None,
                pin_memory=bool(self._workers) and torch.cuda.is_initialized(),
                # A loader draws a seed when it is opened. From the training's generator, a resumed run, which
                # opens one more, would have other dropout from there on.
                generator=torch.Generator().manual_seed(0),
                worker_init_fn=partial(_set_up_worker, os.getpid()) if self._workers else None,
            )
        # torch's handler raises in whatever the main thread is doing when a worker ends. Asking for a batch
        # finds that out too, and there the state before the step can be saved.
        with without_sigchld_handler():
            self._iterator = iter(self._loader)
        if self._workers and not self._loader.pin_memory:
            # Only the worker writes there. With our end open, we would wait for ever for the rest of a batch
            # that a killed worker was sending.
            self._iterator._worker_result_queue._writer.close()


_OPEN: weakref.WeakSet[Batches] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A program that ends waits for its child processes, and a worker ignores signals. Registered after
    multiprocessing's own handler, so it runs before that one."""
    for batches in list(_OPEN):
        if batches.opened_by == os.getpid():  # not in a forked child
            batches.close()


def _find(state: Any, key: str) -> Any:
    """The value of `key` in the loader's state, which is nested differently with and without a worker."""
    pending = [state]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            if key in value:
                return value[key]
            pending += value.values()
    raise KeyError(key)
