"""Predictions see the ops of oomph as a run does, and charge them to the line that called them."""

from pathlib import Path

import pytest
import torch

import oomph


def _loss_step():
    x = torch.randn(4096, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(50_000, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(0, 50_000, (4096,), device="cuda")

    def step():
        oomph.ops.linear_cross_entropy(x, weight, target).backward()
        x.grad = weight.grad = None

    return step


def test_an_op_is_charged_to_the_line_that_calls_it():
    site, _ = oomph.predict(_loss_step, gpu="h200").by_line()[0]
    line = next(
        number
        for number, text in enumerate(Path(__file__).read_text().splitlines(), 1)
        if text.strip().startswith("oomph.ops.linear")
    )
    assert (Path(site.file).name, site.line) == (Path(__file__).name, line)


def test_a_product_of_half_precision_matrices_in_float32_is_booked_in_float32():
    def program():
        a = torch.empty(1024, 1024, device="cuda", dtype=torch.bfloat16)
        wide = torch.mm(a, a, out_dtype=torch.float32)
        torch.addmm(wide, a, a, out_dtype=torch.float32, out=wide)

    prediction = oomph.predict(program, gpu="h200")
    workspace = 32 * 2**20
    assert prediction.peak.allocated == 2 * 2**20 + 4 * 2**20 + workspace


def test_a_wrong_argument_of_an_op_is_the_programs_failure_with_its_line():
    def program():
        x = torch.empty(4, 8, device="cuda")
        oomph.ops.linear_cross_entropy(x, x.bfloat16(), torch.zeros(4, dtype=torch.int64, device="cuda"))

    with pytest.raises(oomph.ProgramError, match="one dtype") as failed:
        oomph.predict(program, gpu="h200")
    assert failed.value.file is not None
    assert Path(failed.value.file).name == Path(__file__).name
