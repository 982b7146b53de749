"""The shortcuts give what FakeTensorMode gives; what they have no rule for goes the general way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from oomph.prediction.tracer.fast_path import FastPath

aten = torch.ops.aten
Make = Callable[..., torch.Tensor]
Call = tuple[tuple[Any, ...], dict[str, Any]]


def mm_out(make: Make) -> Call:
    return (make(5, 3), make(3, 7)), {"out": make(5, 7)}


def mm_out_of_views(make: Make) -> Call:
    return (make(9, 3)[2:7], make(7, 3).t()), {"out": make(8, 7)[1:6]}


def addmm_out(make: Make) -> Call:
    return (make(5, 7), make(5, 3), make(3, 7)), {"beta": 1, "alpha": 2, "out": make(5, 7)}


def addmm_out_of_a_row(make: Make) -> Call:
    return (make(7), make(5, 3), make(3, 7)), {"out": make(5, 7)}


def mm_out_that_has_to_grow(make: Make) -> Call:
    return (make(5, 3), make(3, 7)), {"out": make(0)}


def mm_out_of_another_dtype(make: Make) -> Call:
    return (make(5, 3), make(3, 7)), {"out": make(5, 7, dtype=torch.bfloat16)}


def mm_of_sizes_that_do_not_match(make: Make) -> Call:
    return (make(5, 3), make(4, 7)), {"out": make(5, 7)}


def addmm_of_a_row_that_does_not_match(make: Make) -> Call:
    return (make(5), make(5, 3), make(3, 7)), {"out": make(5, 7)}


@pytest.mark.parametrize(
    ("func", "call"),
    [
        (aten.mm.out, mm_out),
        (aten.mm.out, mm_out_of_views),
        (aten.addmm.out, addmm_out),
        (aten.addmm.out, addmm_out_of_a_row),
    ],
)
def test_a_product_into_memory_that_is_there_is_that_memory(func: Any, call: Callable[[Make], Call]) -> None:
    with FakeTensorMode() as mode:
        args, kwargs = call(torch.empty)
        shape, stride = kwargs["out"].shape, kwargs["out"].stride()
        assert FastPath(mode).run(func, args, kwargs) is kwargs["out"]
        general = func(*args, **kwargs)
        assert (general.shape, general.stride(), general.dtype) == (shape, stride, torch.float32)


@pytest.mark.parametrize(
    ("func", "call"),
    [
        (aten.mm.out, mm_out_that_has_to_grow),
        (aten.mm.out, mm_out_of_another_dtype),
        (aten.mm.out, mm_of_sizes_that_do_not_match),
        (aten.addmm.out, addmm_of_a_row_that_does_not_match),
    ],
)
def test_other_products_are_left_to_fake_tensors(func: Any, call: Callable[[Make], Call]) -> None:
    with FakeTensorMode() as mode:
        args, kwargs = call(torch.empty)
        assert FastPath(mode).run(func, args, kwargs) is NotImplemented
