"""The module: made from a frozen layer, moved, saved, loaded and trained."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from oomph.errors import ArgumentError
from oomph.nn.modulated import ModulatedLinear

# torch itself says so, once, on processors without bfloat16 products.
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")


class Conv1D(nn.Module):
    """As GPT-2 has it: y = x W + b with W [in, out]."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf))
        self.bias = nn.Parameter(torch.randn(nf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


LAYERS = [lambda: nn.Linear(7, 11), lambda: nn.Linear(7, 11, bias=False), lambda: Conv1D(11, 7)]


@pytest.mark.parametrize("make", LAYERS)
def test_a_new_layer_gives_what_the_layer_it_came_from_gives(make) -> None:
    layer = make()
    module = ModulatedLinear.from_linear(layer, rank=3)
    h, mod = torch.randn(2, 5, 7), torch.randn(2, 5, 3)
    torch.testing.assert_close(module(h, mod), layer(h))
    assert module.weight.data_ptr() == layer.weight.data_ptr()  # shared, not copied
    assert all(each.requires_grad for each in layer.parameters())  # and the layer is as it was
    assert [name for name, each in module.named_parameters() if each.requires_grad] == ["A", "B"]


def test_gpt2s_own_layer_is_known() -> None:
    layer = pytest.importorskip("transformers.pytorch_utils").Conv1D(11, 7)
    module = ModulatedLinear.from_linear(layer, rank=2)
    h = torch.randn(4, 7)
    torch.testing.assert_close(module(h, torch.randn(4, 2)), layer(h))


def test_only_a_and_b_and_the_modulation_are_trained() -> None:
    module = ModulatedLinear.from_linear(nn.Linear(7, 11), rank=3)
    nn.init.normal_(module.B)
    mod = torch.randn(5, 3, requires_grad=True)
    module(torch.randn(5, 7), mod).square().sum().backward()
    assert module.weight.grad is None
    assert module.bias.grad is None
    assert module.A.grad.any()
    assert module.B.grad.any()
    assert mod.grad.any()


@pytest.mark.parametrize("make", LAYERS)
def test_in_8_bits_the_output_is_near_and_the_weight_takes_a_byte_per_number(make) -> None:
    layer = make()
    module = ModulatedLinear.from_linear(layer, rank=3, eight_bit=True)
    h = torch.randn(50, 7)
    error = (module(h, torch.randn(50, 3)) - layer(h)).norm() / layer(h).norm()
    assert error < 0.01
    assert module.weight is None
    assert module.weight_values.dtype == torch.int8
    assert module.A.dtype == layer.weight.dtype


@pytest.mark.parametrize("eight_bit", [False, True])
def test_it_survives_saving_and_loading(eight_bit: bool) -> None:
    one = ModulatedLinear.from_linear(nn.Linear(7, 11), rank=3, eight_bit=eight_bit)
    nn.init.normal_(one.B)
    two = ModulatedLinear.from_linear(nn.Linear(7, 11), rank=3, eight_bit=eight_bit)
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    h, mod = torch.randn(5, 7), torch.randn(5, 3)
    assert torch.equal(one(h, mod), two(h, mod))
    assert torch.equal(one(h, mod), copy.deepcopy(one)(h, mod))
    weight = {"weight_values", "weight_scale"} if eight_bit else {"weight"}
    assert set(one.state_dict()) == {*weight, "bias", "A", "B"}


def test_moving_to_bfloat16_keeps_the_scales_exact() -> None:
    module = ModulatedLinear.from_linear(nn.Linear(7, 11), rank=3, eight_bit=True)
    scale, values = module.weight_scale.clone(), module.weight_values.clone()
    module.to(torch.bfloat16)
    assert module.A.dtype == torch.bfloat16
    assert torch.equal(module.weight_scale, scale)
    assert torch.equal(module.weight_values, values)
    y = module(torch.randn(5, 7, dtype=torch.bfloat16), torch.randn(5, 3, dtype=torch.bfloat16))
    assert y.dtype == torch.bfloat16


def test_it_can_leave_the_meta_device() -> None:
    module = ModulatedLinear.from_linear(nn.Linear(7, 11), rank=3, eight_bit=True).to("meta")
    assert module.weight_scale.is_meta
    module.to_empty(device="cpu")
    assert module.weight_scale.dtype == torch.float32
    assert module.weight_scale.device.type == "cpu"


def test_it_can_be_made_in_8_bits_on_the_meta_device() -> None:
    made = ModulatedLinear.from_linear(nn.Linear(6, 8, device="meta"), 2, eight_bit=True)
    assert made.weight_values is not None
    assert made.weight_values.is_meta


def test_the_deltas_and_their_norms_are_those_of_its_own_factors() -> None:
    module = ModulatedLinear.from_linear(nn.Linear(7, 11), rank=3)
    nn.init.normal_(module.B)
    mod = torch.randn(2, 5, 3)
    delta = module.compute_weight_delta(mod, token_idx=4)
    assert delta.shape == (2, 7, 11)
    torch.testing.assert_close(module.weight_delta_norm(mod)[:, 4], delta.flatten(1).norm(dim=1))
    torch.testing.assert_close(
        module.weight_delta_norm(mod, squared=True)[:, 4], delta.square().sum((1, 2)), rtol=1e-5, atol=1e-5
    )


def test_it_says_what_it_is() -> None:
    module = ModulatedLinear.from_linear(nn.Linear(7, 11), rank=3, eight_bit=True)
    expected = "ModulatedLinear(in_features=7, out_features=11, rank=3, bias=True, base=8-bit)"
    assert repr(module) == expected


def test_what_is_no_linear_layer_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"ReLU has no weight matrix; valid: nn.Linear, GPT-2's Conv1D"):
        ModulatedLinear.from_linear(nn.ReLU(), rank=3)
    with pytest.raises(ArgumentError, match=r"Embedding is not known; valid: nn.Linear, GPT-2's Conv1D"):
        ModulatedLinear.from_linear(nn.Embedding(7, 11), rank=3)
    with pytest.raises(ArgumentError, match="rank=0 is not valid; give a whole number >= 1"):
        ModulatedLinear.from_linear(nn.Linear(7, 11), rank=0)
