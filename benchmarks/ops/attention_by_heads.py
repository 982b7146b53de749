"""Attention's backward pass, all heads at once against a few key/value heads at a time: time and memory.

python -m benchmarks.ops.attention_by_heads [OUT.csv]     # on a GPU: results/attention_by_heads_<gpu>.csv
"""

from __future__ import annotations

import csv
import sys
import time
from pathlib import Path

import torch

from benchmarks import RESULTS
from benchmarks.accuracy.rows import short_name
from oomph import ops
from oomph.ops.softmax_attention import sdpa

SHAPES = ((32_768, 32, 8, 80), (32_768, 32, 8, 128), (131_072, 32, 8, 80))  # tokens, heads, key heads, width
ROUNDS = 3


def backward(shape: tuple[int, int, int, int]) -> tuple[float, float]:
    """Milliseconds, the least of some rounds, and MiB above what was there before."""
    tokens, heads, key_heads, width = shape
    sizes = ((1, heads, tokens, width), *((1, key_heads, tokens, width),) * 2)
    q, k, v = (torch.randn(size, device="cuda", dtype=torch.bfloat16, requires_grad=True) for size in sizes)
    out = ops.attention(q, k, v, causal=True)
    gradient = torch.randn_like(out)
    times = []
    for _ in range(ROUNDS):
        q.grad = k.grad = v.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, began = torch.cuda.memory_allocated(), time.perf_counter()
        torch.autograd.backward(out, gradient, retain_graph=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return min(times) * 1e3, (torch.cuda.max_memory_allocated() - before) / 2**20


def main() -> int:
    gpu = torch.cuda.get_device_name()
    out = RESULTS / f"attention_by_heads_{short_name(gpu)}.csv"
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else out
    group_bytes = sdpa._GROUP_BYTES
    rows = []
    for shape in SHAPES:
        row: dict[str, object] = dict(zip(("tokens", "heads", "key_heads", "width"), shape, strict=True))
        for name, limit in (("whole", sys.maxsize), ("by_heads", group_bytes)):
            sdpa._GROUP_BYTES = limit
            milliseconds, mib = backward(shape)
            row |= {f"{name}_ms": round(milliseconds, 1), f"{name}_mib": round(mib)}
        rows.append(row | {"gpu": gpu, "torch": torch.__version__})
        print(rows[-1], flush=True)
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
