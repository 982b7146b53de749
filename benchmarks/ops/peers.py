"""Other libraries' answers to the same questions, wherever they can be imported."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.ops.runs import Contender, Inputs

Loss = Callable[[Inputs], Tensor]


@dataclass(frozen=True)
class Peer:
    """A library: what it offers here, or why nothing."""

    name: str  # as it is imported
    version: str = ""
    missing: str = ""
    losses: tuple[Contender, ...] = ()
    others: str = "tiled MLP"  # what it is compared in where it has no losses

    def line(self) -> str:
        if self.missing:
            return f"peer {self.name}: skipped ({self.missing})"
        found = [contender.name for contender in self.losses]
        return f"peer {self.name} {self.version}: {', '.join(found) or self.others}"


def find_peers() -> list[Peer]:
    return [_liger(), _cut_cross_entropy(), _torchao(), _torch(), fla_peer()]


def imported(module: str) -> ModuleType | str:
    """The module, or in a few words why it cannot be had."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of their own dependencies
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        return f"no module named {error.name!r}"
    except Exception as error:  # a library that cannot start here is as good as missing
        return f"{type(error).__name__}: {error}".splitlines()[0][:160]


def _version(*distributions: str, module: ModuleType | None = None) -> str:
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return str(getattr(module, "__version__", "of unknown version"))


def _liger() -> Peer:
    found = imported("liger_kernel.transformers.functional")
    if isinstance(found, str):
        return Peer("liger_kernel", missing=found)
    version = _version("liger_kernel")
    loss = found.liger_fused_linear_cross_entropy
    peer = f"liger_kernel {version}"
    more = {"chunk_mem_const": 8, "accum_dtype": torch.float32}
    return Peer(
        "liger_kernel",
        version,
        losses=(
            Contender("Liger", lambda i: loss(i["x"], i["weight"], i["target"]), peer=peer),
            Contender("Liger C=8 fp32", lambda i: loss(i["x"], i["weight"], i["target"], **more), peer=peer),
        ),
    )


def _cut_cross_entropy() -> Peer:
    found = imported("cut_cross_entropy")
    if isinstance(found, str):
        return Peer("cut_cross_entropy", missing=found)
    version = _version("cut-cross-entropy", "cut_cross_entropy", module=found)
    peer = f"cut_cross_entropy {version}"
    names = {impl.name.lower() for impl in found.LinearCrossEntropyImpl}

    def loss(**options: Any) -> Loss:
        return lambda i: found.linear_cross_entropy(i["x"], i["weight"], i["target"], **options)

    # Older versions have no name for it: no gradient is left out when nothing is filtered.
    whole = {"impl": "cce_exact"} if "cce_exact" in names else {"impl": "cce", "filter_eps": None}
    return Peer(
        "cut_cross_entropy",
        version,
        losses=(
            Contender("cce", loss(impl="cce"), peer=peer, exact=False),
            Contender("cce_exact" if "cce_exact" in names else "cce unfiltered", loss(**whole), peer=peer),
        ),
    )


def _torchao() -> Peer:
    """Named because people look for it: as of 0.18 it has no op of this kind. Not imported: that is slow."""
    if importlib.util.find_spec("torchao") is None:
        return Peer("torchao", missing="no module named 'torchao'")
    version = _version("torchao")
    return Peer("torchao", version, missing=f"{version} has no fused linear cross-entropy")


def _torch() -> Peer:
    """torch's own, since 2.13."""
    name, loss = "torch.nn.functional.linear_cross_entropy", getattr(F, "linear_cross_entropy", None)
    if loss is None:
        return Peer(name, missing=f"torch {torch.__version__} has none; it came with 2.13")
    options = nn.LinearCrossEntropyOptions()  # type: ignore[attr-defined]
    forward: Loss = lambda i: loss(i["x"], i["weight"], i["target"], options=options)  # noqa: E731
    return Peer(
        name,
        torch.__version__,
        losses=(Contender("torch native", forward, peer=f"torch {torch.__version__}"),),
    )


def fla_peer() -> Peer:
    """flash-linear-attention. Not imported before it is needed: that takes seconds."""
    if importlib.util.find_spec("fla") is None:
        return Peer("fla", missing="no module named 'fla'")
    return Peer("fla", _version("flash-linear-attention", "fla-core"), others="KDA, NSA")


def fla_of(peers: Sequence[Peer]) -> str:
    """ "fla 0.6.0", or "" where it is not installed."""
    return next((f"fla {peer.version}" for peer in peers if peer.name == "fla" and not peer.missing), "")


@functools.cache
def fla_module(name: str) -> ModuleType:
    """A module of fla's ops, without its layers and models, whose imports take ten seconds and more.

    Its tuners then time a configuration for 30 ms rather than 125: there are hundreds.
    """
    import triton.testing

    if not isinstance(triton.testing.do_bench, functools.partial):
        triton.testing.do_bench = functools.partial(triton.testing.do_bench, warmup=5, rep=25)
    # None stands for a module that is not there: fla goes on without these.
    left_out: dict[str, Any] = {"fla.layers": None, "fla.models": None} if "fla" not in sys.modules else {}
    sys.modules.update(left_out)
    try:
        return importlib.import_module(name)
    finally:
        for module in left_out:
            del sys.modules[module]


def liger_tiled_mlp(kind: str, module: nn.Module) -> nn.Module | str:
    """Liger's tiled MLP ("SwiGLU" or "GEGLU") around the very weights of `module`, or why there is none."""
    found = imported("liger_kernel.transformers.tiled_mlp")
    if isinstance(found, str):
        return found
    f, d = module.gate_proj.weight.shape  # type: ignore[union-attr]
    activation = {"SwiGLU": "silu", "GEGLU": "gelu_pytorch_tanh"}[kind]
    config = SimpleNamespace(hidden_size=d, intermediate_size=f, hidden_act=activation)
    with torch.device("meta"):
        made = getattr(found, f"LigerTiled{kind}MLP")(config)
    for name in ("gate_proj", "up_proj", "down_proj"):
        setattr(made, name, getattr(module, name))
    return made


@functools.cache
def ops() -> Any:
    """oomph.ops, imported when first used."""
    return importlib.import_module("oomph.ops")


def op(folder: str, name: str) -> Any:
    """One function of one of its rooms: `op("delta_attention", "kda")`."""
    return getattr(importlib.import_module(f"oomph.ops.{folder}"), name)
