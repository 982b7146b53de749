"""Random calls of every public op: is each value and gradient right, and is each error one clear line?

    python -m benchmarks.ops.fuzz --calls 3000 [--seed 0] [--device cpu] [--only OP] [--out FILE]

A valid call has random sizes (also 0), dtypes, options, layouts (transposed, sliced, expanded) and inputs
that require a gradient. Its results and gradients are compared with the op's reference on float64 copies.
Some calls run on meta tensors instead, where shapes and dtypes are compared, or inside torch.func.grad, vmap
or jvp. An invalid call has one argument replaced: it must give the reference's result, or a ValueError or
TypeError of one line. Call N of seed S is always the same call; a failure prints N.
"""

from __future__ import annotations

import argparse
import functools
import math
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import RESULTS
from benchmarks.rows import write
from oomph import ops
from oomph.errors import ArgumentError
from oomph.ops.common import interpreted
from oomph.ops.short_convolution import short_convolution
from oomph.ops.softmax_attention import BlockPattern

OUT = RESULTS / "ops_fuzz.csv"
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Of the largest number of a tensor. Half precision is also that of the intermediate results.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}


# Inputs ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Input:
    """A leaf and the view of it that the op gets."""

    values: Tensor  # float64, or integers
    dtype: torch.dtype
    view: Callable[[Tensor], Tensor]
    requires_grad: bool = False


@dataclass(frozen=True)
class Made:
    """An argument that is made of others, such as MLPWeights."""

    make: Callable[..., Any]
    parts: dict[str, Any]


class Draw:
    """Random sizes, options and tensors."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(self.random.getrandbits(40))
        self.dtype = self.pick(*FLOATS[:2], *FLOATS)

    def pick(self, *choices: Any) -> Any:
        return self.random.choice(choices)

    def impl(self, *plain: str, slow: bool = False) -> str:
        """One of these, or the kernels: on a GPU, or in Triton's interpreter if they are not slow there."""
        kernels = torch.cuda.is_available() or (interpreted() and not slow)
        return str(self.pick(*plain, *(["triton"] if kernels else [])))

    def size(self, most: int, empty: float = 0.04) -> int:
        return 0 if self.random.random() < empty else self.random.randint(1, most)

    def upto(self, most: int) -> int:
        return self.random.randint(1, most)

    def maybe(self, make: Callable[[], Any], chance: float = 0.3) -> Any:
        return make() if self.random.random() < chance else None

    def tensor(
        self, *shape: int, change: Callable[[Tensor], Tensor] | None = None, dtype: torch.dtype | None = None,
        grad: bool | None = None,
    ) -> Input:  # fmt: skip
        dtype = dtype or self.dtype
        stored, view = self._layout(shape)
        values = torch.randn(stored, generator=self.generator, dtype=torch.float64)
        values = (values if change is None else change(values)).to(dtype).double()
        requires_grad = self.pick(True, True, False) if grad is None else grad
        return Input(values, dtype, view, requires_grad)

    def integers(self, low: int, high: int, *shape: int) -> Input:
        values = torch.randint(low, max(low + 1, high), shape, generator=self.generator)
        return Input(values.to(self.pick(torch.int64, torch.int32)), torch.int64, lambda x: x)

    def _layout(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], Callable[[Tensor], Tensor]]:
        """The stored shape, and the view of it that has the shape asked for."""
        kind = self.pick("contiguous", "contiguous", "transposed", "sliced", "expanded", "stepped")
        if not shape or kind == "contiguous":
            return shape, lambda x: x
        if kind == "transposed" and len(shape) > 1:
            a, b = self.random.sample(range(len(shape)), 2)
            swapped = list(shape)
            swapped[a], swapped[b] = shape[b], shape[a]
            return tuple(swapped), lambda x: x.transpose(a, b)
        dim = self.random.randrange(len(shape))
        size = shape[dim]
        if kind == "expanded":
            return (*shape[:dim], 1, *shape[dim + 1 :]), lambda x: x.expand(shape)
        if kind == "stepped":
            return (*shape[:dim], 2 * size, *shape[dim + 1 :]), lambda x: x[
                (slice(None),) * dim + (slice(None, None, 2),)
            ]
        return (*shape[:dim], size + 3, *shape[dim + 1 :]), lambda x: x.narrow(dim, 2, size)


