"""The cases of lif_gate: B sequences x T steps x H heads of D neurons; one kernel against a loop."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.ops.peers import op
from benchmarks.ops.runs import Case, Contender, Inputs

Shape = tuple[int, int, int, int]
TABLE: tuple[Shape, ...] = ((16, 256, 8, 64), (4, 4096, 12, 64))  # report 000's two sizes of model
TINY: tuple[Shape, ...] = ((2, 20, 2, 8),)
NEURON = {"decay": 0.92, "threshold": 0.35, "surrogate_beta": 9.0}  # the report's
LOOP = "loop over time"


def named(shape: Shape) -> str:
    b, t, h, d = shape
    return f"B{b} T{t} H{h} D{d}"


def inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    drive = torch.randn(shape, device=device, dtype=dtype).mul_(0.3)
    return {
        "drive": drive.requires_grad_(),
        "grad": torch.randn(shape, device=device, dtype=dtype),
    }


def floor_bytes(shape: Shape, dtype: torch.dtype) -> int:
    """The spikes and the gradient of the drive."""
    b, t, h, d = shape
    return 2 * b * t * h * d * dtype.itemsize


def ours(i: Inputs, **options: Any) -> Tensor:
    return op("spiking", "lif_gate")(i["drive"], **NEURON, **options)[0]


def cases(tiny: bool) -> list[Case]:
    return [_case(shape) for shape in (TINY if tiny else TABLE)]


def _case(shape: Shape) -> Case:
    dtype, long = torch.bfloat16, shape[1] > 1024  # loops over so many steps take half a second and more
    contenders = [
        Contender(LOOP, partial(ours, impl="reference"), "grad"),
        Contender("oomph", ours, "grad"),
    ]
    if not long:
        contenders.append(Contender("oomph chunked", partial(ours, impl="chunked"), "grad"))
    return Case(
        op="lif_gate",
        shape=named(shape),
        make=partial(inputs, shape, dtype),
        contenders=contenders,
        floor=floor_bytes(shape, dtype),
        limit=LOOP,
        rounds=3 if long else None,
    )
