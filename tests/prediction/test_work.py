"""The work of a step, counted by hand: flops, bytes, launches, copies."""

from functools import partial

import pytest
import torch
from small_programs import Stack, in_trace, linear_workload, mean_square, stack_workload
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import oomph
from oomph import Workload, gpus
from oomph.prediction.tracer.session import tracing
from oomph.prediction.tracer.work import CALIBRATED, CHECKPOINT_COST, MODE_COST, OPTIMIZER_STEP_COST
from oomph.units import MiB

pytestmark = pytest.mark.usefixtures("in_process")

H200 = gpus.find("h200")


def kernels_of(program):
    """What a program asks of the pretend GPU, from the call of the function that it returns."""
    with tracing(H200) as tracer:
        run = program()
        tracer.work.begin(counting=True)
        with tracer.in_phase("forward"):
            run()
        return list(tracer.work.kernels)


def on_gpu(*shape, dtype=torch.float32):
    return torch.empty(shape, device="cuda", dtype=dtype)


def work_of(workload, gpu="h200"):
    return oomph.predict(workload, gpu=gpu).work


def test_a_linear_layer_takes_two_flops_per_weight_and_row_forward_and_four_backward():
    rows, wide, narrow = 96, 512, 256
    work = work_of(
        Workload(
            lambda: nn.Sequential(nn.Linear(wide, narrow), nn.Linear(narrow, wide, bias=False)),
            lambda device: torch.randn(rows, wide, device=device, requires_grad=True),
            mean_square,
        )
    )
    each = rows * wide * narrow
    assert work.forward.flops == 2 * 2 * each
    assert work.backward.flops == 2 * 4 * each
    assert work.optimizer.flops == 0
    assert work.forward.single_flops == work.forward.flops


def test_flops_are_booked_at_the_rate_of_their_dtype():
    def flops(dtype):
        return work_of(linear_workload(dtype=dtype, batch=lambda d: torch.randn(64, 1024, device=d).to(
            getattr(torch, dtype)))).forward  # fmt: skip

    expected = 2 * 64 * 1024 * 1024
    assert flops("bfloat16").half_flops == flops("bfloat16").flops == expected
    assert flops("float16").half_flops == expected
    assert flops("float64").double_flops == expected


def test_float32_products_are_tf32_only_where_that_is_allowed():
    def allowing():
        torch.backends.cuda.matmul.allow_tf32 = True
        x = on_gpu(64, 64)
        return lambda: x @ x

    def plain():
        x = on_gpu(64, 64)
        return lambda: x @ x

    def convolving():
        layer, x = nn.Conv2d(4, 8, 3, device="cuda"), on_gpu(2, 4, 16, 16)
        return lambda: layer(x)

    assert kernels_of(allowing)[0].rate == "tf32"
    assert kernels_of(plain)[0].rate == "single"
    assert kernels_of(convolving)[0].rate == "tf32"


def test_an_elementwise_op_reads_its_inputs_and_writes_its_result():
    def program():
        x, y = on_gpu(1024, 256), on_gpu(1024, 256)
        return lambda: x + y

    (kernel,) = kernels_of(program)
    assert kernel.bytes == 3 * MiB
    assert (kernel.launches, kernel.flops, kernel.kind) == (1, 0, "memory")


def test_an_op_in_place_reads_and_writes_its_tensor_and_a_fill_only_writes():
    def program():
        x = on_gpu(1024, 256)
        return lambda: (x.mul_(2), x.zero_())

    multiplied, filled = kernels_of(program)
    assert multiplied.bytes == 2 * MiB
    assert filled.bytes == MiB


def test_what_an_expansion_repeats_is_read_once():
    def program():
        row, x = on_gpu(1, 256), on_gpu(1024, 256)
        return lambda: x + row.expand(1024, 256)

    (kernel,) = kernels_of(program)
    assert kernel.bytes == 2 * MiB + 1024
    assert kernel.kind == "strided"


def test_views_and_empty_tensors_cost_the_gpu_nothing():
    def program():
        x = on_gpu(1024, 256)
        whole = torch.zeros(8, 4, dtype=torch.long, device="cuda")
        return lambda: (x.view(256, 1024).t()[3:7].unsqueeze(0), whole.view(-1)[2:], torch.empty_like(x))

    assert kernels_of(program) == []


def test_a_lookup_reads_the_rows_it_needs_and_not_the_table():
    def program():
        table, index = nn.Embedding(100_000, 256, device="cuda"), torch.zeros(64, dtype=torch.long).cuda()
        return lambda: table(index)

    assert kernels_of(program)[0].bytes == 64 * 8 + 2 * 64 * 256 * 4