# Calls -----------------------------------------------------------------------------------------------

Arguments = dict[str, Any]


def _linear_cross_entropy(draw: Draw) -> Arguments:
    lead = tuple(draw.size(9) for _ in range(draw.pick(1, 1, 2)))
    hidden, classes = draw.size(8), draw.upto(300)
    options: Arguments = {
        "reduction": draw.pick("mean", "sum", "none"),
        "label_smoothing": draw.pick(0.0, 0.0, 0.1, 1.0),
        "ignore_index": draw.pick(-100, -100, 0),
        "z_loss": draw.pick(0.0, 0.0, 1e-2),
        "softcap": draw.pick(None, None, 5.0),
        "shift": draw.pick(False, True),
        "return_lse": draw.pick(False, False, True),
        "memory_budget": draw.pick(None, 1, "64KiB"),
        "impl": draw.impl("auto", "plain", "chunked", slow=True),
        "class_weight": draw.maybe(lambda: draw.tensor(classes, change=torch.abs, grad=False)),
        "token_weight": draw.maybe(lambda: draw.tensor(*lead, change=torch.relu, grad=False)),
        "bias": draw.maybe(lambda: draw.tensor(classes)),
    }
    target = draw.integers(0, classes, *lead)
    ignored = torch.rand(lead, generator=draw.generator) < 0.2
    target.values[ignored] = options["ignore_index"]
    return {
        "x": draw.tensor(*lead, hidden),
        "weight": draw.tensor(classes, hidden),
        "target": target,
        **options,
    }


def _compute_loss_chunked(draw: Draw) -> Arguments:
    batch, tokens, hidden, classes = draw.size(3), draw.size(9), draw.size(8), draw.upto(60)
    head = Made(
        _Head, {"weight": draw.tensor(classes, hidden), "bias": draw.maybe(lambda: draw.tensor(classes))}
    )
    labels = draw.integers(0, classes, batch, tokens)
    return {"hidden_states": draw.tensor(batch, tokens, hidden), "labels": labels, "lm_head": head,
            "chunk_size": draw.pick(1, 4, 4096)}  # fmt: skip


class _Head(torch.nn.Module):
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias


def _loss_reference(hidden_states: Tensor, labels: Tensor, lm_head: Any, chunk_size: int) -> Any:
    return ops.linear_cross_entropy(
        hidden_states, lm_head.weight, labels, bias=lm_head.bias, shift=True, impl="reference"
    )


def _kda(draw: Draw) -> Arguments:
    packed = draw.random.random() < 0.2
    batch = 1 if packed else draw.size(3)
    tokens, heads, dk, dv = draw.size(70), draw.upto(3), draw.upto(9), draw.upto(9)
    state_dtype = torch.float64 if draw.dtype == torch.float64 else torch.float32
    cuts = sorted(draw.random.randint(0, tokens) for _ in range(draw.random.randint(0, 3)))
    sequences = len(cuts) + 1 if packed else batch
    mode = draw.pick("auto", "chunked", "chunked", "sequential", "scan")
    sized = mode in ("auto", "chunked")
    state = draw.maybe(lambda: draw.tensor(sequences, heads, dk, dv, dtype=state_dtype))
    return {
        "q": draw.tensor(batch, tokens, heads, dk),
        "k": draw.tensor(batch, tokens, heads, dk, change=lambda x: x / max(1, dk)),
        "v": draw.tensor(batch, tokens, heads, dv),
        "log_alpha": draw.tensor(batch, tokens, heads, dk, change=lambda x: -x.abs()),
        "beta": draw.tensor(batch, tokens, heads, change=torch.sigmoid),
        "initial_state": state,
        "scale": draw.pick(None, 0.5),
        "mode": mode,
        "memory_chunk_size": draw.maybe(lambda: draw.upto(70)) if sized or mode == "scan" else None,
        "cu_seqlens": [0, *cuts, tokens] if packed else None,
        "impl": draw.impl("auto", slow=True) if sized else "auto",
    }


def _kda_reference(**arguments: Any) -> Any:
    return ops.kda(**arguments | {"mode": "auto", "impl": "reference", "memory_chunk_size": None})


def _precompute_updates(draw: Draw) -> Arguments:
    arguments = _kda(draw)
    names = ("k", "v", "log_alpha", "beta")
    return {name: arguments[name] for name in names} | {"memory_chunk_size": draw.pick(None, 1, 5, 64)}


