"""The cases of rotary: B x H query heads / key heads x T positions x D features, as models lay them out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks.ops.peers import Peer, imported, ops
from benchmarks.ops.runs import Case, Contender, Inputs

Shape = tuple[int, int, int, int, int]
LONG: Shape = (1, 32, 8, 65536, 128)
HELD_OUT: Shape = (16, 12, 12, 1000, 64)
TINY: Shape = (1, 2, 1, 16, 8)


def inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    """q and k as a projection leaves them: [B, T, H, D] in memory, [B, H, T, D] by shape."""
    b, heads, key_heads, t, d = shape
    made: Inputs = {}
    for name, count in (("q", heads), ("k", key_heads), ("gq", heads), ("gk", key_heads)):
        value = torch.randn(b, t, count, d, device=device, dtype=dtype).transpose(1, 2)
        made[name] = value.requires_grad_(not name.startswith("g"))
    frequencies = 10000.0 ** (-torch.arange(0, d, 2, device=device).float() / d)
    angles = torch.arange(t, device=device).float()[:, None] * frequencies
    made["cos"], made["sin"] = (torch.cat([turn, turn], -1)[None] for turn in (angles.cos(), angles.sin()))
    return made


def _backward(i: Inputs, q: Tensor, k: Tensor) -> None:
    torch.autograd.backward([q, k], [i["gq"], i["gk"]])


def eager(i: Inputs) -> None:
    """The formula that most models have, with tables in the inputs' dtype."""
    cos, sin = i["cos"].to(i["q"].dtype)[:, None], i["sin"].to(i["q"].dtype)[:, None]

    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    _backward(i, turned(i["q"]), turned(i["k"]))


def ours(i: Inputs, **options: object) -> None:
    _backward(i, *ops().rotary(i["q"], i["k"], **options))


def liger(i: Inputs) -> None:
    """It turns q and k in place, so that it holds no result of its own."""
    found = imported("liger_kernel.transformers.rope")
    if isinstance(found, str):
        raise ImportError(found)
    cos, sin = i["cos"].to(i["q"].dtype), i["sin"].to(i["q"].dtype)
    _backward(i, *found.liger_rotary_pos_emb(i["q"], i["k"], cos, sin))


def case(shape: Shape, peers: Sequence[Peer], dtype: torch.dtype = torch.bfloat16) -> Case:
    b, heads, key_heads, t, d = shape
    version = next((f"{p.name} {p.version}" for p in peers if p.name == "liger_kernel" and not p.missing), "")
    return Case(
        op="rotary",
        shape=f"B{b} H{heads}/{key_heads} T{t} D{d}",
        make=partial(inputs, shape, dtype),
        contenders=(
            Contender("eager", eager),
            Contender("oomph", ours),
            *([Contender("Liger in place", liger, peer=version)] if version else []),
        ),
        floor=2 * b * (heads + key_heads) * t * d * dtype.itemsize,  # the results and the gradients
        limit="eager",
    )


def cases(peers: Sequence[Peer], tiny: bool) -> list[Case]:
    return [case(shape, peers) for shape in ((TINY,) if tiny else (LONG, HELD_OUT))]
