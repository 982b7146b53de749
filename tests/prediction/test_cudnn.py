"""cuDNN's convolutions and recurrent networks, against figures measured on an H200."""

import contextlib
import csv
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from benchmarks import RESULTS
from benchmarks.accuracy.kernels import PASSES, convolution_calls
from benchmarks.rows import stored
from torch import nn
from torch.nn.utils.rnn import pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import oomph
from oomph import gpus
from oomph.integrations.pytest_plugin import PredictedPeak
from oomph.parallel import Parallel
from oomph.prediction.child import trace
from oomph.prediction.convolution import cudnn
from oomph.prediction.ops.composites import cuda_composites
from oomph.prediction.ops.recurrent import flatten_parameters
from oomph.prediction.ops.registry import temporaries_of
from oomph.prediction.ops.rules import NEXT_RESULT, RuleContext, RuleGuard, Search
from oomph.records import CUDNN_SEARCH
from oomph.torch_internals import FakeTensor, FakeTensorMode, TorchDispatchMode, disable_dispatch_modes
from oomph.units import MiB

aten = torch.ops.aten
H200 = gpus.find("h200")
BF16, F16 = torch.bfloat16, torch.float16
NHWC = torch.channels_last
DROPOUT_STATE = 6488064
COUNTS = torch.tensor([3, 2, 1, 1])  # live samples at each step of a packed sequence


def convolution(
    input,
    weight,
    stride=1,
    padding=0,
    *,
    dtype=torch.float32,
    transposed=False,
    dilation=1,
    groups=1,
    format=torch.contiguous_format,
    backward=None,
    grad_format=None,
    gpu=H200,
):
    """The temporaries of a convolution, or of its backward pass, without the places of its results."""
    dims = len(input) - 2
    geometry = ([stride] * dims, [padding] * dims, [dilation] * dims, transposed, [0] * dims, groups)
    with FakeTensorMode():
        x = torch.empty(input, dtype=dtype).to(memory_format=format)
        w = torch.empty(weight, dtype=dtype).to(memory_format=format)
        op, args = aten.convolution.default, (x, w, None, *geometry)
        if backward is not None:
            out = op(*args).contiguous(memory_format=grad_format or format)
            op, args = aten.convolution_backward.default, (out, *args, backward)
        return [size for size in temporaries_of(op, args, {}, gpu) if size is not None]


def weight_gradient(*args, **options):
    return sum(size for size in convolution(*args, **options, backward=(False, True, False)) if size > 0)


@pytest.mark.parametrize(
    ("measured", "input", "weight", "options"),
    [
        (102908051, (64, 64, 56, 56), (64, 64, 3, 3), {"padding": 1}),
        (129040531, (64, 128, 56, 56), (128, 128, 3, 3), {"padding": 1, "stride": 2}),
        (154140819, (64, 512, 28, 28), (1024, 512, 1, 1), {"stride": 2}),
        (100794384, (16, 128, 64, 64), (128, 64, 2, 2), {"stride": 2, "transposed": True}),
        (13140115, (8, 256, 28, 28), (256, 32, 3, 3), {"padding": 1, "groups": 8}),
        (44912787, (8, 80, 3000), (384, 80, 3), {"padding": 1}),
        (51454099, (64, 64, 56, 56), (64, 64, 3, 3), {"padding": 1, "dtype": BF16}),
        (38585360, (16, 3, 224, 224), (64, 3, 7, 7), {"padding": 3, "stride": 2, "dtype": BF16}),
        (2106384, (8, 64, 128, 128), (3, 64, 3, 3), {"padding": 1, "dtype": BF16, "format": NHWC}),
    ],
)
def test_a_forward_pass_copies_what_tensor_cores_cannot_read_as_it_is(measured, input, weight, options):
    assert sum(convolution(input, weight, **options)) == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize(
    ("input", "weight", "options"),
    [
        ((64, 64, 56, 56), (256, 64, 1, 1), {}),
        ((16, 64, 56, 56), (64, 64, 3, 3), {"padding": 1, "format": NHWC}),
        ((8, 96, 56, 56), (96, 1, 7, 7), {"padding": 3, "groups": 96}),
    ],
)
def test_matrix_products_channels_last_and_depthwise_convolutions_need_no_copies(input, weight, options):
    assert sum(convolution(input, weight, **options)) <= 1