def _updates_reference(k: Tensor, v: Tensor, log_alpha: Tensor, beta: Tensor, **_: Any) -> Any:
    alpha, write = log_alpha.exp(), beta[..., None] * k
    transitions = torch.eye(k.shape[-1], dtype=k.dtype) - torch.einsum("bthi,bthj->bthij", write, k)
    return transitions * alpha[..., None, :], torch.einsum("bthi,bthj->bthij", write, v)


def _attention(draw: Draw) -> Arguments:
    batch, groups, group = draw.size(3), draw.upto(2), draw.upto(3)
    queries, keys, size = draw.size(40), draw.size(40), draw.upto(9)
    heads, values = groups * group, draw.pick(size, size, draw.upto(9))
    arguments: Arguments = {
        "q": draw.tensor(batch, heads, queries, size),
        "k": draw.tensor(batch, groups, keys, size),
        "v": draw.tensor(batch, groups, keys, values),
        "causal": draw.pick(False, True),
        "scale": draw.pick(None, 0.3),
        "memory_budget": draw.pick(None, 1, "16KiB"),
        "impl": draw.impl("auto", "auto", "chunked", slow=True),
    }
    kind = draw.pick("none", "none", "bias", "points", "function", "pattern", "mask")
    if kind == "bias":
        full = (batch, heads, queries, keys)
        arguments["bias"] = draw.tensor(*(draw.pick(size, size, 1) for size in full))
    elif kind == "points":
        lead = draw.pick((), (batch,))
        wide = torch.float64 if draw.dtype == torch.float64 else torch.float32
        points = {
            "t": draw.tensor(*lead, queries, 2, dtype=wide),
            "s": draw.tensor(*lead, keys, 2, dtype=wide),
        }
        arguments["bias"] = Made(ops.locality_bias, points)
    elif kind == "function":
        arguments["bias"] = lambda b, h, q_index, k_index: (h + 1) * -0.1 * (q_index - k_index).abs()
    elif kind == "pattern":
        arguments["pattern"] = draw.pick(
            BlockPattern("local", block=4),
            BlockPattern("global", block=8),
            BlockPattern("mixed", block=5, stride=3),
        )
    elif kind == "mask":
        mask = torch.rand(batch, keys, generator=draw.generator) < 0.7
        arguments["key_mask"] = Input(mask, torch.bool, lambda x: x)
    return arguments


def _nsa(draw: Draw) -> Arguments:
    draw.dtype = draw.pick(torch.float64, torch.float32)  # half precision would select other blocks
    batch, heads, group, size = (
        draw.size(2),
        draw.upto(2),
        draw.upto(2),
        draw.upto(6),
    )
    tokens, stride = draw.size(40), draw.pick(1, 2, 4)
    gates = ("gate_cmp", "gate_slc", "gate_win")
    return {
        "q": draw.tensor(batch, tokens, heads * group, size),
        "k": draw.tensor(batch, tokens, heads, size),
        "v": draw.tensor(batch, tokens, heads, size),
        **{name: draw.tensor(batch, tokens, heads * group, change=torch.sigmoid) for name in gates},
        "compress": draw.pick("mean", lambda blocks: blocks[:, :, -1] * 0.5),
        "block_size": stride * draw.upto(3),
        "compress_block": stride * draw.upto(2),
        "compress_stride": stride,
        "top_n": draw.random.randint(3, 5),
        "window": draw.upto(50),
        "scale": draw.pick(None, 0.4),
        "impl": draw.impl("auto", "chunked", slow=True),
    }  # fmt: skip


def _selective_scan(draw: Draw) -> Arguments:
    batch, length, d, n = draw.size(3), draw.size(40), draw.size(5), draw.upto(5)
    direction = draw.pick("forward", "backward", "both")
    pair = (2,) if direction == "both" else ()
    x = draw.tensor(*draw.pick((), pair), batch, length, d)
    return {
        "x": x,
        "delta": draw.tensor(*pair, batch, length, d, change=lambda x: x.abs() / 4),
        "A": draw.tensor(*pair, d, n, change=lambda x: -x.abs()),
        "B": draw.tensor(*pair, batch, length, n),
        "C": draw.tensor(*pair, batch, length, n),
        "D": draw.maybe(lambda: draw.tensor(*pair, d)),
        "z": draw.maybe(lambda: draw.tensor(batch, length, d)),
        "delta_bias": draw.maybe(lambda: draw.tensor(*pair, d, change=torch.abs)),
        "delta_softplus": draw.pick(False, True),
        "direction": direction,
        "chunk_size": draw.pick(None, 1, 7),
        "impl": draw.impl("auto", "chunked", slow=True),
    }


