"""One op at a time, forward and backward: what its CUDA kernels allocate beyond their results.

    python -m benchmarks.accuracy.kernels measure --out FILE    # on a GPU, all in one process, some seconds
    python -m benchmarks.accuracy.kernels compare FILE          # anywhere: measured and predicted
    python -m benchmarks.accuracy.kernels convolutions --out FILE       # on a GPU: cuDNN's workspaces
    python -m benchmarks.accuracy.kernels convolutions --search --out FILE          # what the search takes
    python -m benchmarks.accuracy.kernels convolutions --any --out FILE             # of any shape
    python -m benchmarks.accuracy.kernels convolutions --products --out FILE        # with kernels of 1 x 1
    python -m benchmarks.accuracy.kernels convolutions --depthwise --out FILE
    python -m benchmarks.accuracy.kernels convolutions --refused --out FILE         # without memory for them
    python -m benchmarks.accuracy.kernels compare-convolutions [FILE]   # anywhere

Whole models hide a kernel's temporaries behind larger tensors; here each is alone.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import RESULTS
from benchmarks.rows import stored

Step = Callable[[], Any]
f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16


def rand(*shape: int, dtype: torch.dtype = f32, grad: bool = True) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype).requires_grad_(grad)


def ids(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape, device="cuda")


def of(forward: Callable[..., Any], *inputs: Callable[[], Any]) -> Callable[[], Step]:
    """A target: makes the inputs, returns a step that runs `forward` on them and goes back."""

    def target() -> Step:
        made = [make() for make in inputs]

        def step() -> None:
            out = forward(*made)
            out = out[0] if isinstance(out, tuple) else out
            if out.requires_grad:
                out.backward(torch.ones_like(out))
            for tensor in made:
                if isinstance(tensor, torch.Tensor):
                    tensor.grad = None
                elif isinstance(tensor, nn.Module):
                    tensor.zero_grad()

        return step

    return target


def module(build: Callable[[], nn.Module], *inputs: Callable[[], Any]) -> Callable[[], Step]:
    return of(lambda m, *x: m(*x), lambda: build().to("cuda"), *inputs)


def x(*shape: int, dtype: torch.dtype = f32, grad: bool = True) -> Callable[[], torch.Tensor]:
    return lambda: rand(*shape, dtype=dtype, grad=grad)


def i(high: int, *shape: int) -> Callable[[], torch.Tensor]:
    return lambda: ids(high, *shape)


def clip(norm: float, foreach: bool | None) -> Callable[[], Step]:
    def target() -> Step:
        params = [rand(n, 1024) for n in (1, 7, 512, 4096, 9000)]
        for p in params:
            p.grad = torch.randn_like(p)
        return lambda: nn.utils.clip_grad_norm_(params, norm, foreach=foreach)

    return target


def optimizer(build: Callable[[Any], torch.optim.Optimizer], dtype: torch.dtype = f32) -> Callable[[], Step]:
    def target() -> Step:
        params = [rand(*s, dtype=dtype) for s in ((3,), (1024,), (512, 1024), (4096, 1024), (9000, 1000))]
        made = build(params)

        def step() -> None:
            for p in params:
                p.grad = torch.randn_like(p)
            made.step()

        return step

    return target


optim = torch.optim
KERNELS: dict[str, Callable[[], Step]] = {
    "linear": of(F.linear, x(8192, 1024), x(4096, 1024), x(4096)),
    "linear bf16 3d": of(
        F.linear, x(8, 1024, 1024, dtype=bf16), x(4096, 1024, dtype=bf16), x(4096, dtype=bf16)
    ),
    "linear odd": of(F.linear, x(8191, 1023), x(4095, 1023), x(4095)),
    "linear fp16 odd": of(F.linear, x(8191, 1023, dtype=f16), x(4095, 1023, dtype=f16), x(4095, dtype=f16)),
    "matmul 4d": of(torch.matmul, x(8, 8, 1024, 64), x(8, 8, 64, 1024)),
    "matmul broadcast": of(torch.matmul, x(64, 1024, 512), x(512, 512)),
    "einsum": of(lambda a, b: torch.einsum("bthd,bshd->bhts", a, b), x(8, 1024, 8, 64), x(8, 1024, 8, 64)),
    "bmm transposed": of(lambda a, b: a.transpose(1, 2) @ b, x(64, 512, 512), x(64, 512, 512)),
    "embedding": of(F.embedding, i(50000, 16, 1024), x(50000, 768)),
    "embedding bf16": of(F.embedding, i(128000, 2, 2048), x(128000, 1024, dtype=bf16)),
    "embedding few": of(F.embedding, i(1000, 2, 512), x(1000, 768)),
    "embedding padded": of(lambda n, w: F.embedding(n, w, padding_idx=0), i(50000, 16, 1024), x(50000, 768)),
    "embedding bag": module(lambda: nn.EmbeddingBag(50000, 512), i(50000, 1024, 32)),
    "layer_norm": module(lambda: nn.LayerNorm(1024), x(16384, 1024)),
    "layer_norm bf16": of(
        lambda a, w, b: F.layer_norm(a, (1024,), w, b),
        x(16384, 1024, dtype=bf16),
        x(1024, dtype=bf16),
        x(1024, dtype=bf16),
    ),
    "layer_norm long": module(lambda: nn.LayerNorm(256), x(262144, 256)),
    "layer_norm wide": module(lambda: nn.LayerNorm(8192), x(2048, 8192)),
    "layer_norm few": module(lambda: nn.LayerNorm(768), x(64, 768)),
    "layer_norm no affine": of(lambda a: F.layer_norm(a, (1024,)), x(16384, 1024)),
    "rms_norm": of(lambda a, w: F.rms_norm(a, (1024,), w), x(16384, 1024), x(1024)),
    "rms_norm bf16": of(
        lambda a, w: F.rms_norm(a, (1024,), w), x(16384, 1024, dtype=bf16), x(1024, dtype=bf16)
    ),
    "rms_norm no weight": of(lambda a: F.rms_norm(a, (1024,)), x(16384, 1024)),
    "group_norm": module(lambda: nn.GroupNorm(32, 256), x(16, 256, 64, 64)),
    "batch_norm 2d": module(lambda: nn.BatchNorm2d(256), x(32, 256, 64, 64)),
    "batch_norm 2d channels_last": module(
        lambda: nn.BatchNorm2d(256),
        lambda: (
            torch.randn(32, 256, 64, 64, device="cuda").to(memory_format=torch.channels_last).requires_grad_()
        ),
    ),
    "batch_norm 1d": module(lambda: nn.BatchNorm1d(4096), x(8192, 4096)),
    "instance_norm": module(lambda: nn.InstanceNorm2d(256, affine=True), x(16, 256, 64, 64)),
    "softmax": of(lambda a: a.softmax(-1), x(64, 512, 512)),
    "softmax bf16 to f32": of(lambda a: F.softmax(a, -1, dtype=f32), x(64, 512, 512, dtype=bf16)),
    "softmax fp16 to f32": of(lambda a: F.softmax(a, -1, dtype=f32), x(64, 512, 512, dtype=f16)),
    "log_softmax": of(lambda a: a.log_softmax(-1), x(4096, 8192)),
    "cross_entropy": of(F.cross_entropy, x(8192, 32000), i(32000, 8192)),
    "cross_entropy bf16": of(F.cross_entropy, x(8192, 32000, dtype=bf16), i(32000, 8192)),
    "cross_entropy smoothing": of(
        lambda a, t: F.cross_entropy(a, t, label_smoothing=0.1), x(4096, 32000), i(32000, 4096)
    ),
    "cross_entropy none": of(
        lambda a, t: F.cross_entropy(a, t, reduction="none"), x(4096, 32000), i(32000, 4096)
    ),
    "cross_entropy 2d": of(F.cross_entropy, x(8, 64, 256, 256), i(64, 8, 256, 256)),
    "cross_entropy weight": of(
        lambda a, t, w: F.cross_entropy(a, t, w), x(4096, 32000), i(32000, 4096), x(32000, grad=False)
    ),
    "bce logits": of(F.binary_cross_entropy_with_logits, x(4096, 8192), x(4096, 8192, grad=False)),
    "mse": of(F.mse_loss, x(4096, 8192), x(4096, 8192, grad=False)),
    "smooth_l1": of(F.smooth_l1_loss, x(4096, 8192), x(4096, 8192, grad=False)),
    "kl_div": of(
        lambda a, b: F.kl_div(a, b, reduction="batchmean"),
        x(4096, 8192),
        lambda: torch.rand(4096, 8192, device="cuda"),
    ),
    "cosine": of(F.cosine_similarity, x(8192, 1024), x(8192, 1024)),
    "gelu": of(F.gelu, x(4096, 8192)),
    "gelu tanh": of(lambda a: F.gelu(a, approximate="tanh"), x(4096, 8192)),
    "silu": of(F.silu, x(4096, 8192)),
    "relu inplace": of(lambda a: F.relu(a * 1, inplace=True), x(4096, 8192)),
    "leaky_relu": of(F.leaky_relu, x(4096, 8192)),
    "elu": of(F.elu, x(4096, 8192)),
    "mish": of(F.mish, x(4096, 8192)),
    "hardswish": of(F.hardswish, x(4096, 8192)),
    "softplus": of(F.softplus, x(4096, 8192)),
    "glu": of(F.glu, x(4096, 8192)),
    "prelu": module(lambda: nn.PReLU(256), x(16, 256, 64, 64)),
    "dropout": of(lambda a: F.dropout(a, 0.1), x(4096, 8192)),
    "dropout bf16": of(lambda a: F.dropout(a, 0.1), x(4096, 8192, dtype=bf16)),
    "dropout2d": of(lambda a: F.dropout2d(a, 0.1), x(16, 256, 64, 64)),
    "sum": of(lambda a: a.sum(), x(8192, 8192)),
    "sum dim 0": of(lambda a: a.sum(0), x(65536, 1024)),
    "sum dim 0 bf16": of(lambda a: a.sum(0), x(65536, 1024, dtype=bf16)),
    "mean": of(lambda a: a.mean(-1), x(8192, 8192)),
    "var": of(lambda a: a.var(-1), x(8192, 8192)),
    "std": of(lambda a: a.std(), x(8192, 8192)),
    "norm": of(lambda a: a.norm(), x(8192, 8192)),
    "norm dim": of(lambda a: a.norm(dim=-1), x(8192, 8192)),
    "normalize": of(lambda a: F.normalize(a, dim=-1), x(8192, 1024)),
    "max": of(lambda a: a.max(-1)[0], x(8192, 8192)),
    "amax": of(lambda a: a.amax(-1), x(8192, 8192)),
    "logsumexp": of(lambda a: a.logsumexp(-1), x(8192, 8192)),
    "cumsum": of(lambda a: a.cumsum(-1), x(4096, 8192)),
    "cumsum first": of(lambda a: a.cumsum(0), x(4096, 8192)),
    "cumprod": of(lambda a: a.cumprod(-1), x(1024, 4096)),
    "sort": of(lambda a: a.sort(-1)[0], x(4096, 8192)),
    "sort long": of(lambda a: a.sort()[0], x(8388608)),
    "topk": of(lambda a: a.topk(8, -1)[0], x(8192, 8192)),
    "topk few": of(lambda a: a.topk(2, -1)[0], x(16384, 64)),
    "topk of most": of(lambda a: a.topk(7_000_000)[0], x(8388608)),
    "topk of many rows": of(lambda a: a.topk(5000, -1)[0], x(64, 40000)),
    "topk of columns": of(lambda a: a.topk(5000, 0)[0], x(40000, 16)),
    "topk unsorted": of(lambda a: a.topk(7_000_000, sorted=False)[0], x(8388608)),
    "argmax": of(lambda a: a.argmax(-1).float(), x(8192, 8192, grad=False)),
    "gather": of(lambda a, n: a.gather(1, n), x(8192, 4096), i(4096, 8192, 512)),
    "scatter_add": of(
        lambda a, n, b: a.scatter_add(0, n, b), x(4096, 1024), i(4096, 8192, 1024), x(8192, 1024)
    ),
    "index_select": of(lambda a, n: a.index_select(0, n), x(50000, 512), i(50000, 16384)),
    "index": of(lambda a, n: a[n], x(50000, 512), i(50000, 16384)),
    "index two": of(lambda a, n, m: a[n, m], x(512, 512, 128), i(512, 8192), i(512, 8192)),
    "index_add": of(lambda a, n, b: a.index_add(0, n, b), x(50000, 512), i(50000, 16384), x(16384, 512)),
    "index_put": of(
        lambda a, n, b: (a * 1).index_put((n,), b), x(50000, 512), i(50000, 16384), x(16384, 512)
    ),
    "masked_fill": of(
        lambda a, m: a.masked_fill(m, 0.0),
        x(64, 512, 512),
        lambda: torch.rand(64, 512, 512, device="cuda") > 0.5,
    ),
    "where": of(
        lambda a, b, m: torch.where(m, a, b),
        x(64, 512, 512),
        x(64, 512, 512),
        lambda: torch.rand(64, 512, 512, device="cuda") > 0.5,
    ),
    "cat": of(lambda a, b: torch.cat([a, b], -1), x(4096, 4096), x(4096, 4096)),
    "stack": of(lambda a, b: torch.stack([a, b]), x(4096, 4096), x(4096, 4096)),
    "pad": of(lambda a: F.pad(a, (1, 1, 1, 1)), x(16, 64, 128, 128)),
    "pad reflect": of(lambda a: F.pad(a, (1, 1, 1, 1), mode="reflect"), x(16, 64, 128, 128)),
    "roll": of(lambda a: a.roll(3, 1), x(4096, 8192)),
    "flip": of(lambda a: a.flip(1), x(4096, 8192)),
    "repeat": of(lambda a: a.repeat(1, 4), x(4096, 2048)),
    "repeat_interleave": of(lambda a: a.repeat_interleave(4, 1), x(64, 8, 128, 256)),
    "expand add": of(lambda a, b: a + b, x(64, 512, 512), x(512)),
    "add bf16 f32": of(lambda a, b: a + b, x(4096, 4096, dtype=bf16), x(4096, 4096)),
    "pow": of(lambda a: a.pow(3), x(4096, 8192)),
    "exp sqrt": of(lambda a: a.exp().sqrt(), x(4096, 8192)),
    "clamp": of(lambda a: a.clamp(-1, 1), x(4096, 8192)),
    "tril": of(lambda a: a.tril(), x(64, 512, 512)),
    "outer": of(torch.outer, x(8192), x(8192)),
    "cdist": of(torch.cdist, x(2048, 64), x(2048, 64)),
    "fft": of(lambda a: torch.fft.rfft(a).abs(), x(1024, 8192)),
    "irfft2": of(lambda a: torch.fft.irfft2(torch.fft.rfft2(a)), x(64, 32, 128, 128)),
    "eigh": of(lambda a: torch.linalg.eigh(a + a.mT)[1], x(1500, 1500)),
    "eigh small": of(lambda a: torch.linalg.eigh(a + a.mT)[1], x(8, 400, 400)),
    "eigvalsh": of(lambda a: torch.linalg.eigvalsh(a @ a.mT), x(1500, 1500, grad=False)),
    "svd": of(lambda a: torch.linalg.svd(a, full_matrices=False)[0], x(900, 900)),
    "svd wide": of(lambda a: torch.linalg.svd(a, full_matrices=False)[0], x(300, 2000, grad=False)),
    "svdvals": of(torch.linalg.svdvals, x(2000, 300, grad=False)),
    "qr": of(lambda a: torch.linalg.qr(a)[0], x(2048, 1024)),
    "inv": of(torch.linalg.inv, x(2048, 2048)),
    "solve": of(torch.linalg.solve, x(2048, 2048), x(2048, 512)),
    "cholesky": of(
        lambda a: torch.linalg.cholesky(a @ a.mT + 5000 * torch.eye(2048, device="cuda")), x(2048, 2048)
    ),
    "cholesky_solve": of(
        lambda a, b: torch.cholesky_solve(b, a.tril() + 9 * torch.eye(2048, device="cuda")),
        x(2048, 2048),
        x(2048, 512),
    ),
    "slogdet": of(lambda a: torch.linalg.slogdet(a)[1], x(4, 1024, 1024)),
    "pinv": of(torch.linalg.pinv, x(800, 400)),
    "complex": of(lambda a: torch.view_as_real(torch.view_as_complex(a) * 1j), x(1024, 2048, 2)),
    "conv2d": module(lambda: nn.Conv2d(128, 128, 3, padding=1), x(32, 128, 64, 64)),
    "conv2d 1x1": module(lambda: nn.Conv2d(256, 512, 1, bias=False), x(32, 256, 32, 32)),
    "conv2d stride 2": module(lambda: nn.Conv2d(3, 64, 7, 2, 3, bias=False), x(64, 3, 224, 224)),
    "conv2d patch": module(lambda: nn.Conv2d(3, 768, 16, 16), x(64, 3, 224, 224)),
    "conv2d depthwise": module(lambda: nn.Conv2d(256, 256, 7, padding=3, groups=256), x(32, 256, 56, 56)),
    "conv2d bf16": module(lambda: nn.Conv2d(128, 128, 3, padding=1).to(bf16), x(32, 128, 64, 64, dtype=bf16)),
    "conv2d bf16 channels_last": module(
        lambda: nn.Conv2d(128, 128, 3, padding=1).to(bf16, memory_format=torch.channels_last),
        lambda: (
            torch.randn(32, 128, 64, 64, device="cuda", dtype=bf16)
            .to(memory_format=torch.channels_last)
            .requires_grad_()
        ),
    ),
    "conv1d": module(lambda: nn.Conv1d(256, 256, 3, padding=1), x(32, 256, 2048)),
    "conv1d causal depthwise": module(
        lambda: nn.Conv1d(1024, 1024, 4, padding=3, groups=1024), x(8, 1024, 2048)
    ),
    "conv3d": module(lambda: nn.Conv3d(32, 32, 3, padding=1), x(4, 32, 32, 64, 64)),
    "conv_transpose2d": module(lambda: nn.ConvTranspose2d(128, 64, 2, 2), x(16, 128, 64, 64)),
    "max_pool2d": of(lambda a: F.max_pool2d(a, 2), x(32, 128, 64, 64)),
    "avg_pool2d": of(lambda a: F.avg_pool2d(a, 2), x(32, 128, 64, 64)),
    "adaptive_avg_pool2d": of(lambda a: F.adaptive_avg_pool2d(a, 1), x(32, 512, 64, 64)),
    "interpolate nearest": of(lambda a: F.interpolate(a, scale_factor=2), x(16, 64, 64, 64)),
    "interpolate bilinear": of(
        lambda a: F.interpolate(a, scale_factor=2, mode="bilinear"), x(16, 64, 64, 64)
    ),
    "grid_sample": of(
        lambda a, g: F.grid_sample(a, g, align_corners=False), x(16, 64, 64, 64), x(16, 64, 64, 2)
    ),
    "unfold": of(lambda a: F.unfold(a, 3), x(8, 64, 64, 64)),
    "pixel_shuffle": of(lambda a: F.pixel_shuffle(a, 2), x(16, 256, 64, 64)),
    "lstm": module(lambda: nn.LSTM(512, 512, 2, batch_first=True), x(32, 256, 512)),
    "gru": module(lambda: nn.GRU(512, 512, batch_first=True), x(32, 256, 512)),
    "mha": of(
        lambda m, a: m(a, a, a, need_weights=False)[0],
        lambda: nn.MultiheadAttention(512, 8, batch_first=True).to("cuda"),
        x(16, 512, 512),
    ),
    "mha weights": of(
        lambda m, a: m(a, a, a)[0],
        lambda: nn.MultiheadAttention(512, 8, batch_first=True).to("cuda"),
        x(16, 512, 512),
    ),
    "one_hot": of(lambda n: F.one_hot(n, 4096).float(), i(4096, 8192)),
    "clip_grad_norm": clip(1.0, None),
    "clip_grad_norm loop": clip(1.0, False),
    "clip_grad_norm inf": clip(1.0, None),
    "sgd": optimizer(lambda p: optim.SGD(p, 0.1)),
    "sgd momentum": optimizer(lambda p: optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1)),
    "sgd nesterov": optimizer(lambda p: optim.SGD(p, 0.1, momentum=0.9, nesterov=True)),
    "adam": optimizer(lambda p: optim.Adam(p, 0.1)),
    "adam bf16": optimizer(lambda p: optim.Adam(p, 0.1), bf16),
    "adam loop": optimizer(lambda p: optim.Adam(p, 0.1, foreach=False)),
    "adam amsgrad": optimizer(lambda p: optim.Adam(p, 0.1, amsgrad=True, weight_decay=0.1)),
    "adamw": optimizer(lambda p: optim.AdamW(p, 0.1)),
    "adamw capturable": optimizer(lambda p: optim.AdamW(p, 0.1, capturable=True)),
    "adamw fused": optimizer(lambda p: optim.AdamW(p, 0.1, fused=True)),
    "nadam": optimizer(lambda p: optim.NAdam(p, 0.1)),
    "radam": optimizer(lambda p: optim.RAdam(p, 0.1)),
    "adamax": optimizer(lambda p: optim.Adamax(p, 0.1)),
    "adagrad": optimizer(lambda p: optim.Adagrad(p, 0.1)),
    "adadelta": optimizer(lambda p: optim.Adadelta(p, 0.1)),
    "rmsprop": optimizer(lambda p: optim.RMSprop(p, 0.1, momentum=0.9, centered=True)),
    "rmsprop plain": optimizer(lambda p: optim.RMSprop(p, 0.1)),
    "rprop": optimizer(lambda p: optim.Rprop(p, 0.1)),
    "asgd": optimizer(lambda p: optim.ASGD(p, 0.1)),
    "adafactor": optimizer(lambda p: optim.Adafactor(p, 0.1)),
    "adafactor loop": optimizer(lambda p: optim.Adafactor(p, 0.1, foreach=False)),
}


def mask(share: float, *shape: int) -> Callable[[], torch.Tensor]:
    """True for about this share of the elements."""
    return lambda: torch.rand(*shape, device="cuda") < share


def counts(most: int, n: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.randint(0, most + 1, (n,), device="cuda")


def weight_average() -> Step:
    model = nn.Sequential(nn.Linear(2048, 4096), nn.Linear(4096, 2048)).to("cuda")
    average = optim.swa_utils.AveragedModel(model)
    return lambda: average.update_parameters(model)


def assign(tensor: torch.Tensor, where: torch.Tensor, value: Any) -> torch.Tensor:
    tensor[where] = value
    return tensor


M = 1 << 22
# The size of a result, or of what a kernel allocates for itself, depends on values.
KERNELS |= {
    "nonzero all": of(torch.nonzero, mask(1.1, M)),
    "nonzero half": of(torch.nonzero, mask(0.5, M)),
    "nonzero 2d": of(torch.nonzero, mask(1.1, 2048, 2048)),
    "nonzero float": of(torch.nonzero, x(M, grad=False)),
    "nonzero_static": of(lambda a: torch.nonzero_static(a, size=1 << 20), mask(0.5, M)),
    "where one argument": of(lambda a: torch.where(a)[0], mask(1.1, 2048, 2048)),
    "count_nonzero": of(torch.count_nonzero, mask(0.5, M)),
    "masked_select all": of(torch.masked_select, x(M), mask(1.1, M)),
    "masked_select half": of(torch.masked_select, x(M), mask(0.5, M)),
    "masked_select broadcast": of(torch.masked_select, x(2048, 2048), mask(1.1, 2048)),
    "index by mask all": of(lambda a, m: a[m], x(2048, 2048), mask(1.1, 2048, 2048)),
    "index by mask half": of(lambda a, m: a[m], x(2048, 2048), mask(0.5, 2048, 2048)),
    "index rows by mask": of(lambda a, m: a[m], x(4096, 1024), mask(1.1, 4096)),
    "index rows by mask bf16": of(lambda a, m: a[m], x(4096, 1024, dtype=bf16), mask(0.5, 4096)),
    "index columns by mask": of(lambda a, m: a[:, m], x(4096, 1024), mask(1.1, 1024)),
    "index by mask and ids": of(lambda a, m, n: a[m][:, n], x(4096, 1024), mask(1.1, 4096), i(1024, 512)),
    "assign number by mask": of(lambda a, m: assign(a, m, 0.0), x(M, grad=False), mask(1.1, M)),
    "assign values by mask": of(
        lambda a, m, v: assign(a, m, v[: int(m.sum())]), x(M, grad=False), mask(1.1, M), x(M, grad=False)
    ),
    "assign rows by mask": of(lambda a, m: assign(a, m, 1.0), x(4096, 1024, grad=False), mask(1.1, 4096)),
    "index_put mask accumulate": of(
        lambda a, m, v: a.index_put((m,), v, accumulate=True), x(M), mask(1.1, M), lambda: rand(1)
    ),
    "masked_scatter": of(lambda a, m, v: a.masked_scatter(m, v), x(M), mask(0.5, M), x(M)),
    "repeat_interleave counts": of(
        lambda a, n: a.repeat_interleave(n, dim=0), x(4096, 1024), counts(4, 4096)
    ),
    "repeat_interleave number": of(lambda a: a.repeat_interleave(3, dim=0), x(4096, 1024)),
    "repeat_interleave output_size": of(
        lambda a: a.repeat_interleave(torch.full((4096,), 2, device="cuda"), dim=0, output_size=8192),
        x(4096, 1024),
    ),
    "repeat_interleave ids": of(torch.repeat_interleave, counts(4, 1 << 20)),
    "unique": of(torch.unique, i(1 << 20, M)),
    "unique few": of(torch.unique, i(100, M)),
    "unique float": of(torch.unique, x(M, grad=False)),
    "unique inverse counts": of(
        lambda n: torch.unique(n, return_inverse=True, return_counts=True), i(1 << 20, M)
    ),
    "unique rows": of(lambda n: torch.unique(n, dim=0), i(10, 65536, 16)),
    "unique rows inverse": of(
        lambda n: torch.unique(n, dim=0, return_inverse=True, return_counts=True), i(10, 65536, 16)
    ),
    "unique_consecutive": of(torch.unique_consecutive, i(4, M)),
    "unique_consecutive inverse": of(
        lambda n: torch.unique_consecutive(n, return_inverse=True, return_counts=True), i(4, M)
    ),
    "unique_consecutive rows": of(lambda n: torch.unique_consecutive(n, dim=0), i(4, 65536, 16)),
    "bincount": of(torch.bincount, i(1 << 20, M)),
    "bincount weights": of(lambda n, w: torch.bincount(n, w), i(1 << 20, M), x(M, grad=False)),
    "histc": of(lambda a: torch.histc(a, 1000), x(M, grad=False)),
    "one_hot unknown classes": of(F.one_hot, i(1000, 8192)),
    "one_hot classes": of(lambda n: F.one_hot(n, 1000), i(1000, 8192)),
    "multinomial": of(lambda a: torch.multinomial(a.softmax(-1), 1), x(512, 32000, grad=False)),
    "multinomial many": of(
        lambda a: torch.multinomial(a.softmax(-1), 64, replacement=True), x(512, 32000, grad=False)
    ),
    "argwhere": of(torch.argwhere, mask(1.1, 2048, 1024)),
    "tensor_split": of(lambda a: torch.tensor_split(a, torch.tensor([100, 1000]))[0], x(4096, 1024)),
    "searchsorted": of(torch.searchsorted, lambda: rand(M, grad=False).sort().values, x(M, grad=False)),
    "weight average": weight_average,
}


def measure(out: Path) -> None:
    import oomph

    rows = json.loads(out.read_text()) if out.exists() else {}
    for name, target in KERNELS.items():
        try:
            found = oomph.measure(target)
            rows[name] = {"before": found.before, "steps": [[s.allocated, s.end] for s in found.steps]}
        except Exception as error:  # one op must not stop the others
            rows[name] = {"error": str(error)[:200]}
            print(name, "FAILED", error, flush=True)
    out.write_text(json.dumps(rows, indent=1))


def compare(measured: Path, names: list[str]) -> None:
    import oomph

    rows = json.loads(measured.read_text())
    found = []
    for name, target in KERNELS.items():
        row = rows.get(name)
        if row is None or "error" in row or (names and name not in names):
            continue
        try:
            prediction = oomph.predict(target, gpu="h200")
        except Exception as error:
            print(f"{name:28s} FAILED {error}")
            continue
        real, ours = row["steps"][-1][0], prediction.steps[-1].allocated
        found.append(
            (100 * (ours / real - 1), name, real, ours, row["steps"][-1][1], prediction.steps[-1].end)
        )
    for error, name, real, ours, end, our_end in sorted(found, key=lambda row: -abs(row[0])):
        print(
            f"{name:28s} {error:+8.3f} %  measured {real / 2**20:9.2f}  predicted {ours / 2**20:9.2f}"
            f"  after the step {end / 2**20:8.2f} {our_end / 2**20:8.2f} MiB"
        )


# A convolution of square images with square kernels, padded by half a kernel.
COLUMNS = ("batch", "in_channels", "out_channels", "kernel", "stride", "size", "dtype", "channels_last")
PASSES = ("forward", "data", "weight")
CHANNELS = (8, 16, 32, 48, 64, 96, 128, 256, 512)


def convolution_cases(count: int) -> list[dict[str, Any]]:
    """A sample of shapes, always the same. What is listed twice is twice as likely."""
    in_channels, batches = (1, 3, 4, 8, 16, 24, *CHANNELS[2:]), (4, 16, 64, 128)
    kernels = ((1, 1), (1, 2), (3, 1), (3, 2), (5, 1), (7, 2), (4, 2), (11, 4))
    sizes, dtypes = (224, 112, 64, 56, 32, 28, 14, 8, 7), ("float32", "float32", "bfloat16")
    cases = [
        (b, i, o, k, stride, size, dtype, last)
        for b, i, o, (k, stride), size, dtype, last in itertools.product(
            batches, in_channels, CHANNELS, kernels, sizes, dtypes, (0, 0, 1)
        )
        if b * max(i, o) * size**2 * 4 < 1.5e9 and size >= k
    ]
    random.Random(0).shuffle(cases)
    cases[:0] = [
        (128, 64, 128, 5, 1, 32, "float32", 0),
        (128, 128, 256, 3, 1, 16, "float32", 0),
    ]  # the convolutions of training_scripts/triplet.py
    return [dict(zip(COLUMNS, case, strict=True)) for case in list(dict.fromkeys(cases))[:count]]


# A convolution of any shape: sizes of input and weight, and so on, each joined by "x".
ANY = ("x", "w", "stride", "padding", "dilation", "groups", "transposed", "dtype", "channels_last")
ANY_CHANNELS = (1, 3, 8, 16, 24, 32, 40, 64, 80, 96, 112, 128, 192, 256, 320, 512, 768, 1024)
ANY_WIDTHS = {1: (1, 2, 3, 3, 4, 5, 7, 9, 15), 2: (1, 2, 3, 3, 3, 4, 5, 7), 3: (1, 2, 3, 3, 4)}
FREE = 24 << 20
LONGEST = {1: 12, 2: 9, 3: 6}  # powers of two


def any_convolutions(count: int, products: bool = False, seed: int = 0) -> list[dict[str, Any]]:
    """A sample of shapes, the same for a seed: oblong images and kernels, groups, dilation, transposed ones.
    With `products`, all kernels are 1 x 1."""
    draw, cases = random.Random(seed), list[dict[str, Any]]()
    while len(cases) < count:
        rank = draw.choice((1, 2, 2, 3))
        side = 2 ** draw.uniform(2, LONGEST[rank])
        image = [max(1, int(side * 2 ** draw.choice((0, 0, 0, -0.5, 0.7)))) for _ in range(rank)]
        width = [1 if products else draw.choice(ANY_WIDTHS[rank])] * rank
        if rank == 2 and draw.random() < 0.1:
            width[draw.randrange(2)] = 1
        groups = draw.choice((2, 4, 16, 32)) if draw.random() < 0.1 else 1
        both = [-(-draw.choice(ANY_CHANNELS) // groups) * groups for _ in range(2)]
        transposed = draw.random() < 0.1
        dilation = draw.choice((2, 4)) if draw.random() < 0.1 and not transposed else 1
        batch = draw.choice((1, 2, 4, 8, 16, 32, 50, 64, 128, 256))
        fits = all(size >= dilation * (k - 1) + 1 for size, k in zip(image, width, strict=True))
        if not fits or batch * max(both) * math.prod(image) * 4 > 1 << 29:
            continue
        weight = [both[not transposed], both[transposed] // groups, *width]
        sizes: dict[str, list[int]] = {
            "x": [batch, both[0], *image],
            "w": weight,
            "stride": [draw.choice((1, 1, 1, 2))] * rank,
            "padding": [dilation * (k - 1) // 2 for k in width],
            "dilation": [dilation] * rank,
        }
        cases.append(
            {name: "x".join(map(str, values)) for name, values in sizes.items()}
            | {"groups": groups, "transposed": int(transposed), "dtype": draw.choice(("float32", "bfloat16"))}
            | {"channels_last": int(rank > 1 and draw.random() < 0.2)}
        )
    return cases


def depthwise_convolutions(count: int) -> list[dict[str, Any]]:
    """A sample of shapes, always the same."""
    draw, cases = random.Random(0), list[dict[str, Any]]()
    while len(cases) < count:
        batch, channels = draw.choice((1, 4, 8, 16, 32, 64, 128)), draw.choice(ANY_CHANNELS[4:])
        side, width = draw.choice((7, 14, 28, 32, 56, 64, 112)), draw.choice((3, 3, 5, 7, 9))
        stride = draw.choice((1, 1, 2))
        if batch * channels * side**2 * 4 > 1 << 29:
            continue
        sizes = {
            "x": [batch, channels, side, side],
            "w": [channels, 1, width, width],
            "stride": [stride] * 2,
            "padding": [width // 2] * 2,
            "dilation": [1] * 2,
        }
        cases.append(
            {name: "x".join(map(str, values)) for name, values in sizes.items()}
            | {"groups": channels, "transposed": 0, "dtype": draw.choice(("float32", "float16", "bfloat16"))}
            | {"channels_last": int(draw.random() < 0.5)}
        )
    return cases


def convolution_calls(case: dict[str, Any], device: str) -> list[tuple[Any, tuple[Any, ...]]]:
    """The op and its arguments, for each pass."""
    if "x" in case:
        sizes = {name: [int(size) for size in case[name].split("x")] for name in ANY[:5]}
    else:
        b, i, o, k, stride, size = (int(case[name]) for name in COLUMNS[:6])
        sizes = {"x": [b, i, size, size], "w": [o, i, k, k], "stride": [stride] * 2}
        sizes |= {"padding": [(k - 1) // 2] * 2, "dilation": [1] * 2}
    options: dict[str, Any] = {"device": device, "dtype": getattr(torch, case["dtype"])}
    rank = len(sizes["stride"])
    last = {2: torch.channels_last, 3: torch.channels_last_3d}.get(rank, torch.contiguous_format)
    format = last if int(case["channels_last"]) else torch.contiguous_format
    x, w = (torch.empty(sizes[name], **options).to(memory_format=format) for name in ("x", "w"))
    transposed, groups = bool(int(case.get("transposed", 0))), int(case.get("groups", 1))
    geometry = (None, *(sizes[name] for name in ANY[2:5]), transposed, [0] * rank, groups)
    forward, backward = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default
    shape = forward(*(torch.empty_like(each, device="meta") for each in (x, w)), *geometry).shape
    gradient = torch.empty(shape, **options).to(memory_format=format)
    masks = ((True, False, False), (False, True, False))
    return [(forward, (x, w, *geometry)), *((backward, (gradient, x, w, *geometry, mask)) for mask in masks)]


def largest_workspaces(count: int) -> list[dict[str, Any]]:
    """Of the measured convolutions, those whose passes take the most."""
    rows = stored(RESULTS / "convolutions_h200.csv")
    rows.sort(key=lambda row: min(int(row[name]) for name in PASSES), reverse=True)
    return [{name: row[name] for name in COLUMNS} for row in rows[:count]]


def leave_free(size: int) -> None:
    """Let this process reserve so many bytes more than it has allocated."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + size) / total)


