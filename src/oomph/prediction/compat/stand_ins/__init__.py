"""Packages that need a GPU to be built, as `flash_attn`: stand-ins, where they are not installed.

Each folder here is such a package, with the functions and modules that training code calls. Its ops compute
nothing: they allocate, in order, what the source that they name allocates, and save for backward what that
saves. A program that fails because a package is missing runs again with its stand-in; one that does without
keeps doing so. The environment variable OOMPH_STAND_INS names those to use from the start ("0": none).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Collection, Hashable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from oomph.errors import UserError
from oomph.gpus import GPU
from oomph.prediction.compat.library import Library
from oomph.prediction.compat.triton import TUNING_BYTES
from oomph.prediction.patches import Patches

if TYPE_CHECKING:
    from oomph.prediction.tracer.tracer import Tracer

_FOLDER = str(Path(__file__).parent)
# The release whose sources each follows; those of Mamba 2's ops are as in 2.2.
VERSIONS = {"flash_attn": "2.8.3", "xformers": "0.0.35", "mamba_ssm": "2.2.6", "causal_conv1d": "1.5.4"}


_WITH = {"mamba_ssm": {"causal_conv1d"}}  # which its users install as well
_asked: set[str] = set()  # for packages that are missing, by the program of this process
_needed: set[str] = set()  # without these a program failed


class _Distribution(importlib.metadata.Distribution):
    def __init__(self, package: str) -> None:
        name = package.replace("_", "-")
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {VERSIONS[package]}\n"
        self._files = {"METADATA": metadata, "top_level.txt": package}

    def read_text(self, filename: Any) -> str | None:
        return self._files.get(str(filename))

    def locate_file(self, path: Any) -> NoReturn:
        raise FileNotFoundError(path)


class _Finder(MetaPathFinder):
    """The last to be asked: what is installed comes first."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name in _used():
            return PathFinder.find_spec(name, [_FOLDER])
        _asked.update(VERSIONS.keys() & {name})
        return None

    def find_distributions(self, context: Any = None) -> Iterator[_Distribution]:
        """Also asked where the package is installed, after that."""
        asked = getattr(context, "name", None)
        for package in _used():
            if asked in (None, package, package.replace("_", "-")) and is_stand_in(package):
                yield _Distribution(package)


def _used() -> Collection[str]:
    given = os.environ.get("OOMPH_STAND_INS")
    if given is None:
        return _needed
    names = {name.strip().replace("-", "_") for name in given.split(",")} - {"", "0"}
    if unknown := names - VERSIONS.keys():
        raise UserError(
            f"OOMPH_STAND_INS={given}: there is no stand-in for {', '.join(sorted(unknown))}; valid: "
            f"{', '.join(VERSIONS)}, or 0 for none"
        )
    return names


def _lacked(error: BaseException | None) -> set[str]:
    """Packages that the program asked for in vain, and without which it failed, as the error says."""
    found: set[str] = set()
    while error is not None and "OOMPH_STAND_INS" not in os.environ:
        if isinstance(error, ImportError):
            words = f"{error.name} {error}".lower().replace("-", "_")
            found |= {name for name in _asked if name in words}
        error = error.__cause__ or error.__context__
    return found.union(*(_WITH.get(name, ()) for name in found)) - _needed


def _provide(packages: Collection[str]) -> None:
    _needed.update(packages)


def is_stand_in(package: str) -> bool:
    try:
        found = importlib.util.find_spec(package)
    except ValueError:  # in sys.modules without a spec
        return False
    return found is not None and str(found.origin).startswith(_FOLDER)


_finder = _Finder()


def make_importable() -> None:
    """Add the finder, and let libraries look again for installed packages."""
    sys.meta_path.append(_finder)
    _ask_again()
    _asked.clear()


def remove() -> None:
    sys.meta_path.remove(_finder)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in VERSIONS and str(getattr(module, "__file__", "")).startswith(_FOLDER):
            del sys.modules[name]
    _ask_again()


def _ask_again() -> None:
    """transformers reads the installed packages when it is imported, and keeps its answers."""
    known = sys.modules.get("transformers.utils.import_utils")
    if known is None or not _used():
        return
    names = known.PACKAGE_DISTRIBUTION_MAPPING
    for package in VERSIONS:
        if is_stand_in(package):
            names[package] = [package.replace("_", "-")]
        elif importlib.util.find_spec(package) is None:
            names.pop(package, None)
    for value in vars(known).values():
        if callable(forget := getattr(value, "cache_clear", None)):
            forget()


# ------------------------------------------------------------------------------------- what the packages call

_tracer: Tracer | None = None


def _tracer_of(package: str) -> Tracer:
    if _tracer is None:
        raise ImportError(
            f"{package} is not installed here; oomph's stand-in for it runs in predictions only"
        )
    return _tracer


def gpu(package: str) -> GPU:
    return _tracer_of(package).gpu


def kernel(
    package: str, tensors: Sequence[torch.Tensor | None], flops: float = 0.0, tuned_for: Hashable = None
) -> None:
    """A kernel that reads and writes these tensors. `flops`: of its products. `tuned_for`: a Triton kernel
    and what it is tuned for at its first call."""
    tracer = _tracer_of(package)
    if not all(tensor is None or tensor.is_cuda for tensor in tensors):
        raise RuntimeError(f"{package}: all tensors must be on a CUDA device")
    if tuned_for is not None and (package, tuned_for) not in _tuned:
        _tuned.add((package, tuned_for))
        torch.empty(TUNING_BYTES, dtype=torch.uint8, device="cuda")
    tracer.note_once(
        f"{package} is not installed here; a stand-in has its shapes and memory (OOMPH_STAND_INS=0: none)"
    )
    tracer.count_kernel(*tensors, flops=flops)


_tuned: set[Hashable] = set()


def _in_trace(patches: Patches, tracer: Tracer) -> None:
    if _finder not in sys.meta_path:
        make_importable()
        patches.callback(remove)
    patches.set(sys.modules[__name__], "_tracer", tracer)
    _tuned.clear()


def _check_names() -> None:
    """Raise for the user's mistakes before the program runs."""
    _used()


def _in_process(allow: Collection[str]) -> None:
    """For good: a target is imported before it is traced."""
    make_importable()


LIBRARY = Library(
    "packages that need a GPU",
    None,
    in_trace=_in_trace,
    in_process=_in_process,
    before_fork=_check_names,
    lacked=_lacked,
    provide=_provide,
)