def _lif_gate(draw: Draw) -> Arguments:
    batch, tokens, channels = draw.size(3), draw.size(20), draw.pick((), (draw.size(5),), (2, draw.size(3)))
    # A number that every dtype holds, because spikes are steps: the reference must meet the same drive.
    drive = draw.tensor(batch, tokens, *channels, change=lambda x: (x * 16).round() / 16)
    return {
        "drive": drive,
        "decay": draw.pick(0.5, 0.75),
        "threshold": draw.pick(1.0, 0.75),
        "surrogate_beta": draw.pick(1.0, 4.0),
        "initial": draw.maybe(lambda: draw.tensor(batch, *channels, change=lambda x: x.round() / 2)),
        "impl": draw.impl("auto", "chunked"),
    }


def _rotary(draw: Draw) -> Arguments:
    lead, heads, tokens = draw.pick((), (draw.size(3),)), draw.upto(3), draw.size(9)
    size = 2 * draw.upto(4)
    heads_first, two = draw.pick(True, False), draw.pick(True, False)

    def shape(heads: int) -> tuple[int, ...]:
        return (*lead, heads, tokens, size) if heads_first else (*lead, tokens, heads, size)

    positions = draw.maybe(lambda: draw.integers(0, 100_000, *draw.pick((), lead), tokens))
    return {
        "q": draw.tensor(*shape(heads)),
        "k": draw.tensor(*shape(draw.upto(3))) if two else None,
        "positions": positions,
        "theta": draw.pick(10000.0, 500.0),
        "heads_first": heads_first,
        "turned_heads": None if two else draw.pick(None, 1),
        "impl": draw.impl("auto", "chunked"),
    }


def _rotary_table(draw: Draw) -> Arguments:
    shape = tuple(draw.size(9) for _ in range(draw.random.randint(0, 2)))
    return {"positions": draw.integers(0, 1_000_000, *shape), "dim": 2 * draw.upto(5),
            "theta": draw.pick(10000.0, 500.0)}  # fmt: skip


def _table_reference(positions: Tensor, dim: int, theta: float) -> Any:
    frequencies = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / dim)
    angles = positions.double()[..., None] * frequencies
    return angles.cos(), angles.sin()


def _modulated_linear(draw: Draw) -> Arguments:
    lead = tuple(draw.size(6) for _ in range(draw.random.randint(0, 2)))
    d, f, r = draw.size(7), draw.size(7), draw.upto(4)
    weight = draw.tensor(d, f)
    return {
        "h": draw.tensor(*lead, d),
        "weight": Made(_quantized, {"weight": replace(weight, requires_grad=False)})
        if draw.pick(0, 0, 1)
        else weight,
        "A": draw.tensor(d, r),
        "B": draw.tensor(r, f),
        "mod": draw.tensor(*(draw.pick(size, size, 1) for size in lead[draw.pick(0, 0, 1) :]), r),
        "bias": draw.maybe(lambda: draw.tensor(f)),
        "impl": draw.pick("auto", "chunked"),
    }


def _quantized(weight: Tensor) -> Any:
    # From float32, so that the float64 reference has the same weight.
    return ops.quantize_int8(weight.float())


def _compute_weight_delta(draw: Draw) -> Arguments:
    d, f, r, lead = draw.size(5), draw.size(5), draw.upto(4), (draw.size(3, 0), draw.size(6, 0))
    index = draw.pick(0, -1, (0, 0), (0, -1))
    return {"A": draw.tensor(d, r), "B": draw.tensor(r, f), "mod": draw.tensor(*lead, r), "token_idx": index}


def _delta_reference(A: Tensor, B: Tensor, mod: Tensor, token_idx: Any) -> Any:
    index = token_idx if isinstance(token_idx, tuple) else (..., token_idx, slice(None))
    return torch.einsum("dr,...r,rf->...df", A, mod[index], B)


