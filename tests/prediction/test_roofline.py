"""Seconds of a step: which rate rules, what runs side by side, and who waits for whom."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from predict_samples import Stack, linear_workload, stack_workload
from small_programs import mean_square
from torch import nn

import oomph
from oomph import Workload, gpus
from oomph.prediction.roofline import CALIBRATED, step_work
from oomph.prediction.trace.work import Kernel

H200 = gpus.find("h200")


def kernel(**changes: Any) -> Kernel:
    """One that moves nothing and takes the host no time."""
    plain = Kernel("forward", False, 0, 0, "memory", "single", 0.0, 0, 0)
    return plain._replace(**changes)


def seconds(*kernels: Kernel, gpu: gpus.GPU = H200) -> float:
    found, _ = step_work(kernels, gpu)
    assert found is not None
    return found


def wide_linear(dtype: str = "float32", **changes: Any) -> Workload:
    """A product large enough for its arithmetic to rule."""

    def batch(device: torch.device) -> torch.Tensor:
        return torch.randn(8192, 4096, device=device, dtype=getattr(torch, dtype))

    options = {"dtype": dtype, "optimizer": None}
    return Workload(lambda: nn.Linear(4096, 4096, bias=False), batch, mean_square, **options | changes)


def test_a_step_of_large_products_takes_their_flops_over_the_rate():
    found = oomph.predict(wide_linear(), gpu="h200")
    products = 2 * 2 * 8192 * 4096 * 4096 / (67e12 * CALIBRATED.compute["product"]["single"])
    assert products < found.step_seconds < 1.1 * products


def test_half_precision_is_faster_than_float32_and_float64_no_faster():
    taken = {
        dtype: oomph.predict(wide_linear(dtype), gpu="h200").step_seconds
        for dtype in ("bfloat16", "float32", "float64")
    }
    assert taken["bfloat16"] < taken["float32"] / 5
    assert taken["float64"] >= 0.9 * taken["float32"]


def test_autocast_runs_the_products_at_the_half_precision_rate():
    plain, cast = (oomph.predict(wide_linear(autocast=each), gpu="h200") for each in (None, "bfloat16"))
    assert cast.work.forward.half_flops == plain.work.forward.single_flops
    assert cast.step_seconds < plain.step_seconds / 3


@pytest.mark.parametrize("gpu", ["24GiB", "gtx1080ti"])
def test_a_card_of_unknown_rates_has_no_step_time_but_its_work_is_counted(gpu):
    found = oomph.predict(linear_workload(), gpu=gpu)
    assert found.step_seconds is None
    assert found.work.flops > 0
    assert found.work.gpu_seconds == 0


def test_without_a_gpu_named_the_time_is_that_of_the_gpu_assumed(linear):
    assert oomph.predict(linear_workload()).step_seconds == linear.step_seconds


def test_a_faster_card_takes_less_time():
    workload = wide_linear("bfloat16")
    slower, faster, fastest = (
        oomph.predict(workload, gpu=name).step_seconds for name in ("a100-80gb", "h100-80gb", "b200")
    )
    assert slower > faster > fastest


def test_a_kernel_takes_the_longer_of_its_arithmetic_and_its_bytes():
    product = {"kind": "product", "rate": "half", "flops": 1e12, "launches": 0}
    arithmetic = 1e12 / (989e12 * CALIBRATED.compute["product"]["half"])
    assert seconds(kernel(**product)) == pytest.approx(arithmetic)
    assert seconds(kernel(**product, bytes=1024)) == pytest.approx(arithmetic)
    of_bytes = 10**11 / (4.8e12 * CALIBRATED.bandwidth["memory"])
    assert seconds(kernel(**product, bytes=10**11)) == pytest.approx(of_bytes)


def test_more_bandwidth_or_a_higher_rate_never_takes_longer():
    step = [
        kernel(bytes=10**9, launches=1, host_ops=3),
        kernel(kind="product", rate="half", flops=1e12, launches=1, host_ops=1, tiles=64, depth=64),
        kernel(kind="to host", bytes=10**8, beside=True),
    ]
    for better in (
        replace(H200, bandwidth=2 * H200.bandwidth),
        replace(H200, bf16_tflops=2 * H200.bf16_tflops),
        replace(H200, multiprocessors=H200.multiprocessors // 2),  # filled by fewer tiles
    ):
        assert seconds(*step, gpu=better) <= seconds(*step)


def test_few_tiles_leave_multiprocessors_idle_unless_the_sum_is_long():
    def of(tiles: int, depth: int) -> float:
        return seconds(kernel(kind="product", rate="half", flops=1e11, tiles=tiles, depth=depth))

    assert of(33, 64) == pytest.approx(4 * of(132, 64))
    assert of(33, 64) > of(33, 16 * CALIBRATED.split)


def test_many_small_kernels_take_the_hosts_time_and_few_large_ones_the_gpus():
    small = [kernel(bytes=1024, launches=1, host_ops=1)] * 100
    assert seconds(*small) == pytest.approx(100 * CALIBRATED.forward_op, rel=0.05)
    large = [kernel(bytes=10**9, host_ops=1)] * 100
    assert seconds(*large) == pytest.approx(100 * 10**9 / (4.8e12 * CALIBRATED.bandwidth["memory"]), rel=0.05)


def test_the_host_runs_ahead_of_the_gpu_until_it_waits():
    large, host = kernel(bytes=10**10), kernel(host_ops=1000)
    side_by_side = seconds(large, host)
    one_after_the_other = seconds(large, kernel(kind="wait"), host)
    assert one_after_the_other == pytest.approx(seconds(large) + seconds(host))
    assert side_by_side < one_after_the_other


def test_a_copy_that_need_not_be_waited_for_runs_beside_the_kernels():
    compute = kernel(bytes=10**11)
    copy = kernel(kind="to device", bytes=10**9)
    beside = copy._replace(beside=True)
    assert seconds(beside, compute) == pytest.approx(max(seconds(compute), seconds(beside)))
    assert seconds(copy, compute) == pytest.approx(seconds(compute) + seconds(copy))
    assert seconds(beside) == pytest.approx(10**9 / 55e9)


def test_copies_of_both_directions_do_not_hinder_each_other():
    there, back = (kernel(kind=kind, bytes=10**9, beside=True) for kind in ("to host", "to device"))
    assert seconds(there, back) == pytest.approx(seconds(there))
    assert seconds(there, there) == pytest.approx(2 * seconds(there))


def test_checkpointing_slows_a_step_by_about_the_recomputation():
    plain, checkpointed = (
        oomph.predict(stack_workload(model, optimizer=None), gpu="a100-80gb").work.gpu_seconds
        for model in (Stack, lambda: Stack(4, True))
    )
    assert 1.2 < checkpointed / plain < 1.45


def test_every_kind_of_kernel_has_an_efficiency_between_nothing_and_all():
    for rates in CALIBRATED.compute.values():
        assert all(0 < share <= 1 for share in rates.values())
    assert all(0 < share <= 1 for share in CALIBRATED.bandwidth.values())
