"""Arguments that nsa cannot take: one line that names the argument and what is valid."""

import pytest
import torch
from sparse_cases import SMALL, inputs

from oomph.errors import ArgumentError
from oomph.ops.common import explain
from oomph.ops.sparse_attention import nsa


def run(tokens=20, change=None, **options):
    tensors, _ = inputs(tokens)
    for number, value in (change or {}).items():
        tensors[number] = value(tensors[number])
    return nsa(*tensors, **{"compress": "mean", **SMALL, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 18}, r"^block_size=18 is not a multiple of compress_stride=4$"),
        ({"compress_block": 10}, r"^compress_block=10 is not a multiple of compress_stride=4$"),
        ({"compress_stride": 0}, r"^compress_stride=0 is not valid; a whole number of at least 1$"),
        ({"block_size": 0}, r"^block_size=0 is not valid; a whole number of at least 1$"),
        ({"compress_block": -8}, r"^compress_block=-8 is not valid; a whole number of at least 1$"),
        ({"block_size": 16.0}, r"^block_size=16.0 is not valid; a whole number of at least 1$"),
        (
            {"window": 0},
            r"^window=0 is not valid; a whole number of at least 1 \(the token itself is in it\)$",
        ),
        ({"top_n": 2}, r"^top_n=2 is not valid; a whole number of at least 3 \(the first block and the two"),
        ({"top_n": True}, r"^top_n=True is not valid"),
        ({"scale": 0.0}, r"^scale=0.0 is not valid; a finite number above 0, or None"),
        ({"scale": float("inf")}, r"^scale=inf is not valid"),
        ({"impl": "fla"}, r"^impl='fla' is not valid; choose from 'auto', 'triton', 'chunked', 'reference'$"),
        ({"compress": "max"}, r"^compress='max' is not valid; 'mean', a function of blocks"),
        ({"compress": (len,)}, r"^compress=\(<built-in function len>,\) is not valid"),
        (
            {"compress": lambda b: b},
            r"^compress returned shape \[1, 4, 8, 2, 8\] for keys; valid: \[1, 4, 2, 8\]",
        ),
        ({"compress": lambda b: None}, r"^compress returned a NoneType for keys; valid: a tensor$"),
        (
            {"compress": lambda b: b.float().mean(2)},
            r"^compress returned torch.float32 on cpu for keys; valid",
        ),
    ],
)
def test_a_bad_option_is_named_with_what_is_valid(options, message):
    with pytest.raises(ArgumentError, match=message) as caught:
        run(**options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: lambda q: q[0]}, "q, k and v must have 4 dimensions"),
        ({2: lambda v: v[..., :4]}, "k and v differ in shape"),
        ({0: lambda q: q[:, :5]}, "q and k differ in batch size or length"),
        ({0: lambda q: q[..., :4]}, "q and k must have one head size"),
        ({0: lambda q: q[:, :, :3]}, "query heads are not a multiple of key/value heads"),
        ({3: lambda g: g[..., None]}, r"gate_cmp has shape \[1, 20, 4, 1\]; valid: \[1, 20, 4\]"),
        ({5: lambda g: g[:, :, :2]}, r"gate_win has shape \[1, 20, 2\]; valid: \[1, 20, 4\]"),
        ({1: lambda k: k.float()}, "all tensors must have one dtype"),
        ({4: lambda g: g > 0}, "gate_slc has dtype torch.bool"),
        ({1: lambda k: None}, "k is None, not a tensor"),
        ({0: lambda q: q.to("meta")}, "all tensors must be on one device"),
    ],
)
def test_a_bad_tensor_is_named_with_what_is_valid(change, message):
    with pytest.raises(ArgumentError, match=message):
        run(change=change)


def test_gates_may_have_another_dtype():
    out = run(change={number: (lambda g: g.float()) for number in (3, 4, 5)})
    assert out.dtype == torch.float64


def test_a_call_can_be_explained_without_running_it():
    tensors, _ = inputs(20)
    choice = explain(nsa, *tensors, compress="mean", **SMALL)
    assert choice.impl == "chunked"
    assert "no kernel of ours" in choice.reason
    assert choice.settings["tokens"] == 20
    assert explain(nsa, *tensors, compress="mean", impl="reference").reason == "asked for"


def test_kernels_refuse_what_they_cannot_run_and_say_why():
    with pytest.raises(
        ArgumentError, match=r"^impl='triton' cannot run this call \((the tensors are on cpu|no float64)"
    ):
        run(impl="triton")