def _weight_delta_norm(draw: Draw) -> Arguments:
    d, f, r, lead = draw.size(5), draw.size(5), draw.upto(4), (draw.size(3), draw.size(6))
    tensors = {"A": draw.tensor(d, r), "B": draw.tensor(r, f), "mod": draw.tensor(*lead, r)}
    return {**tensors, "squared": draw.pick(False, True)}


def _norm_reference(A: Tensor, B: Tensor, mod: Tensor, squared: bool) -> Any:
    square = torch.einsum("dr,...r,rf->...df", A, mod, B).square().sum((-1, -2))
    return square if squared else torch.where(square > 0, square, 1.0).sqrt() * (square > 0)


def _quantize_int8(draw: Draw) -> Arguments:
    return {"weight": draw.tensor(draw.size(9), draw.size(9), grad=False)}


def _tiled_mlp(draw: Draw) -> Arguments:
    lead = tuple(draw.size(9) for _ in range(draw.random.randint(0, 2)))
    d, hidden, out = draw.size(6), draw.size(8), draw.size(6)
    parts: Arguments = {"up": draw.tensor(hidden, d), "down": draw.tensor(out, hidden)}
    arguments: Arguments = {
        "x": draw.tensor(*lead, d),
        **draw.pick({}, {"tile": 1}, {"tile": 5}, {"memory_budget": "1MiB"}),
    }
    if draw.pick(0, 0, 1):
        return {
            "fn_or_module": Made(_user_function, parts),
            **arguments,
            "impl": draw.pick("auto", "generic"),
        }
    for name, shape in (("gate", (hidden, d)), ("up_bias", (hidden,)), ("down_bias", (out,))):
        parts[name] = draw.maybe(functools.partial(draw.tensor, *shape), 0.5)
    # relu's slope is a step, which half precision takes elsewhere.
    parts["activation"] = draw.pick("silu", "gelu", "gelu_tanh", *["relu"] * (draw.dtype.itemsize > 2))
    return {
        "fn_or_module": Made(ops.MLPWeights, parts),
        **arguments,
        "impl": draw.impl("auto", "chunked", "generic"),
    }


def _user_function(up: Tensor, down: Tensor) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        if x.shape[-1] != up.shape[1] or not x.dtype == up.dtype == down.dtype:
            raise ValueError("an error of the user's own function")
        return F.linear(torch.tanh(F.linear(x, up)), down)

    return function


def _short_convolution(draw: Draw) -> Arguments:
    batch, tokens, taps, size = draw.size(3), draw.size(20), draw.upto(4), draw.pick(2, 3)
    channels = draw.size(3) * size
    return {
        "x": draw.tensor(batch, tokens + taps - 1, channels),
        "weight": draw.tensor(channels, 1, taps),
        "unit_size": draw.pick(None, size),
        "impl": draw.impl("auto", "chunked"),
    }


@dataclass(frozen=True)
class Op:
    run: Callable[..., Any]
    draw: Callable[[Draw], Arguments]
    reference: Callable[..., Any] | None = None  # default: run with impl="reference"
    same_dtype: bool = False  # the reference gets the inputs' own dtype
    tolerance: float | None = None


OPS: dict[str, Op] = {
    "attention": Op(ops.attention, _attention),
    "compute_loss_chunked": Op(ops.compute_loss_chunked, _compute_loss_chunked, _loss_reference),
    "compute_weight_delta": Op(ops.compute_weight_delta, _compute_weight_delta, _delta_reference),
    "kda": Op(ops.kda, _kda, _kda_reference),
    "lif_gate": Op(ops.lif_gate, _lif_gate, same_dtype=True),  # in float64, other steps would fire
    "linear_cross_entropy": Op(ops.linear_cross_entropy, _linear_cross_entropy),
    "modulated_linear": Op(ops.modulated_linear, _modulated_linear),
    "nsa": Op(ops.nsa, _nsa),
    "precompute_updates": Op(ops.precompute_updates, _precompute_updates, _updates_reference),
    "quantize_int8": Op(
        lambda weight: ops.quantize_int8(weight).dequantize(),
        _quantize_int8,
        lambda weight: weight,
        tolerance=1 / 254,
    ),
    "rotary": Op(ops.rotary, _rotary),
    "rotary_table": Op(
        lambda **a: tuple(vars(ops.rotary_table(**a)).values()), _rotary_table, _table_reference
    ),
    "selective_scan": Op(ops.selective_scan, _selective_scan),
    "short_convolution": Op(short_convolution, _short_convolution),
    "tiled_mlp": Op(ops.tiled_mlp, _tiled_mlp),
    "weight_delta_norm": Op(ops.weight_delta_norm, _weight_delta_norm, _norm_reference),
}