def measure_convolutions(out: Path, cases: list[dict[str, Any]], refused: bool = False) -> None:
    """The bytes that each pass requests beyond its result: cuDNN's workspace. With `refused`, FREE bytes
    are free beyond the result; a pass that fails has -1."""
    with out.open("w") as file:
        writer = csv.DictWriter(file, [*cases[0], *PASSES], lineterminator="\n")
        writer.writeheader()
        for case in cases:
            found = []
            calls = convolution_calls(case, "cuda")
            like_results = calls[1][1][:3]  # the output's gradient, input and weight
            for (op, arguments), result in zip(calls, like_results, strict=True):
                before = torch.cuda.memory_stats()["requested_bytes.all.current"]
                torch.cuda.reset_peak_memory_stats()
                if refused:
                    leave_free(result.nbytes + FREE)
                try:
                    op(*arguments)
                    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"]
                    found.append(peak - before - result.nbytes)
                except torch.OutOfMemoryError:
                    found.append(-1)
                torch.cuda.set_per_process_memory_fraction(1.0)
            writer.writerow(case | dict(zip(PASSES, found, strict=True)))


def compare_convolutions(measured: Path) -> None:
    """Of searches, the workspace that cuDNN's search takes is compared, if all of it is free."""
    from oomph import gpus
    from oomph.prediction.ops.registry import temporaries_of
    from oomph.prediction.ops.rules import Search
    from oomph.torch_internals import FakeTensorMode

    gpu = gpus.find("h200")
    errors: dict[str, list[tuple[bool, int, int]]] = {name: [] for name in PASSES}
    for row in stored(measured):
        with FakeTensorMode():
            calls = convolution_calls(row, "cpu")
        gradient, x = calls[1][1][:2]
        for name, (op, arguments) in zip(PASSES, calls, strict=True):
            temporaries = [size for size in temporaries_of(op, arguments, {}, gpu) if size]
            searched = [max(size.workspaces) for size in temporaries if isinstance(size, Search)]
            ours = sum(searched or [size for size in temporaries if isinstance(size, int) and size > 0])
            real = int(row[name])
            block = 2 << 20 if searched and ours > 1 << 20 else 512  # as the allocator rounds it
            same_blocks = -(-ours // block) == -(-real // block)
            errors[name].append((same_blocks, abs(ours - real), x.nbytes + gradient.nbytes))
    for name, found in errors.items():
        exact = sum(same for same, _, _ in found) / len(found)
        close = sum(error <= 0.02 * both for _, error, both in found) / len(found)
        total = sum(error for _, error, _ in found) / sum(both for _, _, both in found)
        print(
            f"{name:8s} {len(found)} passes: {exact:.1%} exact; of input and output together, {close:.1%}"
            f" within 2 %, all errors {total:.1%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("measure").add_argument("--out", type=Path, required=True)
    compared = commands.add_parser("compare")
    compared.add_argument("measured", type=Path)
    compared.add_argument("names", nargs="*")
    convolutions = commands.add_parser("convolutions")
    convolutions.add_argument("--out", type=Path, required=True)
    convolutions.add_argument("--count", type=int, default=1200)
    convolutions.add_argument("--any", action="store_true", help="of any shape, in one to three dimensions")
    convolutions.add_argument("--products", action="store_true", help="with kernels of 1 x 1")
    convolutions.add_argument("--depthwise", action="store_true")
    convolutions.add_argument("--seed", type=int, default=0, help="of --any and --products")
    convolutions.add_argument("--refused", action="store_true", help="without memory for the workspace")
    convolutions.add_argument("--search", action="store_true", help="with torch.backends.cudnn.benchmark")
    compared = commands.add_parser("compare-convolutions")
    compared.add_argument("measured", type=Path, nargs="?", default=RESULTS / "convolutions_h200.csv")
    compared.add_argument("--search", action="store_true", help="they were measured with --search")
    given = parser.parse_args()
    torch.backends.cudnn.benchmark = getattr(given, "search", False)
    if given.command == "measure":
        measure(given.out)
    elif given.command == "convolutions":
        if given.refused:
            cases = largest_workspaces(given.count)
        elif given.any or given.products:
            cases = any_convolutions(given.count, given.products, given.seed)
        elif given.depthwise:
            cases = depthwise_convolutions(given.count)
        else:
            cases = convolution_cases(given.count)
        measure_convolutions(given.out, cases, given.refused)
    elif given.command == "compare-convolutions":
        compare_convolutions(given.measured)
    else:
        compare(given.measured, given.names)


if __name__ == "__main__":
    main()
