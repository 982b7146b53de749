"""The cases of linear_cross_entropy: times at peaked logits, errors at peaked and flat ones.

Shapes are N tokens x H features x V classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.ops import runs
from benchmarks.ops.peers import Peer, ops
from benchmarks.ops.rows import Row
from benchmarks.ops.runs import Case, Contender, Inputs, Machine, relative_error

Shape = tuple[int, int, int]
TABLE: tuple[Shape, ...] = (
    (4096, 4096, 128256),
    (16384, 2560, 151936),
    (8192, 1024, 151936),
    (32768, 2560, 151936),
)
HELD_OUT: tuple[Shape, ...] = ((5000, 3072, 50257), (12288, 4096, 32000), (8192, 768, 256000))
LONG: Shape = (131072, 2560, 151936)  # report 002
ERRORS: tuple[Shape, ...] = ((8192, 1024, 50000), (4096, 4096, 128256), (16384, 2560, 32768))
TINY: Shape = (96, 32, 517)
LIMIT = "3-GEMM limit"
ROWS_AT_A_TIME = 4096


def named(shape: Shape) -> str:
    return "x".join(map(str, shape))


def inputs(shape: Shape, data: str, dtype: torch.dtype, device: torch.device) -> Inputs:
    """Peaked logits point at their target, which gets a probability of about 0.7 on average.

    A row of the weight has length 1, so x = s * weight[target] + noise has a logit of about s at the target,
    where the others together amount to a logit of log(V) + (1 + s^2/H) / 2. Flat logits have a standard
    deviation far below 1. Nothing here looks at a value: predictions trace it.
    """
    n, h, v = shape
    target = torch.randint(0, v, (n,), device=device)
    if data == "flat":
        weight = torch.randn(v, h, device=device, dtype=dtype).mul_(0.1 / math.sqrt(h))
        x = torch.randn(n, h, device=device, dtype=dtype)
    else:
        weight = torch.randn(v, h, device=device, dtype=dtype).mul_(1 / math.sqrt(h))
        rest = math.log(v) + 0.5
        scale = rest + rest * rest / (2 * h) + 1
        x = weight[target].mul_(scale).add_(torch.randn(n, h, device=device, dtype=dtype))
    return {"x": x.requires_grad_(), "weight": weight.requires_grad_(), "target": target}


def floor_bytes(shape: Shape, dtype: torch.dtype) -> int:
    """The two gradients."""
    n, h, v = shape
    return (n + v) * h * dtype.itemsize


def three_products(i: Inputs) -> None:
    """The logits, dX and dW as cuBLAS makes them, and nothing else: no exact version does less."""
    x, weight = i["x"].detach(), i["weight"].detach()
    dx, dw = torch.empty_like(x), torch.empty_like(weight)
    for start in range(0, x.shape[0], ROWS_AT_A_TIME):
        rows = x[start : start + ROWS_AT_A_TIME]
        logits = rows @ weight.T
        torch.mm(logits, weight, out=dx[start : start + ROWS_AT_A_TIME])
        if start == 0:
            torch.mm(logits.T, rows, out=dw)
        else:
            torch.addmm(dw, logits.T, rows, out=dw)
        del logits  # before the next ones are made


def eager(i: Inputs) -> Tensor:
    return F.cross_entropy(F.linear(i["x"], i["weight"]), i["target"])


def ours(i: Inputs, **options: object) -> Tensor:
    return ops().linear_cross_entropy(i["x"], i["weight"], i["target"], **options)


EAGER = Contender("eager", eager)
OURS = (
    Contender("oomph", ours),
    Contender("oomph 64MiB", partial(ours, memory_budget="64MiB")),
)
CHUNKED = Contender("oomph chunked", partial(ours, impl="chunked"))


def cases(peers: Sequence[Peer], tiny: bool) -> list[Case]:
    quick = [contender for peer in peers for contender in peer.losses]
    table, held_out, long = (TABLE, HELD_OUT, LONG) if not tiny else ((TINY,), (), TINY)
    found = [_case(shape, [EAGER, *OURS, *quick]) for shape in table]
    found += [_case(shape, [EAGER, *OURS, *quick]) for shape in held_out]
    # Here eager does not fit (its row is a prediction), and the peers together would take long.
    return [*found, replace(_case(long, OURS[:1]), predicted_only=(EAGER,))] if not tiny else found


def _case(shape: Shape, contenders: Sequence[Contender], dtype: torch.dtype = torch.bfloat16) -> Case:
    return Case(
        op="cross_entropy",
        shape=named(shape),
        make=partial(inputs, shape, "peaked", dtype),
        contenders=(Contender(LIMIT, three_products), *contenders),
        floor=floor_bytes(shape, dtype),
        limit=LIMIT,
        data="peaked",
    )


def cpu_case(shape: Shape) -> Case:
    """Against eager, in float32, at a size where eager fits."""
    return Case(
        op="cross_entropy",
        shape=named(shape),
        make=partial(inputs, shape, "peaked", torch.float32),
        contenders=(EAGER, CHUNKED),
        floor=floor_bytes(shape, torch.float32),
        limit="eager",
        data="peaked",
    )


def reference_gradients(i: Inputs) -> tuple[Tensor, Tensor]:
    """dX and dW of the mean loss in float64, some rows at a time. Prints the targets' mean probability."""
    x, weight, target = i["x"].detach(), i["weight"].detach().double(), i["target"]
    dx = torch.empty(x.shape, dtype=torch.float64, device=x.device)
    dw = torch.zeros(weight.shape, dtype=torch.float64, device=x.device)
    certainty = 0.0
    for start in range(0, x.shape[0], 1024):
        part = slice(start, start + 1024)
        rows = x[part].double()
        gradient = (rows @ weight.T).softmax(-1)
        hit = (torch.arange(rows.shape[0], device=x.device), target[part])
        certainty += float(gradient[hit].sum())
        gradient[hit] -= 1
        gradient /= x.shape[0]
        dx[part] = gradient @ weight
        dw.addmm_(gradient.T, rows)
        del gradient
    print(f"mean probability of the target {certainty / x.shape[0]:.3g}", flush=True)
    return dx, dw


def error_rows(machine: Machine, peers: Sequence[Peer], tiny: bool) -> Iterator[list[Row]]:
    """How far each contender's gradients in bfloat16 are from a float64 computation of the same inputs."""
    contenders = [EAGER, *OURS, *(contender for peer in peers for contender in peer.losses)]
    for shape in (TINY,) if tiny else ERRORS:
        for data in ("peaked", "flat"):
            case = replace(
                _case(shape, ()),
                op="cross_entropy errors",
                data=data,
                make=partial(inputs, shape, data, torch.bfloat16),
                contenders=contenders,
            )
            yield runs.error_rows(case, machine, partial(_compared, data))


def _compared(data: str, made: Inputs) -> Callable[[], runs.Errors]:
    right = dict(zip(("x", "weight"), reference_gradients(made), strict=True))
    columns = {"x": "dx_error", "weight": "dw_error"}

    def errors() -> runs.Errors:
        yield data, {columns[name]: relative_error(made[name].grad, right[name]) for name in columns}

    return errors
