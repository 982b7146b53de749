"""benchmarks/matmul.py without a GPU: its verdict, its untiled kernel, its one line when there is no GPU."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "matmul.py"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_matmul", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["benchmark_matmul"] = module
    spec.loader.exec_module(module)
    return module


def rows(benchmark: ModuleType, shape: tuple[int, int, int], untiled: float, tiled: float) -> list:
    def row(method: str, ms: float) -> object:
        m, n, k = shape
        return benchmark.Row("GPU", "2", "3", "float32", m, n, k, method, "", ms, ms, ms, 1.0, 1.0, 0.0)

    return [row("untiled", untiled), row("16x16", tiled), row("cublas", tiled / 4)]


@pytest.mark.parametrize(
    ("times", "verdict"),
    [
        ([(5.0, 2.0), (6.0, 2.0)], "holds on GPU: 2.50x to 3.00x over 2 float32 shapes (2 within 2-3x)"),
        ([(2.0, 2.0), (8.0, 2.0)], "does not hold on GPU: 1.00x to 4.00x"),
        ([(2.0, 2.0), (5.0, 2.0)], "holds in part on GPU: 1.00x to 2.50x over 2 float32 shapes (1 within"),
    ],
)
def test_the_verdict_is_one_line_with_the_measured_range(benchmark, times, verdict):
    made = [row for i, pair in enumerate(times) for row in rows(benchmark, (i, 1, 1), *pair)]
    said = benchmark.judge(made)
    assert verdict in said
    assert "cuBLAS is a further 4.0x to 4.0x" in said
    assert "\n" not in said


def test_the_table_has_a_line_for_each_row(benchmark):
    assert len(benchmark.table(rows(benchmark, (1, 2, 3), 4.0, 2.0)).splitlines()) == 4


def test_the_rows_are_written_as_csv(benchmark, tmp_path):
    benchmark.write(tmp_path / "deep" / "m.csv", rows(benchmark, (1, 2, 3), 4.0, 2.0))
    lines = (tmp_path / "deep" / "m.csv").read_text().splitlines()
    assert lines[0].startswith("gpu,torch,triton,dtype,m,n,k,method,tile,median_ms")
    assert len(lines) == 4


def test_the_untiled_kernel_multiplies(benchmark):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    a, b = torch.randn(20, 9, device=device), torch.randn(9, 35, device=device)
    torch.testing.assert_close(benchmark.by_untiled(a, b), a @ b)
    torch.testing.assert_close(benchmark.by_broadcast(a, b), a @ b)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says so only where there is no GPU")
def test_without_a_gpu_it_ends_with_one_line():
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.strip() == "error: benchmarks/matmul.py needs a CUDA GPU and torch sees none"
    assert done.stdout == ""
