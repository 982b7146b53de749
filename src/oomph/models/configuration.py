"""From a model's name to its configuration: a folder, the catalogue of this package, or the hub.

Imports neither torch nor transformers, so that a mistake in a name is reported at once.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

from oomph.errors import UserError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_FILE = "config.json"
_LISTED = 4


@dataclass(frozen=True)
class CatalogueEntry:
    name: str
    config: dict[str, Any]  # the keys of config.json
    parameters: int  # tied weights once
    source: str  # and its date


@cache
def catalogue() -> dict[str, CatalogueEntry]:
    """The models that oomph knows, by every name they have on the hub."""
    content = json.loads((Path(__file__).parent / "catalogue.json").read_text(encoding="utf-8"))
    found = {}
    for name, row in content["models"].items():
        source = content["sources"][row["source"]]
        for each in (name, *row["also"]):
            found[each] = CatalogueEntry(each, row["config"], row["parameters"], source)
    return found


def is_name(target: str) -> bool:
    """Whether a target without a colon names a model: a folder with config.json, an entry, or `org/name`."""
    if (Path(target) / _FILE).is_file() or _entries(target):
        return True
    return bool(_NAME.fullmatch(target)) and "/" in target and not Path(target).parent.exists()


def near(target: str, alike: float = 0.75) -> list[str]:
    """The names of the catalogue that are most like it, by what follows the slash."""
    wanted = _short(target)
    likeness = {name: difflib.SequenceMatcher(None, wanted, _short(name)).ratio() for name in catalogue()}
    found = [name for name in likeness if likeness[name] >= alike]
    # Of two as like, that which begins like it: gemma-3-4b is gemma-3-4b-pt rather than gemma-2-9b.
    for name in found:
        same = takewhile(lambda pair: pair[0] == pair[1], zip(wanted, _short(name), strict=False))
        likeness[name] += len([*same]) / len(wanted)
    return sorted(found, key=lambda name: -likeness[name])[:_LISTED]


def find(name: str, allow_network: bool = True) -> dict[str, Any]:
    """The configuration of a folder, an entry of the catalogue, or a repository of the hub."""
    folder = Path(name)
    if (folder / _FILE).is_file():
        return _read(folder / _FILE)
    if folder.is_dir():
        raise UserError(f"folder {name!r} has no {_FILE}; give the folder of a model, or its name on the hub")
    entries = _entries(name)
    if len({str(entry.config) for entry in entries}) == 1:
        return entries[0].config
    if entries:
        names = ", ".join(entry.name for entry in entries)
        raise UserError(f"model {name!r} is more than one; give one of {names}")
    if "/" not in name or not _NAME.fullmatch(name):
        raise UserError(f"model {name!r} is not known; {_valid(name)}")
    return _read(_from_hub(name, allow_network))


def _entries(name: str) -> list[CatalogueEntry]:
    """Its entry, or those with this name after the slash."""
    known = catalogue()
    if name in known:
        return [known[name]]
    wanted = name.lower()
    return [entry for each, entry in known.items() if wanted in (each.lower(), _short(each))]


def _short(name: str) -> str:
    return name.rpartition("/")[2].lower()


def _valid(name: str) -> str:
    close = near(name, alike=0.6)
    rules = "give a name on the hub (org/name), or a folder with its config.json"
    return f"the nearest that oomph knows are {', '.join(close)}; or {rules}" if close else rules


def _read(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise UserError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise UserError(f"{file} is not the configuration of a model of transformers: it has no model_type")
    return config


def _from_hub(name: str, allow_network: bool) -> Path:
    """Its config.json, of which the hub's own cache keeps a copy. Nothing else is fetched."""
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError as error:
        raise UserError(
            f"model {name!r} is not in oomph's catalogue, and the hub is read with huggingface_hub: "
            "pip install huggingface_hub"
        ) from error
    cached = huggingface_hub.try_to_load_from_cache(name, _FILE)
    if isinstance(cached, str):
        return Path(cached)
    if not allow_network:
        raise UserError(f"the {_FILE} of model {name!r} is not in the hub's cache")
    try:
        # Asked first, since a download is tried again and again where there is no network.
        huggingface_hub.get_hf_file_metadata(huggingface_hub.hf_hub_url(name, _FILE))
        return Path(huggingface_hub.hf_hub_download(name, _FILE))
    except errors.GatedRepoError as error:
        raise UserError(
            f"model {name!r} is gated: accept its terms on the hub and `hf auth login`; or give a "
            "folder with its config.json"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(
            f"model {name!r} is not on the hub, or is private or gated (`hf auth login`); {_valid(name)}"
        ) from error
    except errors.EntryNotFoundError as error:
        raise UserError(f"model {name!r} has no {_FILE} on the hub, so it is not of transformers") from error
    except Exception as error:  # of the network: the libraries beneath raise their own
        endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise UserError(
            f"model {name!r} is not in oomph's catalogue, and the hub at {endpoint} does not give it: "
            f"{reason}; {_valid(name)}"
        ) from error
