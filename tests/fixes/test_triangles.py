"""What is known of a mask without its data is what the mask holds."""

import math
import random

import pytest
import torch
from torch import Tensor

from oomph.fixes.attention.triangles import Triangle, after, found_in, made_by

MADE = [
    ("ones", (5, 5)),
    ("ones", (1, 6, 6)),
    ("zeros", (4, 7)),
    ("full", ((5, 5), float("-inf"))),
    ("full", ((1, 1, 6, 6), True)),
]
STEPS = [
    ("tril", ()),
    ("tril", (1,)),
    ("triu", (1,)),
    ("triu", (-1,)),
    ("__eq__", (0,)),
    ("__invert__", ()),
    ("bool", ()),
    ("to", (torch.bfloat16,)),
    ("float", ()),
    ("mul", (-3.0,)),
    ("__rsub__", (1,)),
    ("add", (2,)),
    ("__getitem__", ((..., slice(1, 4), slice(None, 4)),)),
    ("__getitem__", ((..., slice(None, 3), slice(2, None)),)),
    ("__getitem__", ((None, None),)),
    ("__getitem__", (0,)),
    ("__getitem__", (slice(None, 3),)),
    ("__getitem__", ((slice(None), None),)),
    ("unsqueeze", (0,)),
    ("unsqueeze", (1,)),
    ("unsqueeze", (-1,)),
    ("expand", (2, -1, -1)),
    ("view", (1, 1, 5, 5)),
    ("transpose", (-1, -2)),
]


@pytest.mark.parametrize("seed", range(40))
def test_chains_of_calls_are_followed_or_given_up(seed):
    chance, known = random.Random(seed), 0
    for _ in range(50):
        name, args = chance.choice(MADE)
        real = getattr(torch, name)(*args)
        triangle = made_by(name, args, {}, real)
        for _ in range(5):
            step, args = chance.choice(STEPS)
            try:
                real = getattr(Tensor, step)(real, *args)
            except (RuntimeError, IndexError, TypeError):
                continue
            triangle = after(step, (triangle, *args), {})
            if triangle is None:
                break
            same = triangle.tensor(torch.device("cpu"))
            assert same.dtype == real.dtype, (step, args)
            torch.testing.assert_close(same, real, rtol=0, atol=0, equal_nan=True)
            known += 1
    assert known > 50


def test_two_masks_of_one_shape_are_combined():
    lower = after("tril", (made_by("ones", (4, 4), {}, torch.ones(4, 4)),), {})
    closed = after("__eq__", (lower, 0), {})
    filled = after("masked_fill", (lower, closed, float("-inf")), {})
    real = torch.ones(4, 4).tril()
    assert torch.equal(filled.tensor(torch.device("cpu")), real.masked_fill(real == 0, float("-inf")))
    assert after("masked_fill", (lower, after("tril", (closed, 1), {}), 0.0), {}) is None


@pytest.mark.parametrize(
    ("mask", "below", "above"),
    [
        (torch.ones(6, 6).tril(), 1.0, 0.0),
        (torch.ones(1, 1, 2000, 2000, dtype=torch.bool).triu(1), False, True),
        (torch.full((5, 5), float("-inf")).triu(1), 0.0, float("-inf")),
    ],
)
def test_triangles_are_found_in_tensors(mask, below, above):
    assert found_in(mask) == Triangle(tuple(mask.shape), 0, below, above, mask.dtype)


def test_other_tensors_are_not_triangles():
    prefix = torch.ones(6, 6).tril()
    prefix[0, 3] = 1
    window = torch.ones(6, 6).tril().triu(-2)
    nothing = torch.full((6, 6), float("nan")).tril()
    for other in (prefix, window, nothing, torch.ones(6, 6), torch.ones(5, 6).tril(), torch.ones(6).diag()):
        assert found_in(other) is None


def test_results_that_are_remembered_are_told_apart():
    """0.0 equals -0.0 and 1 equals True, but what is computed of them differs."""
    zeros = [Triangle((4, 4), 0, 1.0, zero, torch.float32) for zero in (0.0, -0.0)]
    signs = [math.copysign(1, after("mul", (zero, 1.0), {}).above) for zero in zeros]
    assert signs == [1, -1]
    whole = Triangle((4, 4), 0, 1, 0, torch.int64)
    results = [after("mul", (whole, factor), {}).dtype for factor in (1, 1.0, True)]
    assert results == [torch.int64, torch.float32, torch.int64]