def test_the_backward_pass_frees_one_workspace_before_it_takes_the_next():
    data, freed, weight, _ = convolution(
        (64, 128, 28, 28), (128, 128, 3, 3), padding=1, backward=(True, True, False)
    )
    assert freed == -data
    assert data == pytest.approx(51970195, rel=0.01)
    assert weight == pytest.approx(60228263, rel=0.02)


@pytest.mark.parametrize(
    ("measured", "input", "weight", "options"),
    [
        (85459503, (64, 1024, 14, 14), (512, 1024, 1, 1), {}),
        (1048576, (16, 64, 56, 56), (256, 64, 1, 1), {"dtype": BF16}),
        (50332048, (128, 192, 2048), (512, 192, 1), {}),
        (105743135, (128, 64, 32, 32), (128, 64, 5, 5), {"padding": 2}),
        (59769511, (128, 128, 16, 16), (256, 128, 3, 3), {"padding": 1}),
    ],
)
def test_a_weight_gradient_also_holds_padded_channels_and_partial_sums(measured, input, weight, options):
    assert weight_gradient(input, weight, **options) == pytest.approx(measured, rel=0.02)


FORWARD, DATA, WEIGHT = None, (True, False, False), (False, True, False)


@pytest.mark.parametrize(
    ("algorithm", "measured", "input", "weight", "backward", "options"),
    [
        ("fourier", 1042513920, (512, 640, 4, 4), (192, 640, 3, 3), FORWARD, {"padding": 1}),
        ("fourier", 135277920, (32, 3, 32, 128), (8, 3, 11, 11), FORWARD, {"padding": 5, "dtype": F16}),
        ("fourier", 36834320, (128, 8, 16, 10), (96, 8, 1, 1), FORWARD, {"format": NHWC}),
        ("fourier", 157066112, (2, 128, 87, 61), (1024, 4, 1, 1), FORWARD, {"groups": 32}),
        ("fourier", 196083712, (128, 256, 10, 14), (32, 256, 7, 7), DATA, {"padding": 3}),
        ("fourier", 92700688, (32, 128, 14, 14), (96, 128, 7, 7), DATA, {"padding": 3, "format": NHWC}),
        ("fourier", 2202009600, (960, 32, 32, 32), (32, 32, 3, 3), WEIGHT, {"padding": 1}),
        ("fourier", 3476029504, (128, 640, 32), (160, 160, 11), WEIGHT, {"padding": 5, "groups": 4}),
        ("winograd", 470016, (2, 24, 11, 7), (8, 24, 3, 3), FORWARD, {"padding": 1, "dtype": BF16}),
        ("winograd", 2469888, (4, 256, 2, 4), (48, 256, 3, 3), DATA, {"padding": 1, "dtype": BF16}),
        ("winograd", 2778624, (8, 96, 6, 48), (3, 96, 3, 3), WEIGHT, {"padding": 1}),
        ("winograd", 160942080, (8, 768, 24, 48), (16, 768, 5, 5), WEIGHT, {"padding": 2}),
        ("winograd", 95825936, (256, 320, 8, 8), (40, 320, 5, 5), WEIGHT, {"padding": 2, "format": NHWC}),
        (
            "winograd",
            12508800,
            (50, 96, 13, 21),
            (96, 3, 5, 5),
            DATA,
            {"padding": 2, "groups": 32, "dtype": BF16},
        ),
        ("product", 0, (16, 512, 24, 3), (512, 512, 1, 1), FORWARD, {}),
        ("product", 16777216, (16, 512, 24, 3), (512, 512, 1, 1), WEIGHT, {}),
        (
            "direct",
            0,
            (8, 1024, 14, 14),
            (1024, 1, 3, 3),
            WEIGHT,
            {"padding": 1, "groups": 1024, "dtype": F16},
        ),
        (
            "direct",
            204800,
            (8, 24, 28, 28),
            (24, 1, 5, 5),
            WEIGHT,
            {"padding": 2, "stride": 2, "groups": 24, "dtype": BF16, "format": NHWC},
        ),
    ],
)
def test_an_algorithm_that_cudnn_leaves_out_without_a_gpu_takes_what_was_measured(
    monkeypatch, algorithm, measured, input, weight, backward, options
):
    monkeypatch.setattr(cudnn, "workspace", lambda *_: algorithm)
    assert (
        sum(size for size in convolution(input, weight, backward=backward, **options) if size > 0) == measured
    )


