"""What modulated_linear keeps for backward, what it skips for frozen inputs, and its peak in a prediction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from modulation_inputs import NAMES, inputs
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import oomph
from oomph.ops import choice
from oomph.ops.modulation import Int8Weight, modulated_linear, quantize_int8

MiB = 1 << 20


def saved_names(train: str, impl: str = "chunked") -> tuple[set[str], list[tuple[int, ...]]]:
    """The inputs kept for backward by name, and the shapes of what is kept beside them."""
    given = inputs(lead=(8,), d=6, f=9, r=2).copy(torch.float32, train)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        modulated_linear(*given.all(), impl=impl)
    places = {
        each.data_ptr(): name for name, each in zip(NAMES, given.all(), strict=True) if each is not None
    }
    names = {places[each.data_ptr()] for each in kept if each.data_ptr() in places}
    return names, [tuple(each.shape) for each in kept if each.data_ptr() not in places]


@pytest.mark.parametrize("impl", ["chunked", "triton"])
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
def test_only_what_the_wanted_gradients_need_is_kept(
    train: str, names: set[str], beside: list[tuple[int, ...]], impl: str
) -> None:
    assert saved_names(train, impl) == (names, beside)


class Products(TorchDispatchMode):
    """Counts matrix products by the shape of their result."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("mm", "addmm", "addmm_"):
            self.shapes.append(tuple(result.shape))
        return result


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
def test_backward_makes_the_products_of_the_wanted_gradients_and_no_other(
    train: str, shapes: list[tuple[int, ...]]
) -> None:
    given = inputs(lead=(8,), d=6, f=9, r=2).copy(torch.float32, train)
    total = modulated_linear(*given.all(), impl="chunked").sum()
    with Products() as products:
        total.backward()
    assert products.shapes == shapes
    assert set(given.gradients()) == set(train.split())


# -- in a prediction ---------------------------------------------------------------------------------

N, D, F, R = 32768, 512, 1024, 16


def predicted(
    forward: Callable[..., Tensor],
    eight_bit: bool = False,
    tokens: int = N,
    features: int = F,
    train_h: bool = True,
) -> oomph.Prediction:
    def train() -> Callable[[], None]:
        options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        h = torch.randn(tokens, D, requires_grad=train_h, **options)
        mod = torch.randn(tokens, R, requires_grad=True, **options)
        A = torch.randn(D, R, requires_grad=True, **options)
        B = torch.zeros(R, features, requires_grad=True, **options)
        base = torch.randn(features, D, **options).t()
        weight: Tensor | Int8Weight = quantize_int8(base) if eight_bit else base
        del base
        g = torch.randn(tokens, features, **options)
        return lambda: forward(h, weight, A, B, mod).backward(g)

    return oomph.predict(train, gpu="h200")


def bare(h: Tensor, weight: Tensor, *_: Tensor) -> Tensor:
    return h @ weight


@pytest.mark.parametrize("impl", ["auto", "chunked", "triton"])
def test_the_predicted_peak_is_that_of_the_bare_product_and_a_little(impl: str) -> None:
    def ours(*each: Any) -> Tensor:
        return modulated_linear(*each, impl=impl)

    small = (3 * N * R + 4 * D * R + 4 * F * R) * 4  # products of rank r, gradients of A, B and mod
    assert predicted(ours).peak.allocated <= predicted(bare).peak.allocated + small


def test_no_converted_copy_of_an_8_bit_weight_is_ever_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    from oomph.ops.modulation import weights

    monkeypatch.setattr(weights, "SLICE_BYTES", MiB // 4)
    given = predicted(modulated_linear, eight_bit=True, tokens=64, features=8192)
    whole = D * 8192
    large = [
        (each.dtype, each.bytes)
        for each in given.allocations
        if each.bytes >= whole and each.dtype != "uint8"
    ]
    # Beside cuBLAS workspaces (uint8): the weight that is quantised, before the step, and its int8 values.
    assert large == [("bfloat16", 2 * whole), ("int8", whole)]


@pytest.mark.parametrize("transposed", [True, False])
def test_rounding_to_8_bits_needs_one_slice_in_float32_at_a_time(transposed: bool) -> None:
    def rounding() -> Callable[[], None]:
        shape = (2048, 16384)
        weight = (
            torch.randn(shape[::-1], device="cuda").t() if transposed else torch.randn(shape, device="cuda")
        )
        return lambda: quantize_int8(weight) and None

    given = oomph.predict(rounding, gpu="h200")
    slices = [each for each in given.at_peak if each.bytes == 32 * MiB and each.allocation.dtype == "float32"]
    assert len(slices) == 1


def test_auto_takes_the_kernels_on_a_gpu_for_many_tokens_and_plain_torch_elsewhere() -> None:
    chosen: list[choice.Choice] = []

    def ours(*each: Any) -> Tensor:
        chosen.append(choice.explain(modulated_linear, *each))
        return modulated_linear(*each)

    def reason(**options: Any) -> str:
        predicted(ours, **options)
        assert chosen[-1].impl == "chunked"
        return chosen[-1].reason

    predicted(ours)
    assert chosen[-1].impl == "triton"
    assert reason(tokens=256) == "256 tokens: too few to fill a GPU with row blocks"
    assert reason(train_h=False).startswith("no gradient of h is made, whose room")
    assert reason(features=8192) == "the kernel's partial sums would take too much memory"
    on_cpu = choice.explain(modulated_linear, *inputs().all())
    assert on_cpu == choice.Choice("chunked", "the tensors are on cpu")
