"""The cases of selective_scan: B sequences x L tokens x d channels, n states each, one way and both ways."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.ops.peers import Peer, op
from benchmarks.ops.rows import Row
from benchmarks.ops.runs import Case, Contender, Inputs, Machine, gradient_errors

Shape = tuple[int, int, int, int]
TABLE: Shape = (64, 512, 512, 16)  # report 004
HELD_OUT: Shape = (3, 5000, 768, 16)
ERRORS: Shape = (2, 500, 64, 16)
TINY: Shape = (2, 40, 8, 4)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
DENSE = "dense [B,L,d,n]"
NAMES = ("x", "delta", "A", "B", "C", "D")


def named(shape: Shape, kind: str, both: bool) -> str:
    b, length, d, n = shape
    return f"B{b} L{length} d{d} n{n} {kind}{' both ways' if both else ''}"


def inputs(shape: Shape, dtype: torch.dtype, both: bool, device: torch.device) -> Inputs:
    """A and D in float32, as Mamba keeps them; the steps lie between 0.001 and 0.1."""
    b, length, d, n = shape
    ways = (2,) if both else ()
    steps = torch.rand(*ways, b, length, d, device=device).mul_(4.6).sub_(6.9).exp_()
    made = {
        "x": torch.randn(b, length, d, device=device, dtype=dtype),
        "delta": steps.to(dtype),
        "A": torch.arange(1.0, n + 1, device=device).neg().expand(*ways, d, n).contiguous(),
        "B": torch.randn(*ways, b, length, n, device=device, dtype=dtype),
        "C": torch.randn(*ways, b, length, n, device=device, dtype=dtype),
        "D": torch.ones(*ways, d, device=device),
    }
    made = {name: value.requires_grad_() for name, value in made.items()}
    return {**made, "grad": torch.randn(b, length, d, device=device, dtype=dtype)}


def floor_bytes(shape: Shape, dtype: torch.dtype, both: bool) -> int:
    """The result and the six gradients."""
    b, length, d, n = shape
    ways = 2 if both else 1
    return b * length * (2 * d + ways * (d + 2 * n)) * dtype.itemsize + 4 * ways * d * (n + 1)


def ours(i: Inputs, **options: Any) -> Tensor:
    return op("state_space", "selective_scan")(*(i[name] for name in NAMES), **options)


def dense(i: Inputs) -> Tensor:
    """Decays and writes of all tokens as [B, L, d, n], joined by a scan of log2(L) levels."""
    x, delta, A, B, C, D = (i[name].float() for name in NAMES)
    decay = torch.exp(delta.unsqueeze(-1) * A)
    state = (delta * x).unsqueeze(-1) * B.unsqueeze(2)
    reach = 1
    while reach < x.shape[1]:
        joined = torch.addcmul(state[:, reach:], decay[:, reach:], state[:, :-reach])
        state = torch.cat((state[:, :reach], joined), 1)
        decay = torch.cat((decay[:, :reach], decay[:, reach:] * decay[:, :-reach]), 1)
        reach *= 2
    out = (state * C.unsqueeze(2)).sum(-1) + D * x
    return out.to(i["x"].dtype)


def _case(shape: Shape, kind: str, contenders: Sequence[Contender], both: bool = False) -> Case:
    dtype = DTYPES[kind]
    return Case(
        op="selective_scan",
        shape=named(shape, kind, both),
        make=partial(inputs, shape, dtype, both),
        contenders=contenders,
        floor=floor_bytes(shape, dtype, both),
        limit=DENSE,
    )


DENSE_FORM = Contender(DENSE, dense, "grad")
LOOP = Contender("loop over tokens", partial(ours, impl="reference"), "grad")
OURS = Contender("oomph", ours, "grad")
CHUNKED = Contender("oomph chunked", partial(ours, impl="chunked"), "grad")


def cases(tiny: bool) -> list[Case]:
    table, held_out = (TABLE, HELD_OUT) if not tiny else (TINY, (1, 33, 6, 3))
    both = partial(ours, direction="both")
    return [
        *(_case(table, kind, (DENSE_FORM, LOOP, OURS, CHUNKED)) for kind in DTYPES),
        _case(table, "bf16", (Contender("oomph", both, "grad"),), both=True),
        _case(held_out, "bf16", (OURS,)),
    ]


def cpu_case(shape: Shape) -> Case:
    loop = Contender("eager", LOOP.forward, "grad")
    return replace(_case(shape, "fp32", (loop, DENSE_FORM, CHUNKED)), limit="eager", rounds=5)


def error_rows(machine: Machine, peers: Sequence[Peer], tiny: bool) -> Iterator[list[Row]]:
    """Each gradient against the specification in float64."""
    for kind in DTYPES:
        case = _case(TINY if tiny else ERRORS, kind, (DENSE_FORM, OURS, CHUNKED))
        yield gradient_errors(case, machine, NAMES, partial(ours, impl="reference"), "grad")