@pytest.mark.parametrize(
    ("measured", "kind", "input", "weight", "output", "dtype", "tile", "cluster"),
    [
        (128, "weight", (64, 96, 131, 131), (96, 96, 4, 4), (128, 128), torch.float32, (128, 128), (1, 1)),
        (132, "weight", (100, 256, 8, 8), (512, 256, 3, 3), (8, 8), torch.float32, (128, 64), (1, 2)),
        (108, "weight", (32, 256, 56, 56), (1, 256, 5, 5), (56, 56), BF16, (64, 256), (1, 3)),
        (40, "data", (2, 24, 8, 8), (512, 24, 3, 3), (8, 8), torch.float32, (128, 64), (5, 1)),
        (0, "weight", (8, 512, 7, 7), (512, 512, 3, 3), (7, 7), torch.float32, (128, 128), (1, 1)),
    ],
)
def test_sums_are_split_into_as_many_parts_as_all_multiprocessors_compute_at_a_time(
    measured, kind, input, weight, output, dtype, tile, cluster
):
    ones = (1, 1)
    output = (input[0], weight[0], *output)
    one = cudnn.ConvolutionPass(kind, input, weight, output, ones, ones, ones, dtype, False, False, True)
    assert cudnn.parts_of_sums(one, tile, cluster, H200.multiprocessors) == measured


def test_engines_that_need_a_gpu_are_read_from_the_log():
    config = '    engineConfig: type=json; val={"engineId":%d,"smVersion":900,"knobChoices":{}};'
    reason = "    Warning: CUDNN_STATUS_NOT_SUPPORTED; Reason: "
    log = [
        "CuDNN (v91900 56) function engine_config_support_checks() called:",
        *(config % 18, reason + "core_engine.getStatus()", reason + "status"),
        *(config % 16, reason + "this->libcuda == nullptr", reason + "status"),
    ]
    assert list(cudnn.left_out(log)) == [(18, False), (16, True)]
    assert list(cudnn.left_out(log[:1])) == []


