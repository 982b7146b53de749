"""Data sets of the Hugging Face hub by name, through `datasets`; one line where there is no network."""

from __future__ import annotations

import os
import socket
import threading
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from oomph.errors import UserError
from oomph.training.data.needs import need
from oomph.training.data.sources.corpus import Corpus
from oomph.training.data.sources.parquet import open_parquet
from oomph.training.data.sources.table import TextTable

_PATIENCE = 5.0  # seconds for the name service and the connection together


@dataclass(frozen=True)
class Entry:
    """Where a name leads. Streamed: read over the network block by block, never stored whole."""

    repository: str
    configuration: str | None
    streamed: bool = False


TEXTS = {
    "wikitext-2": Entry("Salesforce/wikitext", "wikitext-2-raw-v1"),
    "wikitext-103": Entry("Salesforce/wikitext", "wikitext-103-raw-v1"),
    "fineweb-edu": Entry("HuggingFaceFW/fineweb-edu", "sample-10BT", streamed=True),
}
IMAGES = {"cifar10": Entry("uoft-cs/cifar10", None)}


def open_hub_text(name: str) -> Corpus:
    entry = TEXTS[name]
    if entry.streamed:
        fsspec = need("fsspec", f"the data set {name}")
        # Its files are parquet: read by row groups, they shuffle and resume like files on this machine.
        return Corpus(name, [open_parquet(url, "text", _Remote(fsspec)) for url in _files(name, entry)])
    table = _loaded(name, entry)
    return Corpus(name, [TextTable(table, int(table.data.nbytes))])


def open_hub_images(name: str) -> Any:
    """The rows of the training split: dicts with an image in `img`."""
    return _loaded(name, IMAGES[name])


class _Remote:
    """Opens a file of the hub; a class, because a worker process needs it pickled."""

    def __init__(self, fsspec: Any) -> None:
        self._open = fsspec.open

    def __call__(self, url: str) -> Any:
        return self._open(url, "rb").open()

    def __reduce__(self) -> tuple[Any, ...]:
        return _remote, ()


def _remote() -> _Remote:
    return _Remote(need("fsspec", "a data set of the hub"))


def _loaded(name: str, entry: Entry) -> Any:
    datasets = _library(name)
    return _or_one_line(
        name, lambda: datasets.load_dataset(entry.repository, entry.configuration, split="train")
    )


def _files(name: str, entry: Entry) -> list[str]:
    datasets = _library(name)
    builder = _or_one_line(name, lambda: datasets.load_dataset_builder(entry.repository, entry.configuration))
    return [str(url) for url in builder.config.data_files["train"]]


def _library(name: str) -> Any:
    """`datasets`, after a look whether its server answers: its own retries would take minutes."""
    datasets = need("datasets", f"the data set {name}")
    if not _offline() and not reachable(_server()):
        raise UserError(
            f"{name} is on the hub, and {urlsplit(_server()).hostname} does not answer; give a path, "
            '"stdlib" (text) or "photographs" (images), or set HF_HUB_OFFLINE=1 if it is on this machine'
        )
    return datasets


def _or_one_line(name: str, load: Any) -> Any:
    try:
        return load()
    except Exception as error:  # the library's own errors, its network's and its formats' have no common base
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f'{name} cannot be loaded from the hub ({first}); give a path to a file, or "stdlib"'
        ) from error


def _offline() -> bool:
    names = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
    return any(os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") for name in names)


def _server() -> str:
    """What a connection goes to first: the proxy where there is one."""
    proxy = os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy")
    return proxy or os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


def reachable(url: str, patience: float = _PATIENCE) -> bool:
    """Whether a TCP connection can be opened. In a thread, because a name service may hang for longer."""
    parts = urlsplit(url if "//" in url else f"//{url}")
    answered: list[bool] = []

    def connect() -> None:
        try:
            address = (parts.hostname or "", parts.port or (80 if parts.scheme == "http" else 443))
            with socket.create_connection(address, timeout=patience):
                answered.append(True)
        except (OSError, ValueError):
            answered.append(False)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(patience)
    return bool(answered and answered[0])
