"""What is computed, and what is not: matrix products are counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ce_cases import TINY, inputs, leaves
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from oomph.ops import linear_cross_entropy

# 37 tokens by 300 classes in the smallest blocks: five of rows by three of classes.
ROW_BLOCKS, CLASS_BLOCKS = 5, 3


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, op: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        self.count += op.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        return op(*arguments, **options or {})


def products(
    frozen: tuple[str, ...] = (), leading: int = 37, v: int = 300, backward: bool = True, **options: Any
) -> int:
    case = leaves(inputs(leading, v=v, bias=True))
    for name in frozen:
        getattr(case, name).requires_grad_(False)
    with Products() as counted:
        loss = linear_cross_entropy(case.x, case.weight, case.target, bias=case.bias, **options)
        if backward:
            loss.sum().backward()
    return counted.count


def test_in_one_block_of_classes_there_are_three_products_per_block_of_rows() -> None:
    assert products(impl="chunked") == 3
    assert products(impl="chunked", v=100, memory_budget=TINY) == 3 * ROW_BLOCKS


@pytest.mark.parametrize(
    ("frozen", "count"),
    [((), 3), (("x",), 2), (("weight",), 2), (("x", "weight"), 1), (("x", "weight", "bias"), 1)],
)
def test_frozen_inputs_skip_their_product(frozen: tuple[str, ...], count: int) -> None:
    backward = len(frozen) < 3
    assert products(frozen, impl="chunked", backward=backward) == count
    in_blocks = products(frozen, impl="chunked", v=100, memory_budget=TINY, backward=backward)
    assert in_blocks == count * ROW_BLOCKS


def test_in_blocks_of_classes_the_logits_are_computed_twice_but_for_the_last_block() -> None:
    logits = 2 * CLASS_BLOCKS - 1
    assert products(impl="chunked", memory_budget=TINY) == ROW_BLOCKS * (logits + 2 * CLASS_BLOCKS)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_without_gradients_there_is_one_product_per_block(reduction: str) -> None:
    with torch.no_grad():
        for budget, count in ((None, 1), (TINY, ROW_BLOCKS * CLASS_BLOCKS)):
            found = products(impl="chunked", memory_budget=budget, backward=False, reduction=reduction)
            assert found == count
    with torch.inference_mode():
        assert products(("x", "weight", "bias"), impl="chunked", backward=False) == 1


def test_losses_per_token_cost_one_product_more() -> None:
    assert products(impl="chunked", reduction="none") == 4


def test_frozen_inputs_get_no_gradient() -> None:
    for name in ("x", "weight"):
        case = leaves(inputs(20))
        getattr(case, name).requires_grad_(False)
        linear_cross_entropy(case.x, case.weight, case.target, impl="chunked").backward()
        assert getattr(case, name).grad is None


def test_where_nothing_requires_a_gradient_neither_does_the_loss() -> None:
    case = inputs(20)
    for impl in ("plain", "chunked"):
        assert not linear_cross_entropy(case.x, case.weight, case.target, impl=impl).requires_grad


class Largest(TorchDispatchMode):
    """Remembers the most numbers any new tensor had, but for the ones in `known`."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.known = {each.untyped_storage().data_ptr() for each in known}
        self.numbers = 0

    def __torch_dispatch__(self, op: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = op(*arguments, **options or {})
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, Tensor) and each.untyped_storage().data_ptr() not in self.known:
                self.numbers = max(self.numbers, each.untyped_storage().nbytes() // each.element_size())
        return result


def test_no_tensor_of_all_logits_is_ever_made() -> None:
    case = leaves(inputs(512, d=4, v=600, ignored=None))
    with Largest(case.x, case.weight) as made:
        loss = linear_cross_entropy(case.x, case.weight, case.target, impl="chunked", memory_budget=TINY)
        loss.backward()
    assert made.numbers == case.weight.numel()  # its gradient; the logits are 307,200
    with Largest(case.x, case.weight) as plain:
        linear_cross_entropy(case.x, case.weight, case.target, impl="plain").backward()
    assert plain.numbers == 512 * 600


@pytest.mark.parametrize("shift", [False, True])
def test_x_is_not_copied(shift: bool) -> None:
    case = leaves(inputs(4, 128, d=64, v=3))
    with torch.no_grad(), Largest(case.x, case.weight) as made:
        linear_cross_entropy(case.x, case.weight, case.target, impl="chunked", shift=shift)
    assert made.numbers < case.x.numel() / 4
