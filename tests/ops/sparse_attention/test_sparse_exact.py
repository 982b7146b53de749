"""impl="chunked" against the float64 reference: values, every gradient, and how it behaves in programs."""

import pytest
import torch
from sparse_cases import ODD, SMALL, assert_close, call, inputs

from oomph.errors import ArgumentError
from oomph.ops.sparse_attention import chunked, nsa


@pytest.mark.parametrize("tokens", [1, 3, 7, 8, 31, 127])
@pytest.mark.parametrize("options", [SMALL, ODD])
def test_values_and_all_gradients_agree(tokens, options):
    case = inputs(tokens, batch=2)
    assert_close(call(*case, "chunked", **options), call(*case, "reference", **options), 1e-12)


@pytest.mark.parametrize("heads", [1, 3, 16, 64])
def test_groups_of_any_size_agree(heads):
    case = inputs(40, heads=heads, key_heads=1)
    assert_close(call(*case, "chunked", **SMALL), call(*case, "reference", **SMALL), 1e-12)


@pytest.mark.parametrize("options", [SMALL, ODD])
def test_chunks_of_any_size_give_the_same(monkeypatch, options):
    case = inputs(53)
    expected = call(*case, "reference", **options)
    for tokens in (1, 5, 16):
        monkeypatch.setattr(chunked, "tokens_per_chunk", lambda *_, size=tokens: size)
        assert_close(call(*case, "chunked", **options), expected, 1e-12)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)]
)
def test_lower_precisions_lose_no_more_than_their_rounding(dtype, tolerance):
    # All blocks selected: rounded scores cannot change the choice.
    options = {**SMALL, "top_n": 10}
    tensors, grad = inputs(60)
    tensors = [x.to(dtype).double() for x in tensors]
    got = call(tensors, grad, "chunked", dtype=dtype, **options)
    assert got[0].dtype == dtype
    assert_close(got, call(tensors, grad, "reference", **options), tolerance)


def test_a_window_longer_than_the_sequence_and_more_blocks_than_there_are_mean_all_of_them():
    case = inputs(30)
    wide = {**SMALL, "window": 1000, "top_n": 500}
    exact = {**SMALL, "window": 30, "top_n": 3}
    assert_close(call(*case, "chunked", **wide), call(*case, "reference", **exact), 1e-12)


@pytest.mark.parametrize("impl", ["chunked", "reference"])
def test_a_sequence_too_short_to_compress_calls_no_map(impl):
    tensors, _ = inputs(7)

    def never(blocks):
        raise AssertionError("called")

    out = nsa(*tensors, compress=never, impl=impl, **SMALL)
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("impl", ["auto", "chunked", "reference"])
@pytest.mark.parametrize("shape", [{"tokens": 0}, {"tokens": 20, "batch": 0}], ids=str)
def test_no_tokens_or_no_rows_give_no_result_and_empty_gradients(shape, impl):
    tensors, grad = inputs(**shape)
    got = call(tensors, grad, impl, **SMALL)
    assert [x.shape for x in got[:7]] == [x.shape for x in (grad, *tensors)]


def test_inputs_need_not_be_contiguous():
    tensors, grad = inputs(37)
    expected = call(tensors, grad, "reference", **SMALL)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    assert_close(call(turned, grad.expand_as(grad), "chunked", **SMALL), expected, 1e-12)


def test_a_nan_stays_with_its_token_and_those_after():
    tensors, _ = inputs(40)
    tensors[1][:, 20] = torch.nan
    out = nsa(*tensors, compress="mean", impl="chunked", **SMALL)
    assert torch.isfinite(out[:, :20]).all()
    assert torch.isnan(out[:, 20]).all()


def test_frozen_inputs_get_no_gradient_and_a_graph_may_run_twice():
    tensors, grad = inputs(37)
    for number in (1, 4):
        tensors[number].requires_grad_()
    out = nsa(*tensors, compress="mean", impl="chunked", **SMALL)
    out.backward(grad, retain_graph=True)
    once = tensors[1].grad.clone()
    out.backward(grad)
    torch.testing.assert_close(tensors[1].grad, 2 * once)
    assert tensors[0].grad is None
    assert tensors[4].grad.shape == tensors[4].shape


def test_only_a_learned_map_may_be_trained():
    tensors, grad = inputs(37)
    weight = torch.randn(8, dtype=torch.float64, requires_grad=True)
    found = []
    for impl in ("chunked", "reference"):
        out = nsa(
            *tensors,
            compress=lambda blocks: torch.einsum("bnlhd,l->bnhd", blocks, weight),
            impl=impl,
            **SMALL,
        )
        found.append(torch.autograd.grad(out, weight, grad)[0])
    torch.testing.assert_close(*found)


def test_without_gradients_nothing_is_kept():
    tensors, _ = inputs(20)
    tensors[0].requires_grad_()
    with torch.no_grad():
        assert not nsa(*tensors, compress="mean", **SMALL).requires_grad


def test_a_second_derivative_is_refused():
    tensors, _ = inputs(20)
    tensors[0].requires_grad_()
    out = nsa(*tensors, compress="mean", **SMALL)
    with pytest.raises(ArgumentError, match="cannot be differentiated twice"):
        torch.autograd.grad(out.sum(), tensors[0], create_graph=True)


def test_checkpointing_gives_the_same_gradients():
    tensors, grad = inputs(37)
    tensors[0].requires_grad_()

    def run(q):
        return nsa(q, *tensors[1:], compress="mean", **SMALL)

    plain = torch.autograd.grad(run(tensors[0]), tensors[0], grad)[0]
    out = torch.utils.checkpoint.checkpoint(run, tensors[0], use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(out, tensors[0], grad)[0], plain)


def test_autocast_decides_the_dtype():
    tensors, _ = inputs(37, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = nsa(*tensors, compress="mean", **SMALL)
    assert out.dtype == torch.bfloat16
    half = [x.bfloat16() for x in tensors[:3]]
    torch.testing.assert_close(out, nsa(*half, *tensors[3:], compress="mean", **SMALL))
    for number in range(3):  # as where a norm left one of them in float32
        mixed = [x.float() if at != number else x for at, x in enumerate(half)]
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(nsa(*mixed, *tensors[3:], compress="mean", **SMALL), out)


def test_a_compiled_program_steps_around_it():
    tensors, _ = inputs(20)

    @torch.compile(backend="eager")
    def program(q):
        return nsa(q * 2, *tensors[1:], compress="mean", **SMALL) + 1

    expected = nsa(tensors[0] * 2, *tensors[1:], compress="mean", **SMALL) + 1
    torch.testing.assert_close(program(tensors[0]), expected)