@pytest.mark.parametrize(("causal", "share"), [(False, 1.0), (True, 0.5)])
def test_attention_counts_the_pairs_that_are_seen(causal, share):
    def program():
        q, k, v = (on_gpu(2, 4, 256, 64, dtype=torch.bfloat16) for _ in range(3))
        return lambda: nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    attention = next(kernel for kernel in kernels_of(program) if kernel.kind == "cudnn attention")
    assert attention.flops == share * 4 * 2 * 4 * 256 * 256 * 64


def test_a_convolution_takes_two_flops_per_weight_and_place():
    def program():
        layer, x = nn.Conv2d(8, 16, 3, groups=2, device="cuda"), on_gpu(4, 8, 34, 34)
        return lambda: layer(x)

    assert kernels_of(program)[0].flops == 2 * 4 * 32 * 32 * (16 * 4 * 9)


def test_rows_of_an_odd_or_even_length_make_a_half_precision_product_unaligned():
    def program():
        x, whole, even, odd = (on_gpu(64, width, dtype=torch.float16) for width in (64, 128, 126, 127))
        bias = on_gpu(126, dtype=torch.float16)
        return lambda: (x.t() @ whole, x.t() @ even, torch.addmm(bias, x, even), x.t() @ odd)

    kinds = [kernel.kind for kernel in kernels_of(program)]
    assert kinds == ["product", "even product", "even product", "unaligned product"]


def test_a_fused_norm_is_counted_although_no_op_stands_for_it():
    work = work_of(
        Workload(lambda: nn.RMSNorm(256), lambda device: torch.randn(4096, 256, device=device), mean_square)
    )
    assert work.forward.bytes >= 2 * 4096 * 256 * 4


def test_a_recurrent_layer_multiplies_every_weight_with_every_row():
    model = nn.LSTM(64, 128)
    weights = sum(p.numel() for p in model.parameters())

    def loss(model, batch):
        return model(batch)[0].square().mean()

    work = work_of(
        Workload(lambda: nn.LSTM(64, 128), lambda device: torch.randn(16, 4, 64, device=device), loss)
    )
    assert work.forward.flops == 2 * 16 * 4 * weights
    assert work.backward.flops == 2 * work.forward.flops


@pytest.mark.parametrize(("use_reentrant", "recomputed"), [(True, 1.0), (False, 0.5)])
def test_checkpointing_adds_what_it_recomputes_to_the_backward_pass(use_reentrant, recomputed):
    """Reentrant: the whole forward. The other kind stops early, before a block's second product."""
    plain, checkpointed = work_of(stack_workload()), work_of(stack_workload(lambda: Stack(4, use_reentrant)))
    assert checkpointed.forward.flops == plain.forward.flops
    assert checkpointed.backward.flops - plain.backward.flops == recomputed * plain.forward.flops
    assert checkpointed.backward.launches > plain.backward.launches
    assert checkpointed.optimizer == plain.optimizer


def test_hooks_on_saved_tensors_and_modes_take_the_hosts_time():
    def hooks(run):
        def program():
            layer, x = nn.Linear(16, 16, device="cuda"), on_gpu(4, 16).requires_grad_()
            return lambda: run(layer, x).sum().backward()

        return sum(kernel.host_hooks for kernel in kernels_of(program))

    checkpointed = partial(checkpoint, use_reentrant=False)
    policy = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    assert hooks(lambda layer, x: layer(x)) == 0
    # The input and the weight: saved, saved again in the recomputation, taken.
    assert hooks(checkpointed) == CHECKPOINT_COST + 3 * 2
    assert hooks(partial(checkpointed, context_fn=policy)) >= hooks(checkpointed) + 2 * MODE_COST


def test_every_call_of_an_optimizers_step_takes_the_hosts_time():
    def program(calls):
        parameters = [nn.Parameter(on_gpu(16)) for _ in range(4)]
        share = 4 // calls
        optimizers = [torch.optim.SGD(parameters[i * share : (i + 1) * share]) for i in range(calls)]

        def step():
            sum(p.sum() for p in parameters).backward()
            for optimizer in optimizers:
                optimizer.step()

        return step

    one, four = (sum(k.host_hooks for k in kernels_of(partial(program, calls))) for calls in (1, 4))
    assert (one, four) == (OPTIMIZER_STEP_COST, 4 * OPTIMIZER_STEP_COST)