def plain_pass(kind, image, kernel, channels=64, padding=None, **options):
    batch, outputs = 8, 32
    padding = (kernel[0] // 2,) * len(image) if padding is None else padding
    given = {"stride": (1,) * len(image), "dilation": (1,) * len(image), "dtype": torch.float32}
    given |= {"channels_last": False, "deterministic": False, "tf32": True} | options
    weight = (outputs, channels // options.pop("groups", 1), *kernel)
    given.pop("groups", None)
    shapes = (batch, channels, *image), weight, (batch, outputs, *image)
    return cudnn.ConvolutionPass(kind, *shapes, padding=padding, **given)


@pytest.mark.parametrize(
    ("algorithm", "expected", "conv_pass"),
    [  # as the card's lists had them, or not
        ("fourier", True, plain_pass("forward", (28, 28), (3, 3))),
        ("fourier", True, plain_pass("forward", (100,), (3,))),
        ("fourier", True, plain_pass("forward", (28, 28), (3, 3), dtype=F16)),
        ("fourier", False, plain_pass("forward", (28, 28), (3, 3), dtype=BF16)),
        ("fourier", False, plain_pass("forward", (256, 256), (3, 3))),
        ("fourier", False, plain_pass("forward", (28, 28), (3, 3), stride=(2, 2))),
        ("fourier", False, plain_pass("forward", (28, 28), (3, 3), dilation=(2, 2))),
        ("fourier", False, plain_pass("forward", (8, 8, 8), (3, 3, 3))),
        ("fourier", True, plain_pass("data", (28, 28), (3, 3), stride=(2, 2))),
        ("fourier", False, plain_pass("data", (100,), (3,))),
        ("fourier", False, plain_pass("data", (28, 28), (1, 3), padding=(0, 1))),
        ("fourier", True, plain_pass("weight", (6, 3), (5, 5))),
        ("fourier", False, plain_pass("weight", (3, 80), (7, 7))),
        ("winograd", True, plain_pass("weight", (28, 28), (5, 5), dtype=BF16)),
        ("winograd", False, plain_pass("weight", (28, 28), (7, 7))),
        ("winograd", False, plain_pass("weight", (28, 28), (3, 3), stride=(2, 2))),
        ("winograd", False, plain_pass("forward", (28, 28), (3, 3), channels_last=True)),
        ("product", True, plain_pass("forward", (28, 28), (1, 1))),
        ("product", False, plain_pass("forward", (28, 28), (1, 1), stride=(2, 2))),
        ("product", False, plain_pass("forward", (28, 28), (1, 1), groups=4)),
        ("product", False, plain_pass("forward", (28, 28), (1, 1), tf32=False)),
        ("product", True, plain_pass("forward", (28, 28), (1, 1), tf32=False, dtype=BF16)),
    ],
)
def test_the_card_has_what_cudnn_leaves_out_for_these_convolutions(algorithm, expected, conv_pass):
    assert cudnn.has(algorithm, conv_pass) is expected


def test_depthwise_convolutions_that_torch_computes_itself_take_no_workspace(monkeypatch):
    monkeypatch.setattr(cudnn, "workspace", lambda *_: 4096)
    depthwise = partial(convolution, (8, 64, 28, 28), (64, 1, 3, 3), padding=1, groups=64)
    assert depthwise() == depthwise(dtype=BF16) == []
    assert depthwise(format=NHWC) == depthwise(dtype=F16) == [4096]
    assert convolution((8, 64, 6, 6), (64, 1, 3, 3), padding=1, groups=64, dtype=F16) == []


def test_what_convolutions_may_take_without_cudnn_holds_most_that_were_measured(monkeypatch):
    monkeypatch.setattr(cudnn, "workspace", lambda *_: None)
    held = []
    for row in stored(RESULTS / "convolutions_any_h200.csv")[::10]:
        with FakeTensorMode():
            calls = convolution_calls(row, "cpu")
        for name, (op, args) in zip(PASSES, calls, strict=True):
            sizes = [size for size in temporaries_of(op, args, {}, H200) if size is not None and size > 0]
            most = sum(getattr(size, "most", size) for size in sizes)
            held.append(int(row[name]) <= 1.01 * most + 0.1 * MiB)
    assert len(held) == 450
    assert sum(held) >= 0.85 * len(held)


@pytest.fixture
def benchmark():
    """torch.backends.cudnn.benchmark is on."""
    torch.backends.cudnn.benchmark = True
    yield
    torch.backends.cudnn.benchmark = False


# The workspaces of cuDNN's Fourier transforms on an H200, as its plans give them (cuDNN 9.19).
@pytest.mark.parametrize(
    ("forward", "data", "weight", "input", "kernel", "options"),
    [
        (2351955968, 1194328064, 2292539392, (12, 512, 24, 24), (512, 4), {}),
        (3787493376, 111411200, 6933184512, (192, 32, 160, 112), (32, 3), {"padding": 1}),
        (1652818704, None, None, (64, 1, 80, 80), (194, 1), {}),
        (5479084048, 846999568, 5066219536, (16, 768, 32, 32), (192, 4), {"padding": 1, "format": NHWC}),
        (None, 1653129232, None, (96, 192, 112, 112), (16, 4), {"padding": 1, "stride": 2}),
        (None, 769978384, None, (10, 192, 65, 65), (192, 4), {"padding": 2, "stride": 2}),
    ],
)
def test_a_search_for_algorithms_takes_the_workspace_of_fourier_transforms(
    benchmark, forward, data, weight, input, kernel, options
):
    channels, width = kernel
    shape = (channels, input[1], width, width)
    masks = (None, (True, False, False), (False, True, False))
    for measured, mask in zip((forward, data, weight), masks, strict=True):
        found = convolution(input, shape, **options, backward=mask)
        (search,) = (size for size in found if isinstance(size, Search))
        assert measured is None or measured in search.workspaces


@pytest.mark.parametrize("options", [{"dtype": BF16}, {"dilation": 2}, {"groups": 2}])
def test_half_precision_dilation_and_groups_are_searched_without_fourier_transforms(benchmark, options):
    shape = (64, 128 // options.get("groups", 1), 3, 3)
    (search, *_) = convolution((100, 128, 32, 32), shape, padding=1, **options)
    assert max(search.workspaces) < 2 * 100 * (128 + 64) * 32 * 32 * 4


def searching_step():
    torch.backends.cudnn.benchmark = True
    layers = nn.Sequential(*(nn.Conv2d(64, 64, 3, padding=1) for _ in range(6))).cuda()
    for _ in range(3):
        layers(torch.empty(8, 64, 32, 32, device="cuda")).sum().backward()


def test_the_peak_contains_the_search_and_the_verdict_does_not():
    plain = oomph.predict(searching_step, gpu="h200", search=False)
    found = oomph.predict(searching_step, gpu="h200")
    searches = [one for one in found.allocations if one.op == CUDNN_SEARCH]
    assert len(searches) == 3  # six layers are alike: one search for each pass
    assert found.peak.allocated > max(one.bytes for one in searches) > plain.peak.allocated
    assert found.needed.allocated == plain.peak.allocated
    assert any("cudnn.benchmark" in note.text for note in found.notes)
    limited = oomph.predict(searching_step, gpu="h200", max=plain.peak.reserved + plain.margin)
    assert limited.verdict == "fits"


def test_autograds_thread_searches_again():
    """torch keeps what a search has found by thread (native/cudnn/Conv_v8.cpp)."""

    def step():
        torch.backends.cudnn.benchmark = True
        layer = nn.Conv2d(64, 64, 3, padding=1).cuda()
        x = torch.randn(8, 64, 32, 32, device="cuda", requires_grad=True)
        checkpoint(lambda x: layer(x).relu(), layer(x), use_reentrant=False).sum().backward()

    searches = [one for one in oomph.predict(step, gpu="h200").allocations if one.op == CUDNN_SEARCH]
    assert len(searches) == 4  # forward; forward again, and two gradients


def test_a_search_takes_only_what_is_free():
    limit = oomph.predict(searching_step, gpu="h200", search=False).peak.reserved + 64 * MiB
    found = oomph.predict(searching_step, gpu="h200", max=limit)
    assert found.needed.allocated < found.peak.allocated <= limit


def test_ranks_sizes_that_depend_on_values_and_tests_of_memory_count_what_is_needed():
    def loss(model, batch):
        torch.backends.cudnn.benchmark = True
        out = model(batch)
        return out[out > 0].sum()

    workload = oomph.Workload(
        model=lambda: nn.Conv2d(64, 64, 3, padding=1),
        batch=lambda device: torch.randn(8, 64, 32, 32, device=device),
        loss=loss,
        parallel=Parallel(2),
    )
    found = oomph.predict(workload, gpu="h200")
    assert found.needed.reserved < found.peak.reserved
    assert found.needed.device - found.needed.reserved == found.peak.device - found.peak.reserved
    assert found.interval.low.reserved <= found.needed.reserved <= found.interval.high.reserved
    assert found.interval.high.reserved >= found.peak.reserved
    assert PredictedPeak(found) == found.needed.device


@pytest.mark.parametrize(
    ("input", "weight", "dtype"),
    [((0, 3, 8, 8), (4, 3, 3, 3), torch.float32), ((4, 0, 8, 8), (4, 0, 3, 3), BF16)],
)
def test_an_empty_convolution_takes_nothing(input, weight, dtype):
    assert not any(convolution(input, weight, dtype=dtype))
    assert weight_gradient(input, weight, dtype=dtype) == 0


def test_a_data_gradient_copies_what_tensor_cores_cannot_read_as_it_is():
    sizes = convolution(
        (16, 256, 56, 56), (128, 256, 3, 3), padding=1, stride=2, backward=(True, False, False)
    )
    assert sum(size for size in sizes if size > 0) == pytest.approx(58982547, rel=0.02)


def test_a_gradient_in_another_layout_is_copied_first():
    sizes = convolution(
        (8, 64, 32, 32), (64, 64, 3, 3), padding=1, backward=(True, True, False), grad_format=NHWC
    )
    assert sizes[0] == 8 * 64 * 32 * 32 * 4


def test_a_weight_in_channels_last_makes_the_convolution_copy_its_input_to_that_layout():
    with FakeTensorMode():
        x = torch.empty(16, 64, 56, 56)
        w = torch.empty(64, 64, 3, 3).to(memory_format=NHWC)
        args = (x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        assert temporaries_of(aten.convolution.default, args, {}, H200)[:2] == [x.nbytes, NEXT_RESULT]


class Bytes(TorchDispatchMode):
    """Sizes of the byte buffers made while it is on: cuDNN's workspaces and reserves."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is aten.new_empty.default and out.dtype == torch.uint8:
            self.sizes.append(out.numel())
        return out


def is_fake(tensor):
    return isinstance(tensor, FakeTensor)


def nothing(*args, **kwargs):
    return None


@contextlib.contextmanager
def on_fake_gpu():
    """Fake tensors count as the GPU's."""
    found = Bytes()

    def workspace(size, op):
        found.sizes.append(size)
        return contextlib.nullcontext()

    calls = nothing, workspace, nothing, nothing
    context = RuleContext(H200, is_fake, RuleGuard(nothing), *calls, held=[], compiling=nothing)
    with cuda_composites(context), FakeTensorMode(), found:
        yield found


def flattened(module):
    flatten_parameters(is_fake)(module)
    return module


@pytest.mark.parametrize(
    ("build", "workspace", "reserve"),
    [
        (lambda: nn.LSTM(512, 512), 67830272, 41943296),
        (lambda: nn.LSTM(512, 512, 2, bidirectional=True), 204472832, 184549632),
        (lambda: nn.LSTM(512, 512, proj_size=128), 66880000, 52429056),
        (lambda: nn.LSTM(512, 512, dtype=BF16), 38109696, 20971776),
        (lambda: nn.GRU(512, 512, 2), 73531904, 109052160),
        (lambda: nn.RNN(512, 512), 61145600, 8388864),
    ],
)
def test_a_recurrent_network_takes_a_workspace_and_keeps_a_reserve(build, workspace, reserve):
    with on_fake_gpu() as found:
        module = flattened(build())
        module(torch.empty(128, 32, 512, dtype=next(module.parameters()).dtype))
    assert found.sizes == [pytest.approx(workspace, rel=0.01), reserve]


def test_workspaces_of_recurrent_networks_are_those_measured():
    with (RESULTS / "recurrent_h200.csv").open() as file:
        measured = [row for row in csv.DictReader(file) if row["packed"] == row["projection"] == "0"]
    with on_fake_gpu() as found:
        for row in measured[::250]:
            names = ("steps", "batch", "inputs", "hidden", "layers")
            steps, batch, inputs, hidden, layers = (int(row[name]) for name in names)
            module = getattr(nn, row["cell"])(
                inputs,
                hidden,
                layers,
                dropout=0.2 * int(row["dropout"]),
                bidirectional=row["directions"] == "2",
                dtype=getattr(torch, row["dtype"]),
            )
            flattened(module).train(row["train"] == "1")
            found.sizes.clear()
            output = module(torch.empty(steps, batch, inputs, dtype=module.weight_ih_l0.dtype))[0]
            if module.training:
                output.sum().backward()
            workspace, *rest = (size for size in found.sizes if size != DROPOUT_STATE)
            assert workspace == pytest.approx(int(row["forward"]), rel=0.001), row
            assert rest[1:] == [pytest.approx(int(row["backward"]), rel=0.001)] * 2 * module.training, row


def test_the_backward_pass_takes_the_workspace_twice_and_makes_one_flat_gradient():
    with on_fake_gpu() as found:
        module = flattened(nn.LSTM(512, 512, 2, batch_first=True))
        module(torch.empty(32, 128, 512))[0].sum().backward()
        gradients = [weight.grad for weight in module.parameters()]
    workspace, _, *behind = found.sizes
    assert behind == [workspace, workspace]
    assert len({gradient.untyped_storage()._cdata for gradient in gradients if gradient is not None}) == 1
    assert all(weight.shape == weight.grad.shape for weight in module.parameters() if weight.grad is not None)


def test_the_state_of_dropout_is_made_once():
    with on_fake_gpu() as found:
        module = flattened(nn.LSTM(512, 512, 2, dropout=0.1))
        for _ in range(2):
            module(torch.empty(128, 32, 512))
    assert found.sizes.count(DROPOUT_STATE) == 1
    assert found.sizes.count(92537088) == 2  # the reserve, with one bit for each output that may be dropped


def test_flattened_weights_are_views_of_one_buffer():
    with on_fake_gpu():
        module = flattened(nn.LSTM(64, 64, 2))
        assert len({weight.untyped_storage()._cdata for weight in module.parameters()}) == 1


def test_a_packed_sequence_is_padded_again_to_its_lengths():
    with on_fake_gpu():
        data = torch.empty(7, 8)
        padded, lengths = aten._pad_packed_sequence.default(data, COUNTS, True, 0.0, -1)
    assert padded.shape == (3, 4, 8)
    assert lengths.tolist() == [4, 2, 1]


def test_real_tensors_go_the_way_they_always_went():
    with on_fake_gpu(), disable_dispatch_modes():
        module = nn.LSTM(4, 4)
        output, _ = module(nn.utils.rnn.pack_sequence([torch.ones(3, 4), torch.ones(2, 4)]))
        padded, lengths = pad_packed_sequence(output)
        padded.sum().backward()
    assert lengths.tolist() == [3, 2]
    assert module.weight_ih_l0.grad is not None


@pytest.fixture(params=["oneDNN off", "several threads"])
def host(request):
    """torch turns oneDNN off by itself, for good, when a half-precision product fails on the processor."""
    enabled, threads = torch.backends.mkldnn.enabled, torch.get_num_threads()
    torch._C._set_mkldnn_enabled(request.param != "oneDNN off")
    torch.set_num_threads(3 if request.param == "several threads" else threads)
    FakeTensorMode.cache_clear()  # or torch gives the answer it gave in another state
    yield request.param
    torch._C._set_mkldnn_enabled(enabled)
    torch.set_num_threads(threads)


def layouts(layer, shape, dtype):
    """Whether the result and the gradients of input and weight are in channels last."""
    found = []
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(len(shape), torch.contiguous_format)

    def program():
        x = torch.randn(shape, device="cuda", dtype=dtype).to(memory_format=last).requires_grad_()
        module = layer().to("cuda", dtype)
        out = module(x)
        gradients = torch.autograd.grad(out.sum(), [x, *module.parameters()])
        found.extend(t.is_contiguous(memory_format=last) for t in (out, *gradients) if t.dim() == len(shape))

    # In this process, since the fixture's number of threads is not that of an isolated program.
    trace(program, H200, nothing)
    return found


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (lambda: nn.Conv2d(8, 16, 3, padding=1), (16, 8, 12, 12)),
        (lambda: nn.Conv2d(8, 16, 1), (1, 8, 12, 12)),
        (lambda: nn.Conv2d(8, 8, 7, padding=3, groups=8), (16, 8, 12, 12)),
        (lambda: nn.Conv2d(8, 16, 3, dilation=2, groups=2), (16, 8, 12, 12)),
        (lambda: nn.ConvTranspose2d(8, 16, 2, stride=2), (16, 8, 12, 12)),
        (lambda: nn.Conv3d(4, 8, 3), (2, 4, 6, 6, 6)),
        (lambda: nn.ConvTranspose3d(4, 8, 2), (2, 4, 6, 6, 6)),
    ],
)
def test_a_convolution_of_channels_last_stays_channels_last_whatever_the_host_would_do(host, layer, shape):
    assert layouts(layer, shape, torch.bfloat16) == [True, True, True]


def test_a_convolution_in_float64_is_contiguous_as_in_cudnn(host):
    assert layouts(lambda: nn.Conv2d(8, 16, 3), (2, 8, 12, 12), torch.float64) == [False, False, False]


def test_convolutions_without_cudnn_unfold_one_sample_and_multiply():
    """Measured: 220 MiB, with cuBLAS's workspaces of two threads; cuDNN's kernels need 228."""

    def target():
        convolution = torch.nn.Conv2d(64, 128, 3, padding=1).cuda()
        images = torch.randn(32, 64, 56, 56, device="cuda", requires_grad=True)

        def step():
            with torch.backends.cudnn.flags(enabled=False):
                out = convolution(images)
                out.backward(torch.ones_like(out))
            convolution.zero_grad()
            images.grad = None

        return step

    assert oomph.predict(target, gpu="h200").peak.allocated / 2**20 == pytest.approx(220, abs=0.5)


def convolution_step(dtype=None):
    return oomph.Workload(
        model=lambda: nn.Conv2d(16, 16, 3, padding=1),
        batch=lambda device: torch.empty(4, 16, 32, 32, device=device),
        loss=lambda model, x: model(x).sum(),
        autocast=dtype,
    )


def test_convolutions_under_torchs_newer_setting_of_their_precision():
    torch.backends.cudnn.allow_tf32 = False
    expected = oomph.predict(convolution_step(), gpu="h200").peak
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.conv.fp32_precision = "ieee"  # allow_tf32 raises from here on
    try:
        assert oomph.predict(convolution_step(), gpu="h200").peak == expected
        assert torch.backends.cudnn.conv.fp32_precision == "ieee"
    finally:
        torch.backends.cudnn.conv.fp32_precision = "tf32"


def test_a_card_without_bfloat16_emulates_it():
    assert oomph.predict(convolution_step("bfloat16"), gpu="t4").fits


HAS_CUDNN = bool(importlib.util.find_spec("nvidia")) and importlib.util.find_spec("nvidia.cudnn") is not None
GROUPED = """
import torch, oomph

def workload():
    model = lambda: torch.nn.Conv2d(216, 216, 3, padding=1, groups=9, bias=False)
    batch = lambda device: torch.empty(10, 216, 28, 28, device=device).to(memory_format=torch.channels_last)
    loss = lambda model, x: model(x).sum()
    return oomph.Workload(model=model, batch=batch, loss=loss, optimizer=torch.optim.SGD)
"""
SEARCHED = """
import torch, oomph

def workload():
    torch.backends.cudnn.benchmark = True
    model = lambda: torch.nn.Conv2d(192, 1024, 5, padding=2, bias=False)
    batch = lambda device: torch.empty(4, 192, 65, 65, device=device, dtype=torch.bfloat16)
    loss = lambda model, x: model(x).sum()
    return oomph.Workload(model=model, batch=batch, loss=loss, optimizer=torch.optim.SGD, dtype="bfloat16")
"""

ONE_LAYER = """
import torch, oomph

def workload():
    model = lambda: torch.nn.Conv2d({layer}, bias=False).to(memory_format={format})
    batch = lambda device: torch.empty({batch}, device=device, dtype={dtype}).to(memory_format={format})
    loss = lambda model, x: model(x).sum()
    dtype = str({dtype}).removeprefix("torch.")
    return oomph.Workload(model=model, batch=batch, loss=loss, optimizer=torch.optim.SGD, dtype=dtype)
"""
FORMATS = "torch.contiguous_format", "torch.channels_last"
TRANSFORMED = ONE_LAYER.format(
    layer="256, 32, 7, padding=3", batch="128, 256, 10, 14", dtype="torch.float32", format=FORMATS[0]
)
SPLIT = ONE_LAYER.format(
    layer="160, 256, 3, padding=1", batch="256, 160, 16, 16", dtype="torch.bfloat16", format=FORMATS[0]
)
DEPTHWISE = ONE_LAYER.format(
    layer="24, 24, 5, 2, 2, groups=24", batch="8, 24, 28, 28", dtype="torch.bfloat16", format=FORMATS[1]
)


@pytest.mark.skipif(not HAS_CUDNN, reason="cuDNN is not installed")
@pytest.mark.parametrize(
    ("step", "measured"),
    [
        *((GROUPED, 19132951), (SEARCHED, 581773312)),
        *((TRANSFORMED, 323158016), (SPLIT, 71778983), (DEPTHWISE, 204800)),
    ],
)
def test_workspaces_are_those_that_cudnn_states(tmp_path, step, measured):
    if step is not GROUPED and not importlib.metadata.version("nvidia-cudnn-cu13").startswith("9.19."):
        pytest.skip("measured with cuDNN 9.19; others list other algorithms")
    (tmp_path / "step.py").write_text(step)
    command = [sys.executable, "-m", "oomph", "predict", "step.py:workload", "--gpu", "h200", "--json"]
    environment = os.environ | {"OOMPH_CUDNN": "1"}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True)
    at_peak = json.loads(result.stdout)["at_peak"]
    largest = max(row["bytes"] for row in at_peak if row["kind"] == "workspace")
    assert largest == pytest.approx(measured, abs=1024)


@pytest.mark.skipif(not HAS_CUDNN, reason="cuDNN is not installed")
def test_the_process_that_is_asked_beside_a_gpu_gives_the_same_answers(tmp_path):
    both = """
import oomph
from oomph.prediction.convolution import cudnn

here = oomph.predict(workload, gpu="h200")
with cudnn.asked_without_gpu(always=True):
    there = oomph.predict(workload, gpu="h200")
assert [one.bytes for one in here.allocations] == [one.bytes for one in there.allocations]
assert here.interval is there.interval is None
assert max(one.bytes for one in there.allocations if one.kind == "workspace") > 19_000_000
"""
    (tmp_path / "both.py").write_text(GROUPED + both)
    subprocess.run(
        [sys.executable, "both.py"], cwd=tmp_path, env=os.environ | {"OOMPH_CUDNN": "1"}, check=True
    )


def test_the_process_that_is_asked_beside_a_gpu_answers():
    asked = """
from oomph import gpus
from oomph.prediction.convolution import cudnn

here = cudnn.version(gpus.find("h200"))
with cudnn.asked_without_gpu(always=True):
    print(cudnn.version(gpus.find("h200")) == here)
"""
    shown = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, timeout=60)
    assert shown.stdout == "True\n"


def test_a_list_of_workspaces_that_breaks_off_is_no_list(monkeypatch):
    def stated(conv_pass, gpu, in_order):
        yield 512
        raise cudnn._Error

    monkeypatch.setattr(cudnn, "_workspaces", stated)
    assert cudnn.workspace("a pass", "a GPU") == 512  # the first is all that it asks for
    assert cudnn.workspaces("a pass", "a GPU") == frozenset()
