"""Arguments, what is saved and computed, the predicted peak, the choice, and the module."""

import copy

import pytest
import torch
from checks import Products
from modulation_inputs import NAMES, inputs
from torch import nn

import oomph
from oomph.nn.modulated import ModulatedLinear
from oomph.ops.modulation import modulated_linear, quantize_int8

MiB = 1 << 20


def saved_names(train):
    """The inputs kept for backward by name, and the shapes of what is kept beside them."""
    given = inputs(lead=(8,), d=6, f=9, r=2).copy(torch.float32, train)
    kept = []

    def keep(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        modulated_linear(*given.all())
    places = {
        each.data_ptr(): name for name, each in zip(NAMES, given.all(), strict=True) if each is not None
    }
    names = {places[each.data_ptr()] for each in kept if each.data_ptr() in places}
    return names, [tuple(each.shape) for each in kept if each.data_ptr() not in places]


@pytest.mark.parametrize(
    ("train", "names", "beside"),
    [
        ("h A B mod", {"h", "weight", "A", "B", "mod"}, [(8, 2)]),
        ("A B mod", {"h", "A", "B", "mod"}, [(8, 2)]),
        ("h B mod", {"weight", "A", "B", "mod"}, [(8, 2)]),  # A and weight frozen: h is not needed
        ("h", {"weight", "A", "B", "mod"}, []),
        ("B", {"B", "mod"}, [(8, 2)]),
        ("mod", {"B", "mod"}, [(8, 2)]),
        ("bias", set(), []),
        ("weight", {"h", "weight"}, []),
    ],
)
def test_only_what_the_wanted_gradients_need_is_kept(train, names, beside):
    assert saved_names(train) == (names, beside)


@pytest.mark.parametrize(
    ("train", "shapes"),
    [
        ("h A B mod", [(8, 2), (9, 2), (6, 2), (8, 6), (8, 6)]),
        ("h", [(8, 2), (8, 6), (8, 6)]),
        ("A", [(8, 2), (6, 2)]),
        ("B", [(9, 2)]),
        ("mod", [(8, 2)]),
        ("bias", []),
        ("weight", [(6, 9)]),
    ],
)
def test_backward_makes_the_products_of_the_wanted_gradients_and_no_other(train, shapes):
    given = inputs(lead=(8,), d=6, f=9, r=2).copy(torch.float32, train)
    total = modulated_linear(*given.all()).sum()
    with Products() as products:
        total.backward()
    assert products.shapes == shapes
    assert set(given.gradients()) == set(train.split())


N, D, F, R = 32768, 512, 1024, 16


def predicted(forward, eight_bit=False, tokens=N, features=F):
    def train():
        options = {"device": "cuda", "dtype": torch.bfloat16}
        h = torch.randn(tokens, D, requires_grad=True, **options)
        mod = torch.randn(tokens, R, requires_grad=True, **options)
        A = torch.randn(D, R, requires_grad=True, **options)
        B = torch.zeros(R, features, requires_grad=True, **options)
        base = torch.randn(features, D, **options).t()
        weight = quantize_int8(base) if eight_bit else base
        del base
        g = torch.randn(tokens, features, **options)
        return lambda: forward(h, weight, A, B, mod).backward(g)

    return oomph.predict(train, gpu="h200")


def bare(h, weight, *_):
    return h @ weight


def test_the_predicted_peak_is_that_of_the_bare_product_and_a_little():
    small = (3 * N * R + 4 * D * R + 4 * F * R) * 4  # products of rank r, gradients of A, B and mod
    assert predicted(modulated_linear).peak.allocated <= predicted(bare).peak.allocated + small


def test_no_converted_copy_of_an_8_bit_weight_is_ever_allocated():
    given = predicted(modulated_linear, eight_bit=True, tokens=64, features=131072)
    whole = D * 131072  # 64 MiB in 8 bits; slices of 32 MiB are converted
    large = [
        (each.dtype, each.bytes)
        for each in given.allocations
        if each.bytes >= whole and each.dtype != "uint8"
    ]
    # Beside cuBLAS workspaces (uint8): the weight that is quantised, before the step, and its int8 values.
    assert large == [("bfloat16", 2 * whole), ("int8", whole)]


@pytest.mark.parametrize("transposed", [True, False])
def test_rounding_to_8_bits_needs_one_slice_in_float32_at_a_time(transposed):
    def rounding():
        shape = (2048, 16384)
        weight = (
            torch.randn(shape[::-1], device="cuda").t() if transposed else torch.randn(shape, device="cuda")
        )
        return lambda: quantize_int8(weight) and None

    given = oomph.predict(rounding, gpu="h200")
    slices = [each for each in given.at_peak if each.bytes == 32 * MiB and each.allocation.dtype == "float32"]
    assert len(slices) == 1


# torch itself says so, once, on processors without bfloat16 products.
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")


LAYERS = [
    lambda: nn.Linear(7, 11),
    lambda: nn.Linear(7, 11, bias=False),
    lambda: pytest.importorskip("transformers.pytorch_utils").Conv1D(11, 7),  # as GPT-2 has it
]


@pytest.mark.parametrize("eight_bit", [False, True])
@pytest.mark.parametrize("make", LAYERS)
def test_a_new_layer_gives_what_the_layer_it_came_from_gives(make, eight_bit):
    layer = make()
    module = ModulatedLinear.from_linear(layer, rank=3, eight_bit=eight_bit)
    h, mod = torch.randn(50, 7), torch.randn(50, 3)
    assert (module(h, mod) - layer(h)).norm() < (0.01 if eight_bit else 1e-6) * layer(h).norm()
    if eight_bit:
        assert module.weight is None
        assert module.weight_values.dtype == torch.int8
    else:
        assert module.weight.data_ptr() == layer.weight.data_ptr()  # shared, not copied
    assert all(each.requires_grad for each in layer.parameters())  # and the layer is as it was
    assert [name for name, each in module.named_parameters() if each.requires_grad] == ["A", "B"]
    assert module.A.dtype == layer.weight.dtype


@pytest.mark.parametrize("eight_bit", [False, True])
def test_it_survives_saving_and_loading(eight_bit):
    one = ModulatedLinear.from_linear(nn.Linear(7, 11), rank=3, eight_bit=eight_bit)
    nn.init.normal_(one.B)
    two = ModulatedLinear.from_linear(nn.Linear(7, 11), rank=3, eight_bit=eight_bit)
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    h, mod = torch.randn(5, 7), torch.randn(5, 3)
    assert torch.equal(one(h, mod), two(h, mod))
    assert torch.equal(one(h, mod), copy.deepcopy(one)(h, mod))
    weight = {"weight_values", "weight_scale"} if eight_bit else {"weight"}
    assert set(one.state_dict()) == {*weight, "bias", "A", "B"}


def test_moving_keeps_the_scales_exact():
    module = ModulatedLinear.from_linear(nn.Linear(7, 11), rank=3, eight_bit=True)
    scale, values = module.weight_scale.clone(), module.weight_values.clone()
    module.to(torch.bfloat16)
    assert module.A.dtype == torch.bfloat16
    assert torch.equal(module.weight_scale, scale)
    assert torch.equal(module.weight_values, values)
    y = module(torch.randn(5, 7, dtype=torch.bfloat16), torch.randn(5, 3, dtype=torch.bfloat16))
    assert y.dtype == torch.bfloat16
    assert module.to("meta").weight_scale.is_meta
    module.to_empty(device="cpu")
    assert module.weight_scale.dtype == torch.float32
    assert module.weight_scale.device.type == "cpu"
    made = ModulatedLinear.from_linear(nn.Linear(6, 8, device="meta"), 2, eight_bit=True)
    assert made.weight_values.is_meta