# Checks ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    outputs: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]
    dtype: torch.dtype  # the narrowest of the inputs


class Wrong(Exception):
    """What a call got wrong: a value, a gradient, a graph or an error."""


def build(value: Any, leaves: list[Tensor], *, wide: bool = False, device: str = "cpu") -> Any:
    if isinstance(value, Made):
        parts = {name: build(part, leaves, wide=wide, device=device) for name, part in value.parts.items()}
        return value.make(**parts)
    if not isinstance(value, Input):
        return value
    dtype = value.values.dtype
    if value.values.is_floating_point():
        dtype = torch.float64 if wide else value.dtype
    leaf = value.values.to(device, dtype, copy=True).requires_grad_(value.requires_grad)
    if value.requires_grad:
        leaves.append(leaf)
    return value.view(leaf)


def inputs_of(value: Any) -> Iterator[Input]:
    if isinstance(value, Input):
        yield value
    for part in value.parts.values() if isinstance(value, Made) else ():
        yield from inputs_of(part)


def run(function: Callable[..., Any], arguments: Arguments, *, wide: bool, device: str = "cpu") -> Result:
    """The results, and the gradients of every leaf for weights that depend on the results' shapes alone."""
    leaves: list[Tensor] = []
    built = {name: build(value, leaves, wide=wide, device=device) for name, value in arguments.items()}
    result = function(**built)
    outputs = result if isinstance(result, tuple) else (result,)
    gradients = tuple(torch.zeros_like(leaf) for leaf in leaves)
    differentiable = [output for output in outputs if output.requires_grad]
    if differentiable:
        weights = [_weights(output) for output in differentiable]
        gradients = torch.autograd.grad(
            differentiable, leaves, weights, allow_unused=True, materialize_grads=True
        )
    floats = [
        each.dtype
        for value in arguments.values()
        for each in inputs_of(value)
        if each.dtype.is_floating_point
    ]
    narrowest = max(floats, key=lambda dtype: TOLERANCE[dtype], default=torch.float32)
    return Result(outputs, gradients, narrowest)


def _weights(output: Tensor) -> Tensor:
    if output.numel() % 3 == 0:  # the gradient of a sum: one number, expanded
        return torch.ones((), dtype=output.dtype, device=output.device).expand(output.shape)
    return torch.linspace(-1, 2, output.numel(), device=output.device).to(output.dtype).view(output.shape)


def compare(ours: Result, expected: Result, tolerance: float) -> None:
    for one, other in zip(ours.outputs, expected.outputs, strict=True):
        if other.requires_grad and not one.requires_grad:
            raise Wrong("a result has no graph, that of the reference has one")
    # Gradients that cancel to nothing are compared with a third of the call's largest number.
    largest = max(1e-3, *(_largest(each) for each in (*expected.outputs, *expected.gradients)))
    for kind in ("outputs", "gradients"):
        for index, (one, other) in enumerate(zip(getattr(ours, kind), getattr(expected, kind), strict=True)):
            name = f"{kind[:-1]} {index}"
            if one.shape != other.shape:
                raise Wrong(f"{name} has shape {list(one.shape)}, not {list(other.shape)}")
            error = _error(one, other) / max(_largest(other), 0.3 * largest)
            if not error <= tolerance:
                raise Wrong(f"{name} differs by {error:.2g} of its largest number")


def _error(one: Tensor, other: Tensor) -> float:
    one, other = one.detach().double().cpu(), other.detach().double().cpu()
    if one.numel() == 0 or bool((one.isnan() == other.isnan()).all() and other.isnan().all()):
        return 0.0
    return float((one - other).abs().max())


def _largest(x: Tensor) -> float:
    return float(x.detach().double().abs().max()) if x.numel() else 0.0


