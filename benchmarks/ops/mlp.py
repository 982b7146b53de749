"""The cases of tiled_mlp: N tokens x d features x f hidden features."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.ops import runs
from benchmarks.ops.peers import Peer, imported, liger_tiled_mlp, ops
from benchmarks.ops.rows import Row
from benchmarks.ops.runs import Case, Contender, Inputs, Machine, relative_error

Shape = tuple[int, int, int]
TABLE: Shape = (131072, 2560, 9216)
HELD_OUT: Shape = (50000, 2048, 8192)
TINY: Shape = (256, 16, 48)


class SwiGLU(nn.Module):
    def __init__(self, d: int, f: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(d, f, bias=False)
        self.up_proj = nn.Linear(d, f, bias=False)
        self.down_proj = nn.Linear(f, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class GELU(nn.Module):
    def __init__(self, d: int, f: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(d, f)
        self.down_proj = nn.Linear(f, d)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.up_proj(x), approximate="tanh"))


def inputs(kind: type[nn.Module], shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    n, d, f = shape
    return {
        "mlp": kind(d, f).to(device, dtype),
        "x": torch.randn(n, d, device=device, dtype=dtype).requires_grad_(),
        "grad": torch.randn(n, d, device=device, dtype=dtype),
    }


def floor_bytes(kind: type[nn.Module], shape: Shape, dtype: torch.dtype) -> int:
    """The result, the gradient of x, and those of the weights."""
    n, d, f = shape
    with torch.device("meta"):
        weights = sum(param.numel() for param in kind(d, f).parameters())
    return (2 * n * d + weights) * dtype.itemsize


def eager(i: Inputs) -> Tensor:
    return i["mlp"](i["x"])


def ours(i: Inputs, **options: object) -> Tensor:
    return ops().tiled_mlp(i["mlp"], i["x"], **options)


def liger(i: Inputs, shards: int | None = None) -> Tensor:
    """Its tiled SwiGLU module, or its tiling of our module where it has no module of the kind."""
    if isinstance(i["mlp"], SwiGLU):
        made = liger_tiled_mlp("SwiGLU", i["mlp"])
        if isinstance(made, str):
            raise ImportError(made)
        made.num_shards = shards  # type: ignore[assignment]
        return made(i["x"])
    found = imported("liger_kernel.ops")
    if isinstance(found, str):
        raise ImportError(found)
    return found.apply_tiled_mlp(lambda mlp, x: mlp(x), i["mlp"], i["x"], num_shards=shards)


def _contenders(peers: Sequence[Peer]) -> list[Contender]:
    liger_of = next((peer for peer in peers if peer.name == "liger_kernel" and not peer.missing), None)
    found = [Contender("eager", eager, "grad"), Contender("oomph", ours, "grad")]
    if liger_of is not None:
        version = f"liger_kernel {liger_of.version}"
        found.append(Contender("Liger tiled", liger, "grad", peer=version))
        found.append(Contender("Liger tiled 16 shards", partial(liger, shards=16), "grad", peer=version))
    return found


def cases(peers: Sequence[Peer], tiny: bool) -> list[Case]:
    return [
        _case(SwiGLU, TINY if tiny else TABLE, _contenders(peers)),
        _case(GELU, TINY if tiny else HELD_OUT, _contenders(peers)),
    ]


def _case(
    kind: type[nn.Module], shape: Shape, contenders: Sequence[Contender], dtype: torch.dtype = torch.bfloat16
) -> Case:
    return Case(
        op="mlp",
        shape=f"{kind.__name__} {'x'.join(map(str, shape))}",
        make=partial(inputs, kind, shape, dtype),
        contenders=contenders,
        floor=floor_bytes(kind, shape, dtype),
        limit="eager",
    )


def cpu_case(shape: Shape) -> Case:
    chunked = Contender("oomph chunked", partial(ours, impl="chunked"), "grad")
    return _case(SwiGLU, shape, [Contender("eager", eager, "grad"), chunked], torch.float32)


def reference_gradients(i: Inputs, rows: int = 4096) -> dict[str, Tensor]:
    """The weights' gradients in float64, by name, and that of x as "x"; some rows at a time."""
    mlp = copy.deepcopy(i["mlp"]).double()
    dx = []
    for x, grad in zip(i["x"].detach().split(rows), i["grad"].split(rows), strict=True):
        part = x.double().requires_grad_()
        mlp(part).backward(grad.double())
        assert part.grad is not None
        dx.append(part.grad.float())
    weights = {name: param.grad for name, param in mlp.named_parameters() if param.grad is not None}
    return {"x": torch.cat(dx), **weights}


def error_rows(machine: Machine, peers: Sequence[Peer], tiny: bool) -> Iterator[list[Row]]:
    """One row for each contender and weight (in `data`): its gradient against a float64 computation."""
    for case in cases(peers, tiny):
        yield runs.error_rows(replace(case, op="mlp errors"), machine, _compared)


def _compared(made: Inputs) -> Callable[[], runs.Errors]:
    right = reference_gradients(made)

    def errors() -> runs.Errors:
        dx = relative_error(made["x"].grad, right["x"])
        for name, param in made["mlp"].named_parameters():
            yield name, {"dx_error": dx, "dw_error": relative_error(param.grad, right[name])}

    return errors