def test_the_optimizer_goes_over_parameters_gradients_and_states_in_few_launches(linear):
    size = 4 * MiB
    assert linear.work.optimizer.bytes >= 5 * size
    assert linear.work.optimizer.launches < 30
    fused = work_of(linear_workload(optimizer=lambda p: torch.optim.AdamW(p, fused=True)))
    assert fused.optimizer.bytes == pytest.approx(7 * size, rel=0.01)
    assert fused.optimizer.launches <= 2


def test_copies_between_host_and_gpu_are_counted_each_way():
    def program():
        x, host = on_gpu(1024, 256), torch.empty(1024, 256)
        return lambda: (
            x.cpu(),
            host.cuda(),
            x.copy_(host, non_blocking=True),
            host.to("cuda", non_blocking=True),
        )

    kernels = kernels_of(program)
    assert [kernel.kind for kernel in kernels] == ["to host", "to device", "to device", "to device"]
    assert [kernel.bytes for kernel in kernels] == [MiB] * 4
    assert [kernel.non_blocking for kernel in kernels] == [False, False, True, True]


def test_waits_between_streams_are_reported_in_program_order():
    def program():
        x, host, side = on_gpu(1024, 256), torch.empty(1024, 256), torch.cuda.Stream()

        def run():
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                host.copy_(x, non_blocking=True)
            copied = side.record_event()
            torch.cuda.current_stream().wait_event(copied)
            copied.synchronize()
            side.synchronize()
            torch.cuda.synchronize()

        return run

    kernels = kernels_of(program)
    assert [kernel.kind for kernel in kernels] == [
        "record event", "wait event", "to host", "record event", "wait event",
        "synchronize", "synchronize", "synchronize device",
    ]  # fmt: skip
    made, awaited, copy, copied, back, on_event, on_stream, _ = kernels
    assert (made.stream, back.stream) == (0, 0)
    assert awaited.stream == copy.stream == copied.stream == on_stream.stream != 0
    assert made.event == awaited.event != copied.event == back.event == on_event.event


def test_arithmetic_on_the_host_counts_in_a_trace():
    def program():
        x, y = torch.empty(4 * MiB), torch.empty(4 * MiB)
        return lambda: (x.add_(y), torch.mul(x, y), x.view(2, -1), torch.empty(4 * MiB))

    assert [(kernel.kind, kernel.bytes) for kernel in kernels_of(program)] == [("host", 48 * MiB)] * 2


def test_an_optimizer_that_runs_on_the_host_takes_its_time_there():
    workload = linear_workload(optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3))
    here, away = (
        oomph.predict(oomph.apply(fixes, workload), gpu="h200") for fixes in ([], ["optimizer_cpu_offload"])
    )
    adamw_over_memory = 7 * 4 * MiB / CALIBRATED.host_bandwidth
    assert away.step_seconds > here.step_seconds + adamw_over_memory


def test_only_the_last_step_is_counted(linear):
    flops = 2 * 64 * 1024 * 1024
    assert linear.work.flops == 2 * flops  # the batch needs no gradient


@in_trace(lambda found: found.work.flops == 2 * 3 * 2 * 64**3)
def test_a_function_without_steps_is_counted_whole():
    x = torch.randn(64, 64, device="cuda", requires_grad=True)
    for _ in range(2):
        (x @ x).sum().backward()


def test_kernels_of_the_ops_are_counted_with_their_flops():
    from oomph.ops import BlockPattern, attention

    def program():
        q = k = v = on_gpu(2, 4, 1024, 64, dtype=torch.bfloat16)
        pattern = BlockPattern("local", block=64, window=2)
        return lambda: attention(q, k, v, pattern=pattern, impl="triton")

    counted = [kernel for kernel in kernels_of(program) if kernel.kind == "kernel"]
    assert [kernel.flops for kernel in counted] == [2 * 2 * 2 * 4 * 1024 * (5 * 64) * 64]
    assert counted[0].bytes == 2 * 4 * 1024 * (2 * 64 * 2 + 4)  # q, k and v are one tensor
    assert counted[0].rate == "half"


def test_of_steps_with_different_batches_the_one_that_moves_least_is_timed():
    """Their kernels are as many."""

    def program(rows):
        model = nn.Linear(1024, 1024).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for each in rows:
            model(torch.randn(each, 1024, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    different, small, large = (
        oomph.predict(partial(program, rows), gpu="h200").step_seconds
        for rows in ((1 << 16, 1 << 16, 1 << 12), [1 << 12] * 3, [1 << 16] * 3)
    )
    assert different == pytest.approx(small, rel=0.05)
    assert large > 2 * small
