"""Report 001's matmul claim on this GPU: without tiles, 16x16 tiles, tuned tiles, cuBLAS.

    python -m lab.benchmarks.systems.matmul [--rounds 12] [--out FILE]

The report replaced a "simple matmul kernel without shared memory tiling" by one with 16x16 shared-memory
tiles and expected 2-3x. So the claim is judged on its own terms: float32, no tensor cores, one output a
thread, on the matrix shapes of its own model. The other rows say how far either is from what the GPU can do.
All methods are timed in turns, each after the L2 cache was overwritten.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from benchmarks.rows import write
from torch import Tensor

from lab.benchmarks import RESULTS
from lab.benchmarks.systems.matmul_kernel import MatmulTile, tiled_matmul

try:
    import triton
    import triton.language as tl
except ImportError:  # said in main
    triton = None

OUT = RESULTS / "matmul.csv"
# Report 001 at batch 32 x 128 tokens: projections, both halves of the MLP, LM head; then a large square.
SHAPES = ((4096, 512, 512), (4096, 2048, 512), (4096, 512, 2048), (4096, 10000, 512), (4096, 4096, 4096))
BROADCAST_AT_MOST = 8 << 30  # bytes of the [M, K, N] product
# The report's kernel: 16 x 16 threads, one output each, one step in flight. bf16 goes to the tensor cores.
SIXTEEN = {
    torch.float32: MatmulTile(16, 16, 16, group=1, warps=8, stages=1),
    torch.bfloat16: MatmulTile(16, 16, 16, group=1, warps=1, stages=1),
}
SWEEP = {
    torch.float32: (
        MatmulTile(32, 32, 32, warps=4, stages=2),
        MatmulTile(64, 64, 16, warps=4, stages=3),
        MatmulTile(64, 64, 32, warps=8, stages=3),
        MatmulTile(128, 64, 16, warps=8, stages=3),
        MatmulTile(128, 128, 16, warps=8, stages=3),
    ),
    torch.bfloat16: (
        MatmulTile(64, 64, 64, warps=4, stages=3),
        MatmulTile(64, 128, 64, warps=4, stages=4),
        MatmulTile(128, 128, 64, warps=4, stages=3),
        MatmulTile(128, 128, 64, warps=8, stages=3),
        MatmulTile(128, 256, 64, warps=8, stages=3),
    ),
}

if triton is not None:

    @triton.jit
    def untiled(a, b, c, M, N, K, SIDE: tl.constexpr):  # type: ignore[no-untyped-def]
        """One output a thread, 16 x 16 threads a block; each thread fetches both numbers of every product.

        The block is written as a vector of threads, so the compiler has no second layout to carry a number to
        through shared memory; what reuse there is, the caches do. b is read coalesced, a's number is the same
        for 16 threads, as in the CUDA kernel that this stands for.
        """
        across = tl.cdiv(N, SIDE)
        thread = tl.arange(0, SIDE * SIDE)
        rows = (tl.program_id(0) // across) * SIDE + thread // SIDE
        columns = (tl.program_id(0) % across) * SIDE + thread % SIDE
        real = (rows < M) & (columns < N)
        a_at = a + rows * K
        b_at = b + columns
        total = tl.zeros((SIDE * SIDE,), dtype=tl.float32)
        for _ in range(K):
            a_now = tl.load(a_at, mask=real, other=0.0).to(tl.float32)
            total += a_now * tl.load(b_at, mask=real, other=0.0).to(tl.float32)
            a_at += 1
            b_at += N
        tl.store(c + rows * N + columns, total.to(c.dtype.element_ty), mask=real)


@dataclass(frozen=True)
class Row:
    """One method on one shape; times in milliseconds, the peak in MiB above the inputs."""

    gpu: str
    torch: str
    triton: str
    dtype: str
    m: int
    n: int
    k: int
    method: str
    tile: str
    median_ms: float
    p10_ms: float
    p90_ms: float
    tflops: float
    peak_mib: float
    relative_error: float


def by_untiled(a: Tensor, b: Tensor) -> Tensor:
    (m, k), n = a.shape, b.shape[1]
    c = a.new_empty(m, n)
    untiled[(triton.cdiv(m, 16) * triton.cdiv(n, 16),)](a, b, c, m, n, k, SIDE=16, num_warps=8, num_stages=1)
    return c


def by_broadcast(a: Tensor, b: Tensor) -> Tensor:
    """The report's naive form: the product over [M, K, N] as a tensor, then its sum."""
    return (a.unsqueeze(2) * b.unsqueeze(0)).sum(1)


def tiles_of(tile: MatmulTile) -> str:
    return f"{tile.m}x{tile.n}x{tile.k} warps={tile.warps} stages={tile.stages}"


def by_tile(tile: MatmulTile) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda a, b: tiled_matmul(a, b, tile)


def time_in_turns(calls: Sequence[Callable[[], object]], rounds: int, cache: Tensor) -> list[list[float]]:
    """Milliseconds of every call in every round. A round runs each once, so a slow spell is shared by all."""
    events = []
    for _ in range(rounds):
        for call in calls:
            cache.zero_()  # empties L2 of the inputs, and keeps the GPU busy until the call is queued
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            events.append((start, end))
    torch.cuda.synchronize()
    times = [start.elapsed_time(end) for start, end in events]
    return [times[i :: len(calls)] for i in range(len(calls))]


