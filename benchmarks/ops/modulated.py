"""The cases of modulated_linear, h W + ((h A) * mod) B: N tokens x d x f features, rank r."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from benchmarks.ops.peers import ops
from benchmarks.ops.runs import Case, Contender, Inputs

Shape = tuple[int, int, int, int]
TABLE: Shape = (65536, 4096, 14336, 16)
HELD_OUT: Shape = (20000, 2048, 11008, 8)
TINY: Shape = (64, 16, 40, 4)


def inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    n, d, f, r = shape

    def normal(*sizes: int, scale: float = 1.0, grad: bool = True) -> Tensor:
        made = torch.randn(*sizes, device=device, dtype=dtype)
        return (made if scale == 1 else made.mul_(scale)).requires_grad_(grad)

    return {
        "h": normal(n, d),
        "weight": normal(d, f, scale=d**-0.5, grad=False),  # frozen
        "A": normal(d, r, scale=d**-0.5),
        "B": normal(r, f),
        "mod": normal(n, r, scale=0.1),
        "grad": normal(n, f, grad=False),
    }


def bare(i: Inputs) -> Tensor:
    return i["h"] @ i["weight"]


def eager(i: Inputs) -> Tensor:
    return i["h"] @ i["weight"] + ((i["h"] @ i["A"]) * i["mod"]) @ i["B"]


def ours(i: Inputs) -> Tensor:
    return ops().modulated_linear(i["h"], i["weight"], i["A"], i["B"], i["mod"])


def case(shape: Shape, dtype: torch.dtype = torch.bfloat16, limit: str = "bare h W") -> Case:
    n, d, f, r = shape
    return Case(
        op="modulated",
        shape="x".join(map(str, shape)),
        make=partial(inputs, shape, dtype),
        contenders=(
            Contender("bare h W", bare, "grad", floor=(n * f + n * d) * dtype.itemsize),
            Contender("eager", eager, "grad"),
            Contender("oomph", ours, "grad"),
        ),
        floor=(n * f + n * d + d * r + r * f + n * r) * dtype.itemsize,  # the result and the gradients
        limit=limit,
        held=True,
    )


def cases(tiny: bool) -> list[Case]:
    return [case(TINY)] if tiny else [case(TABLE), case(HELD_OUT)]


def cpu_case(shape: Shape) -> Case:
    return case(shape, torch.float32, limit="eager")
