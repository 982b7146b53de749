"""Seconds of a step: which rate rules, what runs side by side, and who waits for whom."""

import pytest
import torch
from small_programs import linear_workload, mean_square
from torch import nn

import oomph
from oomph import Workload, gpus
from oomph.prediction.tracer.work import CALIBRATED, Kernel, step_work

pytestmark = pytest.mark.usefixtures("in_process")

H200 = gpus.find("h200")


def kernel(**changes):
    """One that moves nothing and takes the host no time."""
    plain = Kernel("forward", False, 0, 0, "memory", "single", 0.0, 0, 0)
    return plain._replace(**changes)


def seconds(*kernels, gpu=H200):
    found, _ = step_work(kernels, gpu)
    assert found is not None
    return found


def wide_linear(dtype="float32", **changes):
    """A product large enough for its arithmetic to rule."""

    def batch(device):
        return torch.randn(8192, 4096, device=device, dtype=getattr(torch, dtype))

    options = {"dtype": dtype, "optimizer": None}
    return Workload(lambda: nn.Linear(4096, 4096, bias=False), batch, mean_square, **options | changes)


def test_a_step_of_large_products_takes_their_flops_over_the_rate():
    found = oomph.predict(wide_linear(), gpu="h200")
    products = 2 * 2 * 8192 * 4096 * 4096 / (67e12 * CALIBRATED.compute["product"]["single"])
    assert products < found.step_seconds < 1.1 * products


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


def test_a_kernel_takes_the_longer_of_its_arithmetic_and_its_bytes():
    product = {"kind": "product", "rate": "half", "flops": 1e12, "launches": 0}
    arithmetic = 1e12 / (989e12 * CALIBRATED.compute["product"]["half"])
    assert seconds(kernel(**product)) == pytest.approx(arithmetic)
    assert seconds(kernel(**product, bytes=1024)) == pytest.approx(arithmetic)
    of_bytes = 10**11 / (4.8e12 * CALIBRATED.bandwidth["memory"])
    assert seconds(kernel(**product, bytes=10**11)) == pytest.approx(of_bytes)


def test_few_tiles_leave_multiprocessors_idle_unless_the_sum_is_long():
    def of(tiles, depth):
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
    one_after_the_other = seconds(large, kernel(kind="synchronize"), host)
    assert one_after_the_other == pytest.approx(seconds(large) + seconds(host))
    assert side_by_side < one_after_the_other


def test_a_copy_on_another_stream_runs_beside_the_kernels():
    compute = kernel(bytes=10**11)
    copy = kernel(kind="to device", bytes=10**9)
    beside = copy._replace(non_blocking=True, stream=1)
    assert seconds(beside) == pytest.approx(10**9 / 55e9)
    assert seconds(beside, compute) == pytest.approx(max(seconds(compute), seconds(beside)))
    assert seconds(copy, compute) == pytest.approx(seconds(compute) + seconds(copy))


def record(stream, event):
    return kernel(kind="record event", stream=stream, event=event)


def until(stream, event):
    return kernel(kind="wait event", stream=stream, event=event)


def test_copies_out_and_back_add_up_where_the_computation_waits_for_both():
    """As activations that wait on the host: out before forward may go on, back before backward may."""
    forward, backward = kernel(bytes=10**9), kernel(bytes=10**9)
    out = kernel(kind="to host", bytes=10**10, non_blocking=True, stream=1)
    back = kernel(kind="to device", bytes=10**10, non_blocking=True, stream=2)
    waiting = [forward, record(0, 1), until(1, 1), out, record(1, 2), until(0, 2)]
    waiting += [record(0, 3), until(2, 3), back, record(2, 4), until(0, 4), backward]
    each = [seconds(one) for one in (forward, out, back, backward)]
    assert seconds(*waiting) == pytest.approx(sum(each))
    apart = [one for one in waiting if one.kind not in ("record event", "wait event")]
    assert seconds(*apart) == pytest.approx(max(each))


def test_a_wait_for_an_idle_stream_or_an_event_never_recorded_costs_nothing():
    compute = kernel(bytes=10**10)
    plain = seconds(compute, compute)
    assert seconds(compute, record(1, 1), until(0, 1), compute) == plain
    assert seconds(compute, until(0, 7), compute) == plain
    elsewhere = kernel(kind="to host", bytes=10**9, non_blocking=True, stream=2)
    assert seconds(elsewhere, record(1, 1), until(0, 1), compute) == seconds(elsewhere) > seconds(compute)
    assert seconds(compute, kernel(kind="synchronize", event=7), kernel(host_ops=10)) == seconds(compute)
    assert seconds(compute, kernel(kind="synchronize", stream=3), kernel(host_ops=10)) == seconds(compute)


def test_the_host_waits_for_an_event_or_a_stream_or_all():
    host = kernel(kind="host", bytes=10**9)
    copy = kernel(kind="to host", bytes=10**9, non_blocking=True, stream=1)
    both = seconds(copy) + seconds(host)
    assert seconds(copy, record(1, 1), kernel(kind="synchronize", event=1), host) == pytest.approx(both)
    assert seconds(copy, kernel(kind="synchronize", stream=1), host) == pytest.approx(both)
    assert seconds(copy, kernel(kind="synchronize device"), host) == pytest.approx(both)
    assert seconds(copy, kernel(kind="synchronize"), host) == pytest.approx(max(seconds(copy), seconds(host)))


def test_arithmetic_on_the_host_takes_the_hosts_time_and_none_of_the_gpus():
    host = kernel(kind="host", bytes=10**10, phase="optimizer")
    found, work = step_work([host, kernel(bytes=1024)], H200)
    assert found == pytest.approx(10**10 / CALIBRATED.host_bandwidth, rel=1e-3)
    assert work.host_seconds == pytest.approx(10**10 / CALIBRATED.host_bandwidth)
    assert (work.bytes, work.optimizer.launches) == (1024, 0)