def best_tile(a: Tensor, b: Tensor, cache: Tensor) -> MatmulTile:
    """The fastest of the sweep on these inputs; every configuration is printed."""
    working: list[MatmulTile] = []
    for tile in SWEEP[a.dtype]:
        try:
            by_tile(tile)(a, b)
            working.append(tile)
        except Exception as error:  # too much shared memory or registers for this GPU
            print(f"    {tiles_of(tile)}: left out, {str(error).splitlines()[0]}")
    times = time_in_turns([lambda t=tile: by_tile(t)(a, b) for tile in working], 5, cache)  # type: ignore[misc]
    medians = [statistics.median(series) for series in times]
    print(
        "    sweep: "
        + ", ".join(f"{tiles_of(t)} {ms:.3f} ms" for t, ms in zip(working, medians, strict=True))
    )
    return working[medians.index(min(medians))]


def measure(m: int, n: int, k: int, dtype: torch.dtype, rounds: int, cache: Tensor) -> list[Row]:
    generator = torch.Generator("cuda").manual_seed(0)
    a = torch.randn(m, k, device="cuda", generator=generator).to(dtype)
    b = torch.randn(k, n, device="cuda", generator=generator).to(dtype)
    tuned = best_tile(a, b, cache)
    methods: dict[str, tuple[str, Callable[[Tensor, Tensor], Tensor]]] = {
        "untiled": ("", by_untiled),
        "16x16": (tiles_of(SIXTEEN[dtype]), by_tile(SIXTEEN[dtype])),
        "tuned": (tiles_of(tuned), by_tile(tuned)),
        "cublas": ("", torch.mm),
    }
    if m * n * k * dtype.itemsize <= BROADCAST_AT_MOST:
        methods = {"broadcast": ("", by_broadcast), **methods}
    exact = a.double() @ b.double()
    peaks, errors = {}, {}
    for name, (_, method) in methods.items():
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        c = method(a, b)
        peaks[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
        errors[name] = ((c.double() - exact).norm() / exact.norm()).item()
        del c
    del exact
    times = time_in_turns([lambda f=f: f(a, b) for _, f in methods.values()], rounds, cache)  # type: ignore[misc]
    rows = []
    for (name, (tile, _)), series in zip(methods.items(), times, strict=True):
        cuts = statistics.quantiles(series, n=10)
        median = statistics.median(series)
        rows.append(
            Row(
                gpu=torch.cuda.get_device_name(),
                torch=torch.__version__,
                triton=triton.__version__,
                dtype=str(dtype).removeprefix("torch."),
                m=m,
                n=n,
                k=k,
                method=name,
                tile=tile,
                median_ms=round(median, 4),
                p10_ms=round(cuts[0], 4),
                p90_ms=round(cuts[-1], 4),
                tflops=round(2 * m * n * k / median / 1e9, 2),
                peak_mib=round(peaks[name], 1),
                relative_error=float(f"{errors[name]:.2e}"),
            )
        )
    return rows


def table(rows: Sequence[Row]) -> str:
    titles = ("M x N x K", "method", "median ms", "p10", "p90", "TFLOP/s", "MiB", "error")
    widths = (18, 10, 10, 9, 9, 8, 8, 9)
    lines = [" ".join(f"{title:>{width}}" for title, width in zip(titles, widths, strict=True)) + "  tile"]
    for r in rows:
        first = (f"{r.m}x{r.n}x{r.k}", r.method, f"{r.median_ms:.4f}", f"{r.p10_ms:.4f}", f"{r.p90_ms:.4f}")
        cells = (*first, f"{r.tflops:.2f}", f"{r.peak_mib:.1f}", f"{r.relative_error:.2e}")
        lines.append(
            " ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)) + f"  {r.tile}"
        )
    return "\n".join(lines)


def judge(rows: Sequence[Row]) -> str:
    """The claim in one line, from the float32 rows."""
    time = {(r.m, r.n, r.k, r.method): r.median_ms for r in rows if r.dtype == "float32"}
    shapes = sorted({key[:3] for key in time})
    if not shapes:
        return "claim of report 001: not judged, there are no float32 rows"
    gains = [time[*shape, "untiled"] / time[*shape, "16x16"] for shape in shapes]
    rest = [time[*shape, "16x16"] / time[*shape, "cublas"] for shape in shapes]
    inside = sum(2 <= gain <= 3 for gain in gains)
    verdict = "holds" if inside == len(gains) else "does not hold" if inside == 0 else "holds in part"
    return (
        f'claim of report 001, "2-3x" from 16x16 shared-memory tiles: {verdict} on {rows[0].gpu}: '
        f"{min(gains):.2f}x to {max(gains):.2f}x over {len(gains)} float32 shapes ({inside} within 2-3x); "
        f"cuBLAS is a further {min(rest):.1f}x to {max(rest):.1f}x"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12, help="timed calls of each method (at least 10)")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    if options.rounds < 10:
        parser.error(f"--rounds {options.rounds} is too few for a median and its quantiles; give at least 10")
    if not torch.cuda.is_available():
        print("error: this needs a CUDA GPU and torch sees none", file=sys.stderr)
        return 2
    if triton is None:
        print(
            "error: this needs Triton (pip install 'oomph[kernels]')",
            file=sys.stderr,
        )
        return 2
    torch.set_float32_matmul_precision("highest")  # cuBLAS too multiplies float32 as float32
    cache = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    rows: list[Row] = []
    for dtype in (torch.float32, torch.bfloat16):
        for m, n, k in SHAPES:
            print(f"{str(dtype).removeprefix('torch.')} {m}x{n}x{k}", flush=True)
            try:
                rows += measure(m, n, k, dtype, options.rounds, cache)
            except Exception as error:  # one shape must not lose the others
                print(f"    FAILED {type(error).__name__}: {str(error).splitlines()[0]}")
    for name in ("float32", "bfloat16"):
        print(f"\n{name}\n{table([row for row in rows if row.dtype == name])}")
    if not rows:
        return 1
    write(options.out, rows)
    print(f"\n{len(rows)} rows: {options.out}\n{judge(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
