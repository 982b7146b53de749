"""The size of a tile, and every argument that is refused, with what it says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mlp_samples import PlainGated, tokens, weights
from torch import nn

from oomph.errors import ArgumentError
from oomph.ops.mlp import MLPWeights, tiled_mlp
from oomph.ops.mlp.tiles import bytes_kept, bytes_of_buffers, rows_of_a_tile, spans, tile_and_kept

MiB = 1 << 20


def test_the_default_tile_on_a_gpu_fits_224_mib_in_whole_equal_blocks() -> None:
    per_row = bytes_of_buffers(9216, 2, gated=True)
    rows = rows_of_a_tile(131072, per_row, "cuda", None, None)
    assert rows == 4096
    assert rows * per_row <= 224 * MiB
    assert rows_of_a_tile(100_000, per_row, "cuda", None, None) == 4224  # 24 tiles, none of them small
    assert rows_of_a_tile(777, per_row, "cuda", None, None) == 777


def test_a_very_wide_layer_keeps_2048_rows() -> None:
    assert rows_of_a_tile(131072, bytes_of_buffers(53248, 2, gated=True), "cuda", None, None) == 2048


def test_a_budget_decides_and_is_never_exceeded() -> None:
    per_row = bytes_of_buffers(9216, 2, gated=True)
    for budget in (per_row, 5 * MiB, 64 * MiB, 1024 * MiB):
        assert 1 <= rows_of_a_tile(131072, per_row, "cuda", None, budget) <= budget // per_row


def test_on_a_cpu_a_constant_number_of_bytes_is_kept_in_whole_tiles_and_on_a_gpu_nothing() -> None:
    swiglu = (1024, 4, True)  # hidden features, bytes of an element, gated
    for tokens_given in (32768, 1 << 20):
        rows, kept = tile_and_kept(tokens_given, *swiglu, "cpu", None, None)
        assert 0 < kept * bytes_kept(*swiglu) <= 64 * MiB
        assert kept % rows == 0
        assert tile_and_kept(tokens_given, *swiglu, "cuda", None, None)[1] == 0
    assert tile_and_kept(8192, *swiglu, "cpu", None, None)[1] == 8192
    assert tile_and_kept(8192, *swiglu, "cpu", 1000, None) == (1000, 8192)
    assert tile_and_kept(50000, *swiglu, "cpu", 20000, None) == (20000, 0)  # not one whole tile fits


def test_a_budget_on_a_cpu_holds_the_tile_and_what_is_kept() -> None:
    swiglu = (1024, 4, True)
    for budget in (20000, MiB, 40 * MiB, 96 * MiB, 1024 * MiB):
        rows, kept = tile_and_kept(1 << 20, *swiglu, "cpu", None, budget)
        assert rows * bytes_of_buffers(*swiglu) + kept * bytes_kept(*swiglu) <= budget
        assert (kept > 0) == (budget >= 96 * MiB)


def test_tiles_cover_every_token_once() -> None:
    assert list(spans(10, 4)) == [(0, 4), (4, 8), (8, 10)]
    assert list(spans(0, 4)) == [(0, 0)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tile": 0}, "tile=0 is not valid; give a number of tokens, 1 or more"),
        ({"tile": 2.5}, "tile=2.5 is not valid"),
        ({"tile": True}, "tile=True is not valid"),
        ({"memory_budget": -1}, "size '-1' is not valid"),
        ({"memory_budget": "12"}, "size '12' has no unit"),
        ({"memory_budget": 100}, "memory_budget=100 B is too small; one token's buffers take 480 B"),
        ({"tile": 4, "memory_budget": "1MiB"}, "give one of them"),
        ({"impl": "fast"}, "impl='fast' is not valid; choose from 'auto', 'reference'"),
    ],
)
def test_each_bad_option_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        tiled_mlp(weights(), tokens(5, 12), **options)


def test_each_bad_input_is_named() -> None:
    w = weights()
    for x, message in (
        (torch.ones(3, 12, dtype=torch.long), "x has dtype torch.int64"),
        ([1.0], "x is a list, not a tensor"),
        (torch.tensor(1.0), "x has no dimensions"),
        (tokens(3, 11), r"x has 11 features; up \(20, 12\) takes 12"),
        (tokens(3, 12).float(), "all tensors must have one dtype"),
        (tokens(3, 12).to("meta"), "all tensors must be on one device"),
    ):
        with pytest.raises(ArgumentError, match=message):
            tiled_mlp(w, x)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="fn_or_module is a str"):
        tiled_mlp("relu", tokens(3, 12))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="parameters holds a int"):
        tiled_mlp(torch.tanh, tokens(3, 12), parameters=[3])  # type: ignore[list-item]


def test_tokens_that_do_not_fit_a_known_module_are_named_too() -> None:
    module = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 6))
    with pytest.raises(ArgumentError, match=r"x has 5 features; up \(20, 12\) takes 12"):
        tiled_mlp(module, torch.zeros(3, 5))
    with pytest.raises(ArgumentError, match="x on meta, up on cpu"):
        tiled_mlp(module, torch.zeros(3, 12, device="meta"))


def test_each_bad_description_is_named() -> None:
    good = {name: each.detach() for name, each in weights().named().items()}
    for change, message in (
        ({"activation": "swish"}, "activation='swish' is not valid; choose from 'silu'"),
        ({"gate": torch.ones(3, 12).double()}, r"gate has shape \(3, 12\); .*must be \(20, 12\)"),
        ({"down": torch.ones(9, 21).double()}, r"down has shape \(9, 21\); .*must be \(9, 20\)"),
        ({"up": torch.ones(20).double()}, r"up has shape \(20,\); valid: a matrix"),
        ({"up_bias": torch.ones(12).double()}, r"up_bias has shape \(12,\)"),
        ({"gate": None, "gate_bias": torch.ones(20).double()}, "gate_bias is given without gate"),
    ):
        with pytest.raises(ArgumentError, match=message):
            MLPWeights(**{**good, **change})


def test_implementations_that_cannot_run_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    x = tokens(3, 12)
    with pytest.raises(ArgumentError, match="impl='triton' is for known MLPs: a plain callable"):
        tiled_mlp(torch.tanh, x, impl="triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ArgumentError, match="impl='triton' cannot run: the tensors are on cpu"):
        tiled_mlp(PlainGated().double(), x, impl="triton")


def test_layers_that_look_at_all_tokens_are_refused() -> None:
    module = nn.Sequential(nn.Linear(12, 20), nn.BatchNorm1d(20), nn.Linear(20, 6)).double()
    with pytest.raises(ArgumentError, match="batch norm in training mode"):
        tiled_mlp(module, tokens(5, 12))
    module.eval()
    tiled_mlp(module, tokens(5, 12))
