"""Rules for what CUDA kernels allocate beside their results, against an H200 with torch 2.11."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from small_programs import in_trace

import oomph
from oomph.gpus import find
from oomph.prediction.ops.reductions import reduction_buffers
from oomph.prediction.ops.registry import temporaries_of
from oomph.units import MiB

pytestmark = pytest.mark.usefixtures("in_process")

aten = torch.ops.aten
H200 = find("h200")
f32, bf16, i64 = torch.float32, torch.bfloat16, torch.int64


def meta(*shape, dtype=f32):
    return torch.empty(shape, dtype=dtype, device="meta")


def strided(shape, strides, dtype=f32):
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def taken(op, *args, **kwargs):
    return [size for size in temporaries_of(op, args, kwargs, H200) if size is not None]


def highest(events):
    held = peak = 0
    for size in events:
        held += size
        peak = max(peak, held)
    return peak


SUMS = [  # shape, strides, reduced, type; the staging buffer and the semaphores
    ((4096, 3072), None, [0], f32, [100663296, 96]),
    ((8192, 3072), None, [0], bf16, [138412032, 96]),
    ((65536, 1024), None, [0], bf16, [138412032, 32]),
    ((8192, 20000), None, [0], f32, [143360000, 628]),
    ((2, 1024, 2048), None, [0, 1], f32, [33554432, 64]),
    ((65536, 3), None, [0], bf16, [384, 8]),
    ((300000, 17), None, [0], f32, [287232, 8]),
    ((16384, 129), None, [0], bf16, [1056768, 20]),
    ((4096, 4095), None, [0], f32, [2620800, 512]),
    ((64, 64, 56, 56), (200704, 1, 3584, 64), [0, 2, 3], f32, [25690112, 4]),
    ((8, 3, 224, 224), (150528, 1, 672, 3), [0, 2, 3], f32, [2352, 8]),
    ((8, 50000, 16), None, [1], f32, [51249152, 4]),
    ((8192, 700), (1024, 1), [0], f32, [45875200, 24]),
    ((1, 16777216), None, [-1], bf16, [2112, 4]),
    ((33554432,), None, None, bf16, [2112, 4]),
]


def test_a_sum_that_is_written_into_a_tensor_needs_the_same_buffers():
    def program():
        rows, out = torch.ones(8192, 3072, dtype=bf16, device="cuda"), torch.empty(3072, device="cuda")
        torch.sum(rows, 0, dtype=f32, out=out)

    made = [each.bytes for each in oomph.predict(program, gpu="h200").allocations]
    assert made == [8192 * 3072 * 2, 3072 * 4, 138412032, 96]


@pytest.mark.parametrize(("shape", "strides", "dims", "dtype", "measured"), SUMS)
def test_a_sum_stages_as_many_bytes_as_were_measured(shape, strides, dims, dtype, measured):
    assert (
        reduction_buffers(shape, strides or meta(*shape).stride(), dims and tuple(dims), dtype, H200)
        == measured
    )


@pytest.mark.parametrize(
    ("op", "args", "measured"),
    [
        (aten.mean.default, (meta(4096, 1024),), [2048, 4]),
        (aten.mean.dim, (meta(16384, 768), [0]), [100663296, 24]),
        (aten.linalg_vector_norm.default, (meta(4096, 1024, dtype=bf16),), [2048, 4]),
        (aten.linalg_vector_norm.default, (meta(16384, 768), 2, [0]), [100663296, 24]),
        (aten.var.correction, (meta(16384, 768), [0]), [402653184, 24]),
        (aten.std.correction, (meta(4096, 1024),), [8192, 4]),
        (aten.var_mean.correction, (meta(4096, 1024, dtype=bf16),), [8192, 4]),
        (aten.var_mean.correction, (meta(16384, 768), [-1]), []),
        (aten.amax.default, (meta(16384, 768), [0]), [100663296, 24]),
        (aten.max.dim, (meta(16384, 768), 0), [402653184, 24]),
        (aten.max.dim, (meta(16384, 768), -1), []),
        (aten.argmax.default, (meta(4096, 1024, dtype=bf16),), [8192, 4]),
        (aten.any.dim, (meta(16384, 768), 0), [100663296, 24]),
        (aten.all.dim, (meta(16384, 768, dtype=torch.bool), 0), [25165824, 24]),
        (aten.all.default, (meta(4096, 1024, dtype=torch.bool),), [512, 4]),
        (aten.prod.dim_int, (meta(16384, 768), 0), [100663296, 24]),
    ],
)
def test_each_kind_of_reduction_has_accumulators_of_its_own_size(op, args, measured):
    assert taken(op, *args) == measured


def test_a_tensor_beyond_32_bit_offsets_is_summed_in_parts_one_after_the_other():
    events = taken(aten.sum.dim_IntList, meta(600000, 4096, dtype=bf16), [0])
    assert [size for size in events if size > 0] == [16384, 308281344, 128]  # four times the same
    assert highest(events) == 16384 + 308281344 + 128
    assert len(taken(aten.sum.dim_IntList, meta(10**13, 4096, dtype=bf16), [0])) < 50


def test_summing_a_mask_casts_it_to_int64_first():
    assert taken(aten.sum.dim_IntList, meta(8192, 8192, dtype=torch.bool), [-1])[0] == 8 * 8192 * 8192


def test_smaller_gpus_split_a_reduction_over_fewer_blocks():
    shape, strides = (65536, 1024), (1024, 1)
    small = reduction_buffers(shape, strides, (0,), f32, find("t4"))
    assert small
    assert sum(small) < sum(reduction_buffers(shape, strides, (0,), f32, H200))


def test_an_embeddings_gradient_sorts_its_indices_and_sums_in_parts():
    given = meta(8, 512, 768), meta(8, 512, dtype=i64), 50257, -1, False
    events = taken(aten.embedding_dense_backward.default, *given)
    measured = [32768, 32768, 32768, 83455, 32768, 8, 32768, 1279, 32768, 32768, 1279, 8, 36040, 13839360]
    assert [size for size in events if size > 0] == measured
    rounded = [math.copysign(-(-abs(size) // 512) * 512, size) for size in events]
    assert highest(rounded) == 14040576


def test_few_indices_need_no_sort():
    given = meta(3072, 768), meta(3072, dtype=i64), 50257, -1, False
    assert taken(aten.embedding_dense_backward.default, *given) == []


def test_long_runs_of_few_indices_are_added_into_the_gradient():
    grad = strided((512, 512, 8), (512, 1, 262144))
    events = taken(aten.embedding_dense_backward.default, grad, meta(512, 512, dtype=i64), 32, -1, False)
    measured = [8388608, 2097152, 2097152, 2097152, 4269567, 2097152, 8, 2097152, 2047, 256, 256, 1279, 8]
    assert [size for size in events if size > 0] == [*measured, 209968, 209968]


@pytest.mark.parametrize(
    ("shape", "dtype", "measured"),
    [
        ((8388608,), bf16, [67108864, 85416447]),
        ((3, 1000000), f32, [8000000, 12200191]),
        ((1024,), f32, [8192]),
    ],
)
def test_a_sort_takes_cubs_alternate_buffers(shape, dtype, measured):
    assert taken(aten.sort.default, meta(*shape, dtype=dtype)) == measured


def test_a_random_permutation_sorts_random_keys():
    # Measured: 6,045,184 bytes beside the result, as blocks.
    assert taken(aten.randperm.default, 150_000) == [1_200_000, 1_200_000, 1_200_000, 2_444_799]
    assert taken(aten.randperm.default, 20_000)[1] == 80_000  # keys of 32 bits


def test_dropout_allocates_its_mask_before_its_result():
    def setup():
        x = torch.ones(1024, device="cuda", requires_grad=True)
        return lambda: torch.nn.functional.dropout(x).sum().backward()

    made = [one for one in oomph.predict(setup).allocations if one.op == "aten.native_dropout"]
    assert [one.dtype for one in made[:2]] == ["bool", "float32"]


def test_a_bag_keeps_the_number_of_every_indexs_bag_and_allocates_it_before_the_result():
    def setup():
        bags = torch.nn.EmbeddingBag(8, 16, mode="sum").cuda()
        ids = torch.zeros(4, 5, dtype=torch.long, device="cuda")
        return lambda: bags(ids).sum().backward()

    made = [one for one in oomph.predict(setup).allocations if one.op == "aten._embedding_bag"]
    assert [one.shape for one in made[:4]] == [(4,), (20,), (4, 16), (0,)]


def test_topk_counts_digits_per_block_where_rows_are_long():
    measured = [32, 128, 128, 409600, 16384, 3200, 3200, 1279]
    assert taken(aten.topk.default, meta(16, 50257, dtype=bf16), 50) == measured
    assert taken(aten.topk.default, meta(16384, 64), 2) == []


def test_topk_of_many_sorts_what_it_selects_and_gathers_the_indices():
    sizes = taken(aten.topk.default, meta(64, 40000), 5000)
    values, indices = 64 * 5000 * 4, 64 * 5000 * 8
    assert sizes.count(values) >= 1
    assert sizes[-1] == indices  # gathered
    assert sum(sizes) < sum(size for size in sizes if size > 0)  # what selects is freed before
    unsorted = taken(aten.topk.default, meta(64, 40000), 5000, -1, True, False)
    assert sizes[: len(unsorted)] == unsorted
    assert values not in unsorted


def test_a_scan_casts_whole_numbers_and_copies_what_is_strided():
    assert taken(aten.cumsum.default, meta(8, 512, dtype=torch.bool), 1) == [32768]
    assert taken(aten.cumsum.default, meta(16777216), 0) == [70911]
    assert taken(aten.cumprod.default, strided((1024, 4095), (4096, 1)), 1) == [16773120]


def test_accumulating_into_indices_sorts_them_and_writing_does_not():
    target, index, values = meta(50000, 512), meta(16384, dtype=i64), meta(16384, 512)
    assert taken(aten.index_put_.default, target, [index], values, False) == []
    span = 8 * 16384
    assert 6 * span < highest(taken(aten.index_put_.default, target, [index], values, True)) < 7 * span


def test_log_softmax_copies_a_transposed_gradient():
    grad, output = meta(64, 8000, 128), meta(64, 128, 8000)
    backward = aten._log_softmax_backward_data.default
    assert highest(taken(backward, output, output, -1, torch.float32)) == 0
    assert highest(taken(backward, grad.transpose(1, 2), output, -1, torch.float32)) == 4 * grad.numel()


def test_layer_norm_sums_gradients_of_many_short_rows_in_two_passes():
    def events(rows):
        tensor, statistic, weight = meta(rows, 256), meta(rows, 1), meta(256)
        given = (tensor, tensor, [256], statistic, statistic, weight, weight, [True, True, True])
        return taken(aten.native_layer_norm_backward.default, *given)

    assert events(65536) == []
    assert highest(events(262144)) == pytest.approx(16 << 20, rel=1e-3)


def loss_step(reduction):
    def target():
        given = torch.randn(1024, 4096, device="cuda", requires_grad=True)
        wanted = torch.randn(1024, 4096, device="cuda")
        kept = []

        def step():
            kept[:] = [torch.nn.functional.mse_loss(given, wanted, reduction=reduction).detach()]

        return step

    return target


def test_a_mean_squared_error_that_is_kept_holds_the_storage_of_every_elements_loss():
    whole = 1024 * 4096 * 4
    assert oomph.predict(loss_step("mean"), gpu="h200").steps[-1].end == 3 * whole


EXPANDED = strided((1024, 512), (0, 0))
MATRIX = meta(512, 256)


@pytest.mark.parametrize(
    ("op", "args", "copied"),
    [
        (aten.mm.default, (EXPANDED, MATRIX), [1024 * 512 * 4]),
        (aten.addmm.default, (meta(256), EXPANDED, MATRIX), [1024 * 512 * 4]),
        (aten.addmm_.default, (meta(1024, 256), EXPANDED, MATRIX), [1024 * 512 * 4]),
        (aten.mm.default, (strided((1024, 512), (2048, 2)), MATRIX), [1024 * 512 * 4]),
        (aten.mm.default, (strided((1024, 512), (2048, 1)), MATRIX), []),  # columns of a wider matrix
        (aten.mm.default, (strided((1024, 512), (1, 1024)), MATRIX), []),  # transposed
        (aten.bmm.default, (strided((8, 64, 32), (0, 32, 1)), meta(8, 32, 16)), []),  # one matrix for all
        (aten.bmm.default, (strided((8, 64, 32), (0, 0, 0)), meta(8, 32, 16)), [8 * 64 * 32 * 4]),
    ],
)
def test_cublas_copies_matrices_without_dense_rows_or_columns(op, args, copied):
    assert taken(op, *args) == copied


# MiB allocated in a step of `f(matrix).sum().backward()`, measured with cuBLAS's workspaces of 32 MiB.
@pytest.mark.parametrize(
    ("measured", "function", "shape"),
    [
        (144, torch.linalg.inv, (2048, 2048)),
        (144, torch.linalg.inv, (16, 512, 512)),
        (130, lambda a: torch.linalg.solve(a, a.new_empty(2048, 64).requires_grad_()), (2048, 2048)),
        (112, lambda a: torch.linalg.slogdet(a)[1], (2048, 2048)),
        (976, torch.linalg.matrix_exp, (2048, 2048)),
        (848, torch.linalg.matrix_exp, (64, 256, 256)),
    ],
)
def test_linear_algebra_and_its_gradients_hold_what_was_measured(measured, function, shape):
    def target():
        matrices = torch.randn(shape, device="cuda", requires_grad=True)

        def step():
            matrices.grad = None
            function(matrices).sum().backward()

        return step

    found = oomph.predict(target, gpu="h200")
    assert found.peak.allocated / MiB == pytest.approx(measured, rel=0.005)


def test_cudnn_copies_sequences_whose_channels_come_last_before_it_normalises_them():
    """As measured in PatchTST, whose batch norms take transposed tensors."""

    def target(transposed):
        norm = torch.nn.BatchNorm1d(128).cuda()
        x = torch.randn(*((512, 64, 128) if transposed else (512, 128, 64)), device="cuda")

        def step():
            out = norm(x.transpose(1, 2) if transposed else x)
            assert out.is_contiguous()
            out.backward(torch.ones_like(out))

        return step

    plain, copied = (oomph.predict(partial(target, transposed), gpu="h200") for transposed in (False, True))
    assert copied.peak.allocated - plain.peak.allocated == 512 * 128 * 64 * 4


@in_trace(lambda found: found.peak.allocated / MiB == pytest.approx(4 * 64, rel=0.001))
def test_a_sum_inside_of_a_gradients_formula_is_a_new_tensor():
    """var_mean's is the sum of two gradients; measured: four tensors of the input's size."""
    x = torch.randn(64, 256, 1024, device="cuda", requires_grad=True)

    def step():
        found = torch.var_mean(x)
        torch.autograd.backward(found, [torch.ones_like(each) for each in found])
        x.grad = None

    return step


# KiB allocated in a step of forward and `backward(ones_like)`, measured.
@pytest.mark.parametrize(
    ("measured", "function", "shape", "dtype"),
    [
        (131_129, torch.nn.GroupNorm(32, 256, dtype=bf16), (16, 256, 64, 64), bf16),
        (283_141, lambda x: torch.nn.BatchNorm1d(128).cuda()(x.transpose(1, 2)), (896, 63, 128), bf16),
        (81_923, lambda x: F.binary_cross_entropy_with_logits(x * 1, torch.rand_like(x)), (4096, 1024), f32),
        (4_116.5, lambda x: F.soft_margin_loss(x, torch.ones_like(x)), (56, 56, 56), f32),
        (2_026, F.logsigmoid, (360, 360), f32),
        (183_790, F.pdist, (360, 360), f32),
        (70_560, lambda x: torch.linalg.lu_factor_ex(x)[0], (358, 360), f32),
        (1_017, torch.trace, (360, 360), f32),
        (2_404, torch.max, (56, 56, 56), f32),
    ],
    ids="group_norm strided_batch_norm BCE_with_logits soft_margin log_sigmoid pdist LU trace max".split(),
)
def test_single_ops_and_their_gradients_hold_what_was_measured(measured, function, shape, dtype):
    def target():
        x = torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True)
        apply = function.cuda() if isinstance(function, torch.nn.Module) else function

        def step():
            out = apply(x)
            out.backward(torch.ones_like(out))
            x.grad = None

        return step

    found = oomph.predict(target, gpu="h200").steps[-1]
    assert found.allocated / 1024 == pytest.approx(measured, rel=0.001)


def test_an_op_that_torch_fakes_by_a_cpu_kernel_keeps_a_type_which_that_lacks():
    def target():
        scores = torch.randn(640, 360, device="cuda", dtype=bf16, requires_grad=True)
        labels = torch.zeros(640, device="cuda", dtype=i64)

        def step():
            loss = F.multi_margin_loss(scores, labels)
            assert loss.dtype is bf16
            loss.backward()
            scores.grad = None

        return step

    measured = 956_928
    assert oomph.predict(target, gpu="h200").steps[-1].allocated == pytest.approx(measured, rel=0.04)


def test_a_condition_of_bytes_is_copied_to_one_of_bools():
    def program():
        x = torch.randn(1024, 1024, device="cuda", requires_grad=True)
        condition = (x == 0).prod(-1, keepdim=True, dtype=torch.uint8)
        torch.where(condition, torch.zeros(1, device="cuda"), x).sum().backward()

    oomph.predict(program)
    assert taken(aten.where.self, meta(4096, dtype=torch.uint8), meta(4096), meta(4096)) == [4096]
    assert taken(aten.where.self, meta(4096, dtype=torch.bool), meta(4096), meta(4096)) == []


@pytest.mark.parametrize(
    ("cell", "kept"), [(torch.nn.LSTMCell, 3 * 4 + 2), (torch.nn.GRUCell, 2 * 3 + 5 + 1)]
)
@pytest.mark.parametrize("bias", [True, False])
@in_trace()
def test_a_recurrent_cell_keeps_both_products_a_workspace_and_its_states(cell, kept, bias):
    """native/RNN.cpp and native/cuda/RNN.cu."""
    module, x = cell(64, 64, bias=bias).cuda(), torch.randn(512, 64, device="cuda")
    before = module(x)
    allocated = torch.cuda.memory_allocated()
    state = module(x, before)
    assert torch.cuda.memory_allocated() - allocated == kept * x.nbytes
    (state[0] if cell is torch.nn.LSTMCell else state).sum().backward()
    assert all(each.grad.shape == each.shape for each in module.parameters())


def test_gradients_of_a_recurrent_cells_biases_are_sums_over_the_rows():
    of_gru, of_lstm = aten._thnn_fused_gru_cell_backward, aten._thnn_fused_lstm_cell_backward_impl
    assert taken(of_gru.default, meta(4096, 1024), meta(4096, 5 * 1024), True) == SUMS[0][-1]
    state = meta(4096, 768)
    assert taken(of_lstm.default, state, state, state, state, meta(4096, 3072), True) == SUMS[0][-1]
    assert taken(of_lstm.default, state, state, state, state, meta(4096, 3072), False) == []
