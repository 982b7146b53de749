"""Known MLPs against the reference in float64: values, every gradient, odd shapes, dtypes, frozen parts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from mlp_samples import assert_same, results, tokens, weights
from torch.utils.checkpoint import checkpoint

from oomph.ops.common import explain
from oomph.ops.mlp import MLPWeights, products, tiled_mlp, tiles
from oomph.ops.mlp.weights import ACTIVATIONS

IMPLS = ("chunked", "triton")
EVERY = (*IMPLS, "generic")


@pytest.mark.parametrize("impl", EVERY)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_values_and_gradients_are_the_references(
    monkeypatch: pytest.MonkeyPatch, activation: str, gated: bool, impl: str
) -> None:
    w, x = weights(activation, gated, bias=True), tokens(3, 19, 12)
    inputs = [x, *w.named().values()]
    theirs = results(lambda: tiled_mlp(w, x, impl="reference"), inputs)
    # Gate and up kept of all tiles, of some, of none.
    for kept in (57, 20, 0) if impl != "generic" else (0,):
        keep_rows(monkeypatch, kept, gated)
        assert_same(results(lambda: tiled_mlp(w, x, tile=8, impl=impl), inputs), theirs)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("count", [1, 3, 127, 257])
def test_every_number_of_tokens_and_every_tile_gives_the_same(
    monkeypatch: pytest.MonkeyPatch, count: int, impl: str
) -> None:
    w, x = weights(f=33), tokens(count, 12)
    inputs = [x, *w.named().values()]
    theirs = results(lambda: tiled_mlp(w, x, impl="reference"), inputs)
    for tile, kept in ((None, None), (1000, 0), (64, 100)):
        if kept is not None:
            keep_rows(monkeypatch, kept, gated=True, f=33)
        assert_same(results(lambda tile=tile: tiled_mlp(w, x, tile=tile, impl=impl), inputs), theirs)


@pytest.mark.parametrize("shape", [(12,), (5, 12), (2, 3, 5, 12), (0, 12), (2, 0, 12)])
def test_leading_dimensions_are_kept_and_may_be_empty(shape: tuple[int, ...]) -> None:
    w, x = weights(bias=True), tokens(*shape)
    inputs = [x, *w.named().values()]
    ours = results(lambda: tiled_mlp(w, x, tile=2), inputs)
    assert ours[0].shape == (*shape[:-1], 9)
    assert_same(ours, results(lambda: tiled_mlp(w, x, impl="reference"), inputs))


@pytest.mark.parametrize("impl", ["chunked", "generic"])
def test_no_features_at_all_give_the_bias(impl: str) -> None:
    w, x = weights(bias=True, d=0), tokens(5, 0)
    inputs = [x, *w.named().values()]
    ours = results(lambda: tiled_mlp(w, x, tile=2, impl=impl), inputs)
    assert_same(ours, results(lambda: tiled_mlp(w, x, impl="reference"), inputs))


def test_inputs_and_gradients_need_not_be_contiguous() -> None:
    w, x = weights(), tokens(12, 7, 5)
    inputs = [x, *w.named().values()]

    def run(impl: str) -> torch.Tensor:
        return tiled_mlp(w, x.permute(2, 1, 0), tile=4, impl=impl).transpose(0, 1)

    assert_same(results(lambda: run("auto"), inputs), results(lambda: run("reference"), inputs))
    # The gradient of a sum is one number, broadcast.
    ours = torch.autograd.grad(run("auto").sum(), inputs)
    assert_same(ours, torch.autograd.grad(run("reference").sum(), inputs))


def test_a_transposed_weight_gets_its_gradient_in_its_own_layout() -> None:
    w, x = weights(), tokens(30, 12)
    stored = w.up.detach().t().contiguous().requires_grad_()
    tiled_mlp(MLPWeights(stored.t(), w.down, w.gate), x, tile=8).sum().backward()
    tiled_mlp(w, x, impl="reference").sum().backward()
    assert stored.grad is not None
    assert stored.grad.is_contiguous()
    assert_same([stored.grad.t()], [w.up.grad])


HALF_AND_SINGLE = [
    ("chunked", torch.bfloat16),
    ("chunked", torch.float16),
    ("chunked", torch.float32),
    # Not in bfloat16: Triton's interpreter cuts it off where a GPU rounds.
    ("triton", torch.float16),
    ("triton", torch.float32),
]


@pytest.mark.parametrize(("impl", "dtype"), HALF_AND_SINGLE)
def test_errors_are_no_larger_than_the_references_in_the_same_dtype(impl: str, dtype: torch.dtype) -> None:
    # Over several inputs, because a bias has so few elements that the error of a single gradient is chance.
    count = 6
    ours, theirs, sizes = (torch.zeros(8, dtype=torch.float64) for _ in range(3))
    for number in range(count):
        w, x = weights(bias=True, d=32, f=64, dtype=dtype, seed=number), tokens(300 + number, 32, dtype=dtype)
        inputs = [x, *w.named().values()]
        w64 = MLPWeights(
            **{name: each.detach().double().requires_grad_() for name, each in w.named().items()}
        )
        x64 = x.detach().double().requires_grad_()
        truth = results(lambda w=w64, x=x64: tiled_mlp(w, x, impl="reference"), [x64, *w64.named().values()])
        plain = results(lambda w=w, x=x: tiled_mlp(w, x, impl="reference"), inputs)
        tiled = results(lambda w=w, x=x: tiled_mlp(w, x, tile=64, impl=impl), inputs)
        assert {each.dtype for each in tiled} == {dtype}
        ours += torch.stack([(one - right).square().sum() for one, right in zip(tiled, truth, strict=True)])
        theirs += torch.stack([(one - right).square().sum() for one, right in zip(plain, truth, strict=True)])
        sizes += torch.stack([right.square().sum() for right in truth])
    assert (ours.sqrt() <= 1.02 * theirs.sqrt() + 1e-6 * sizes.sqrt()).all()


def test_nan_spreads_to_its_own_token_and_to_the_weights() -> None:
    for activation in ACTIVATIONS:
        for impl in IMPLS:
            w, x = weights(activation), tokens(10, 12).detach()
            x[4, 0] = float("nan")
            x.requires_grad_()
            value, dx, d_up, *_ = results(
                lambda w=w, x=x, impl=impl: tiled_mlp(w, x, tile=4, impl=impl), [x, w.up]
            )
            assert value[4].isnan().all()
            assert dx[4].isnan().all()
            assert d_up.isnan().any()
            assert not value[[0, 9]].isnan().any()


def test_large_inputs_do_not_overflow_in_the_activation() -> None:
    for activation in ACTIVATIONS:
        w = weights(activation, gated=False, dtype=torch.float32)
        x = (200 * tokens(6, 12).detach()).float().requires_grad_()
        inputs = [x, w.up]
        theirs = results(lambda w=w, x=x: tiled_mlp(w, x, impl="reference"), inputs)
        for impl in IMPLS:
            ours = results(lambda w=w, x=x, impl=impl: tiled_mlp(w, x, impl=impl), inputs)
            assert_same(ours, theirs, tolerance=1e-3)


def test_one_frozen_or_many_frozen_inputs_leave_the_other_gradients_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keep_rows(monkeypatch, 8)
    names = ("x", "up", "down", "gate", "up_bias", "gate_bias", "down_bias")
    for trained in (*((name,) for name in names), ("x", "down"), ("up", "gate_bias")):
        w, x = weights(bias=True), tokens(20, 12)
        every = {"x": x, **w.named()}
        for name, each in every.items():
            each.requires_grad_(name in trained)
        inputs = [every[name] for name in trained]
        theirs = results(lambda w=w, x=x: tiled_mlp(w, x, impl="reference"), inputs)
        assert_same(results(lambda w=w, x=x: tiled_mlp(w, x, tile=8), inputs), theirs)


@pytest.mark.parametrize("kept", [0, 8, 16])
@pytest.mark.parametrize(("trained", "expected"), [("all", 11 * 2), ("x", 8 * 2), ("down", 6 * 2)])
def test_frozen_parts_cost_no_product_and_kept_tiles_two_fewer(
    monkeypatch: pytest.MonkeyPatch, trained: str, expected: int, kept: int
) -> None:
    keep_rows(monkeypatch, kept)
    w, x = weights(), tokens(16, 12)
    if trained != "all":
        for name, each in {"x": x, **w.named()}.items():
            each.requires_grad_(name == trained)
    counted = _CountProducts()
    with counted:
        tiled_mlp(w, x, tile=8).sum().backward()
    assert counted.products == expected - 2 * kept // 8  # over two tiles


def test_without_gradients_nothing_is_saved() -> None:
    w, x = weights(), tokens(16, 12)
    with torch.no_grad():
        out = tiled_mlp(w, x, tile=8)
    assert out.grad_fn is None
    assert_same([out], [tiled_mlp(w, x, impl="reference").detach()])


def saved_beside_the_inputs(w: MLPWeights, x: torch.Tensor) -> list[tuple[int, ...]]:
    """Shapes of what is saved for backward and was not given."""
    saved: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = tiled_mlp(w, x, tile=8)
    given = {each.data_ptr() for each in (x, *w.named().values())}
    assert out.data_ptr() not in given
    return [tuple(each.shape) for each in saved if each.data_ptr() not in given]


def test_saved_for_backward_are_the_inputs_and_gate_and_up_of_a_constant_number_of_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    w = weights(bias=True)
    keep_rows(monkeypatch, 17)
    assert [saved_beside_the_inputs(w, tokens(n, 12)) for n in (12, 40, 400)] == [
        [(12, 20)] * 2,
        [(16, 20)] * 2,
        [(16, 20)] * 2,
    ]
    keep_rows(monkeypatch, 0)
    assert saved_beside_the_inputs(w, tokens(40, 12)) == []
    keep_rows(monkeypatch, 17)
    frozen = MLPWeights(**{name: each.detach() for name, each in w.named().items()})
    assert saved_beside_the_inputs(frozen, tokens(40, 12).detach()) == []


def test_backward_twice_through_a_kept_graph_gives_the_same_again(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_rows(monkeypatch, 8)
    w, x = weights(), tokens(16, 12)
    inputs = [x, *w.named().values()]
    loss = tiled_mlp(w, x, tile=8).square().sum()
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    assert_same(torch.autograd.grad(loss, inputs), first)


def test_checkpointing_and_compiling_around_it_change_nothing() -> None:
    w, x = weights(), tokens(16, 12)
    inputs = [x, *w.named().values()]
    theirs = results(lambda: tiled_mlp(w, x, impl="reference"), inputs)

    def run(x: torch.Tensor) -> torch.Tensor:
        return tiled_mlp(w, x, tile=8)

    assert_same(results(lambda: checkpoint(run, x, use_reentrant=False), inputs), theirs)
    compiled: Callable[[torch.Tensor], torch.Tensor] = torch.compile(run, backend="eager")
    assert_same(results(lambda: compiled(x), inputs), theirs)


def test_under_autocast_products_are_in_bfloat16_and_gradients_in_the_dtype_of_what_they_belong_to() -> None:
    w, x = weights(bias=True, d=32, f=64, dtype=torch.float32), tokens(40, 32, dtype=torch.float32)
    inputs = [x, *w.named().values()]

    def run(**options: object) -> list[torch.Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = tiled_mlp(w, x, **options)
        return results(lambda: out, inputs)  # backward outside autocast, as is usual

    theirs = run(impl="reference")
    for tile in (16, 64):
        assert_same(run(tile=tile), theirs, tolerance=0.05)
        assert run(tile=tile)[0].dtype == torch.bfloat16


def test_sums_of_half_precision_products_are_rounded_once() -> None:
    a, b = torch.randn(30, 1300).bfloat16(), torch.randn(1300, 7).bfloat16()
    exact = a.double() @ b.double()
    for total in (torch.full((30, 7), torch.nan), torch.full((7, 30), torch.nan).t()):
        products.accumulate_product(total, a, b, first=True)
        torch.testing.assert_close(total.double(), exact, rtol=1e-4, atol=1e-4)
        products.accumulate_product(total, a, b)
        torch.testing.assert_close(total.double(), 2 * exact, rtol=1e-4, atol=1e-4)


def test_explain_names_the_kind_the_rows_and_the_reason() -> None:
    choice = explain(tiled_mlp, weights(), tokens(100, 12), tile=32)
    assert choice.impl == "chunked"
    assert (
        choice.reason
        == "a known MLP, silu gated (SwiGLU); elementwise part in plain torch: the tensors are on cpu"
    )
    assert choice.settings == {
        "kind": "silu gated (SwiGLU)",
        "tile": 32,
        "buffers": 32 * 3 * 20 * 8,
        "kept": 100,
    }
    with torch.no_grad():
        assert explain(tiled_mlp, weights(), tokens(100, 12)).settings["kept"] == 0


def keep_rows(monkeypatch: pytest.MonkeyPatch, rows: int, gated: bool = True, f: int = 20) -> None:
    """Give what is kept for backward the room of so many float64 rows."""
    monkeypatch.setattr(tiles, "CPU_KEPT", rows * tiles.bytes_kept(f, 8, gated))


class _CountProducts(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.products += func.overloadpacket in (
            torch.ops.aten.mm,
            torch.ops.aten.addmm,
            torch.ops.aten.addmm_,
        )
        return func(*args, **(kwargs or {}))