def reference(op: Op, arguments: Arguments, *, device: str = "cpu") -> Result:
    function = op.reference or functools.partial(op.run, impl="reference")
    kept = {name: value for name, value in arguments.items() if op.reference or name != "impl"}
    return run(function, kept, wide=not op.same_dtype, device=device)


def is_clear(error: Exception) -> bool:
    return isinstance(error, ValueError | TypeError) and "\n" not in str(error) and bool(str(error))


def check_valid(op: Op, arguments: Arguments, device: str) -> None:
    try:
        ours = run(op.run, arguments, wide=False, device=device)
    except ArgumentError as error:
        if arguments.get("impl") != "triton" or "impl='triton' cannot run" not in str(error):
            raise
        ours = run(op.run, arguments | {"impl": "auto"}, wide=False, device=device)
    compare(ours, reference(op, arguments, device=device), op.tolerance or TOLERANCE[ours.dtype])


def _without_kernels(arguments: Arguments) -> Arguments:
    return arguments | ({"impl": "auto"} if arguments.get("impl") == "triton" else {})


def check_meta(op: Op, arguments: Arguments) -> None:
    arguments = _without_kernels(arguments)
    expected, ours = run(op.run, arguments, wide=False), run(op.run, arguments, wide=False, device="meta")
    for kind in ("outputs", "gradients"):
        for one, other in zip(getattr(ours, kind), getattr(expected, kind), strict=True):
            if (one.shape, one.dtype, one.device.type) != (other.shape, other.dtype, "meta"):
                expected_one = f"{other.dtype} {list(other.shape)}"
                raise Wrong(f"on meta a result is {one.dtype} {list(one.shape)}, not {expected_one}")


TRANSFORMS = ("grad", "vmap", "jvp", "forward_ad")


def check_transform(op: Op, arguments: Arguments, name: str, transform: str) -> None:
    """Inside a transform of torch.func: what autograd gives, or a clear error that names the op."""
    leaves: list[Tensor] = []
    built = {each: build(value, leaves) for each, value in _without_kernels(arguments).items()}
    x = built[name].detach().clone()

    def total(x: Tensor) -> Tensor:
        result = op.run(**built | {name: x})
        return sum(
            (each.double().sum() for each in (result if isinstance(result, tuple) else (result,))),
            torch.zeros(()),
        )

    leaf = x.clone().requires_grad_()
    gradient = torch.autograd.grad(total(leaf), leaf, allow_unused=True, materialize_grads=True)[0].double()
    try:
        if transform == "grad":
            ours, expected = torch.func.grad(total)(x), gradient
        elif transform == "vmap":
            ours, expected = torch.func.vmap(total)(x[None]), total(x)[None]
        elif transform == "jvp":
            ours, expected = torch.func.jvp(total, (x,), (torch.ones_like(x),))[1], gradient.sum()
        else:
            with torch.autograd.forward_ad.dual_level():
                dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
                ours = torch.autograd.forward_ad.unpack_dual(total(dual)).tangent
            expected, ours = gradient.sum(), torch.zeros(()) if ours is None else ours
    except Exception as error:
        if is_clear(error):
            return
        raise
    tolerance = TOLERANCE[x.dtype] * max(1.0, float(gradient.abs().sum()))
    if not float((ours.double() - expected).detach().abs().max() if expected.numel() else 0.0) <= tolerance:
        raise Wrong(f"torch.func.{transform} with respect to {name} gives another result than autograd")


NOT_A_TENSOR = (None, 3, 1.5, "x", [1.0, 2.0], object())
NOT_AN_OPTION = (-1, 0, 1, 2.5, True, "x", None, math.nan, 10**20, [], (1, 2), torch.ones(2), object())


