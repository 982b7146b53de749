"""The cases of kda: B sequences x T tokens x H heads x D features of a head, for keys and values alike.

All five inputs are bfloat16, the log-decay as well, and every contender is given the same tensors. The fused
gate of fla alone is given the gate's own input (`raw`), of which the log-decay is -softplus.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.ops.peers import Peer, fla_module, fla_of, op
from benchmarks.ops.rows import Row
from benchmarks.ops.runs import Case, Contender, Inputs, Machine, MiB, gradient_errors

Shape = tuple[int, int, int, int]
REPORT: Shape = (16, 256, 8, 64)  # report 000
LARGE: tuple[Shape, ...] = ((4, 8192, 32, 128), (1, 32768, 32, 128))  # with fla's fused gate as well
TABLE: tuple[Shape, ...] = ((1, 4096, 16, 128), *LARGE, REPORT)
# Heads as in the table: for any other number or size of heads, fla compiles and tunes for minutes.
HELD_OUT: tuple[Shape, ...] = ((3, 5000, 16, 128), (1, 12345, 32, 128), (8, 2048, 8, 64))
SWEEP: tuple[Shape, ...] = tuple((1, tokens, 32, 128) for tokens in (2048, 4096, 8192, 16384, 65536, 131072))
ERRORS: tuple[Shape, ...] = ((1, 512, 16, 128), (1, 500, 8, 64), (1, 300, 4, 256))
TINY: tuple[Shape, ...] = ((1, 96, 2, 32), (2, 64, 2, 16))
SEQUENTIAL = "sequential"
NAMES = ("q", "k", "v", "log_alpha", "beta")
REPORT_BUDGET = 16 * MiB  # 40 MiB in all, with 20 of results and gradients and 2 of states
TIGHT = 0.15  # of results and gradients; a quarter of fla's peak is 1.4 times these


def named(shape: Shape) -> str:
    b, t, h, d = shape
    return f"B{b} T{t} H{h} D{d}"


def inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    """Keys and queries of length 1; most channels keep 90 to 99 % of the state from token to token."""
    b, t, h, d = shape

    def normal() -> Tensor:
        return torch.randn(b, t, h, d, device=device, dtype=dtype)

    raw = normal().sub_(3)
    made = {
        "q": F.normalize(normal(), dim=-1),
        "k": F.normalize(normal(), dim=-1),
        "v": normal(),
        "log_alpha": F.softplus(raw).neg_(),
        "beta": torch.rand(b, t, h, device=device, dtype=dtype),
        "raw": raw,
    }
    made = {name: value.requires_grad_() for name, value in made.items()}
    return {**made, "A_log": torch.zeros(h, device=device), "grad": normal()}


def floor_bytes(shape: Shape, dtype: torch.dtype) -> int:
    """The result and the five gradients."""
    b, t, h, d = shape
    return b * t * h * (5 * d + 1) * dtype.itemsize


def tight_budget(shape: Shape) -> int:
    """What `memory_budget` counts: all that is needed beside inputs, results and gradients."""
    return REPORT_BUDGET if shape == REPORT else int(TIGHT * floor_bytes(shape, torch.bfloat16))


def ours(i: Inputs, **options: Any) -> Tensor:
    return op("delta_attention", "kda")(*(i[name] for name in NAMES), **options)[0]


def forward_alone(i: Inputs, **options: Any) -> None:
    with torch.no_grad():
        ours(i, **options)


def loop(i: Inputs) -> Tensor:
    """Token by token, from `unbind`, whose backward is one stack; that of T slices is quadratic in T."""
    q, k, v, log_alpha, beta = (i[name].float().unbind(1) for name in NAMES)
    scale = i["q"].shape[-1] ** -0.5
    state = i["v"].new_zeros(*i["k"][:, 0].shape, i["v"].shape[-1], dtype=torch.float32)
    outputs = []
    for t in range(len(q)):
        state = log_alpha[t].exp().unsqueeze(-1) * state
        row = k[t].unsqueeze(-2)
        write = beta[t][..., None, None] * (v[t].unsqueeze(-2) - row @ state)
        state = torch.addcmul(state, row.transpose(-1, -2), write)
        outputs.append((scale * q[t]).unsqueeze(-2) @ state)
    return torch.stack(outputs, 1).squeeze(-2).to(i["v"].dtype)


def fla(i: Inputs, fused_gate: bool = False, **options: Any) -> Tensor:
    chunk_kda = fla_module("fla.ops.kda").chunk_kda
    gate = i["log_alpha"]
    if fused_gate:
        gate, options = i["raw"], {**options, "use_gate_in_kernel": True, "A_log": i["A_log"]}
    return chunk_kda(i["q"], i["k"], i["v"], gate, i["beta"], **options)[0]


DENSE = (
    Contender("dense scan", partial(ours, mode="scan"), "grad"),
    Contender("dense scan, forward alone", partial(forward_alone, mode="scan")),
)


def _case(shape: Shape, contenders: Sequence[Contender], dtype: torch.dtype = torch.bfloat16) -> Case:
    return Case(
        op="kda",
        shape=named(shape),
        make=partial(inputs, shape, dtype),
        contenders=contenders,
        floor=floor_bytes(shape, dtype),
        limit="fla",
    )


def contenders(shape: Shape, peers: Sequence[Peer]) -> list[Contender]:
    peer = fla_of(peers)
    found = [
        Contender("oomph", ours, "grad"),
        Contender("oomph tight", partial(ours, memory_budget=tight_budget(shape)), "grad"),
    ]
    if peer:
        found.insert(0, Contender("fla", fla, "grad", peer=peer))
    if peer and shape in LARGE:
        found.append(Contender("fla fused gate", partial(fla, fused_gate=True), "grad", peer=peer))
        # Its faster kernels for decays that are known to be above exp(-5), as these are.
        found.append(Contender("fla safe gate", partial(fla, safe_gate=True), "grad", peer=peer))
    return found


def cases(peers: Sequence[Peer], tiny: bool) -> list[Case]:
    shapes, dense = ((*TABLE, *HELD_OUT, *SWEEP), REPORT) if not tiny else (TINY, TINY[1])
    found = {shape: _case(shape, contenders(shape, peers)) for shape in shapes}
    found[dense] = replace(found[dense], contenders=(*found[dense].contenders, *DENSE))
    return list(found.values())


def cpu_case(shape: Shape) -> Case:
    """Chunks in plain torch against the loop over tokens, in float32."""
    case = _case(
        shape,
        [
            Contender(SEQUENTIAL, loop, "grad"),
            Contender("oomph chunked", partial(ours, mode="chunked", impl="torch"), "grad"),
        ],
        torch.float32,
    )
    return replace(case, limit=SEQUENTIAL, rounds=3)


def error_rows(machine: Machine, peers: Sequence[Peer], tiny: bool) -> Iterator[list[Row]]:
    """Each of the five gradients against the specification in float64."""
    for shape in TINY if tiny else ERRORS:
        extra = [
            Contender(SEQUENTIAL, loop, "grad"),
            Contender("oomph segments of 128", partial(ours, memory_chunk_size=128), "grad"),
            Contender("oomph torch", partial(ours, mode="chunked", impl="torch"), "grad"),
        ]
        # Heads of 256 are not in the table: see HELD_OUT.
        others = [] if shape[3] == 256 else contenders(shape, peers)
        case = _case(shape, [*others, *extra])
        yield gradient_errors(case, machine, NAMES, partial(ours, impl="reference"), "grad")