def break_one(draw: Draw, arguments: Arguments) -> str:
    """Replace one argument, and say how."""
    name = draw.random.choice(list(arguments))
    value = arguments[name]
    if not isinstance(value, Input):
        arguments[name] = draw.pick(*NOT_AN_OPTION)
        return f"{name}={arguments[name]!r}"
    view, kind = value.view, draw.pick("rank", "unsqueezed", "longer", "shorter", "dtype", "object")
    if kind == "object":
        arguments[name] = draw.pick(*NOT_A_TENSOR)
        return f"{name}={arguments[name]!r}"
    if kind == "dtype":
        dtype = draw.pick(torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, *FLOATS)
        arguments[name] = replace(value, view=lambda x: view(x).to(dtype))
        if dtype in FLOATS and value.dtype in FLOATS:
            arguments[name] = replace(value, dtype=dtype)
        return f"{name} as {dtype}"
    shape = view(value.values).shape
    dim = draw.random.randrange(len(shape)) if shape else 0
    changes: dict[str, Callable[[Tensor], Tensor]] = {
        "rank": lambda x: x.flatten(0, 1) if x.dim() > 1 else x.sum(),
        "unsqueezed": lambda x: x.unsqueeze(dim),
        "longer": lambda x: torch.cat((x, x.narrow(dim, 0, 1)), dim) if x.dim() and x.shape[dim] else x,
        "shorter": lambda x: x.narrow(dim, 0, max(0, x.shape[dim] - 1)) if x.dim() else x,
    }
    arguments[name] = replace(value, view=lambda x: changes[kind](view(x)))
    return f"{name} {kind}"


def check_invalid(op: Op, arguments: Arguments) -> None:
    try:
        ours = run(op.run, arguments, wide=False)
    except Exception as error:
        if is_clear(error):
            return
        raise
    if not all(bool(each.isfinite().all()) for each in (*ours.outputs, *ours.gradients)):
        return  # options such as 10**20 overflow
    try:
        expected = reference(op, arguments)
    except Exception:
        return  # the reference does not take it: nothing to compare with
    compare(ours, expected, max(op.tolerance or 0.0, TOLERANCE[ours.dtype]))


# The run ---------------------------------------------------------------------------------------------


@dataclass
class Row:
    """Calls of one op. wrong: values, gradients and graphs. unclear: an error that is not one clear line."""

    op: str
    device: str
    seed: int
    valid: int = 0
    invalid: int = 0
    meta: int = 0
    transforms: int = 0
    wrong: int = 0
    unclear: int = 0
    seconds: float = 0.0


def fuzz(calls: int, seed: int, device: str = "cpu", only: str | None = None) -> tuple[list[Row], list[str]]:
    rows = {name: Row(name, device, seed) for name in OPS if only in (None, name)}
    failures = []
    names = list(rows)
    for number in range(calls):
        name = names[number % len(names)]
        began = time.perf_counter()
        failure = _call(name, rows[name], f"{seed}/{name}/{number}")
        rows[name].seconds += time.perf_counter() - began
        if failure:
            failures.append(f"{name} {number}: {failure}")
    return list(rows.values()), failures


def _call(name: str, row: Row, seed: str) -> str | None:
    op, draw = OPS[name], Draw(seed)
    arguments = op.draw(draw)
    kind = draw.pick(*["valid"] * 6, *["invalid"] * 3, "meta", "transform")
    has_gradient = [
        key for key, value in arguments.items() if isinstance(value, Input) and value.requires_grad
    ]
    what = kind
    try:
        if kind == "invalid":
            row.invalid += 1
            what = break_one(draw, arguments)
            check_invalid(op, arguments)
        elif kind == "meta":
            row.meta += 1
            check_meta(op, arguments)
        elif kind == "transform" and has_gradient:
            row.transforms += 1
            what = f"{draw.pick(*TRANSFORMS)} of {draw.random.choice(has_gradient)}"
            transform, _, of = what.split()
            check_transform(op, arguments, of, transform)
        else:
            row.valid += 1
            check_valid(op, arguments, row.device)
    except Wrong as wrong:
        row.wrong += 1
        return f"{what}: {wrong}"
    except Exception as error:
        row.unclear += 1
        return f"{what}: {type(error).__name__}: {str(error)[:300]}"
    return None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calls", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", choices=OPS, help="one op")
    parser.add_argument("--out", type=Path, help=f"where the rows go, such as {OUT.name}")
    given = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", message="There is a performance drop")  # of vmap
    rows, failures = fuzz(given.calls, given.seed, given.device, given.only)
    print(*failures, sep="\n")
    for row in rows:
        print(f"{row.op:22} {row.valid:5} valid {row.invalid:5} invalid {row.meta:4} meta {row.transforms:4} "
              f"transforms: {row.wrong} wrong, {row.unclear} unclear ({row.seconds:.0f} s)")  # fmt: skip
    if given.out is not None:
        write(given.out, [replace(row, seconds=round(row.seconds)) for row in rows])
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
