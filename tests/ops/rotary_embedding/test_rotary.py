"""The rotation: its values, its gradients, what it saves, what it refuses; and the module."""

import cmath
import math

import pytest
import torch
from checks import saved_beside

import oomph
from oomph.nn import RotaryEmbedding
from oomph.ops.common import interpreted
from oomph.ops.rotary_embedding import RotaryTable, rotary, rotary_table
from oomph.units import MiB

FAR = 2**20 + 3


IMPLS = ["reference", "chunked", "triton"]


@pytest.fixture(autouse=True)
def _kernels_run_on_the_gpu_where_there_is_one(request):
    impl = request.getfixturevalue("impl") if "impl" in request.fixturenames else None
    with torch.device("cuda" if impl == "triton" and torch.cuda.is_available() else "cpu"):
        yield


def by_complex_numbers(x, places, *, fraction=1.0):
    """x [B, H, T, D] turned pair by pair with Python's complex numbers; shares no code with ours."""
    out = x.double().clone()
    turned = int(x.shape[-1] * fraction)
    half = turned // 2
    for t, place in enumerate(places):
        for i in range(half):
            turn = cmath.exp(1j * math.fmod(place * 10000.0 ** (-2 * i / turned), 2 * math.pi))
            first, second = x[:, :, t, i].double(), x[:, :, t, i + half].double()
            out[:, :, t, i] = first * turn.real - second * turn.imag
            out[:, :, t, i + half] = first * turn.imag + second * turn.real
    return out


def rand(*shape, dtype=torch.float64, grad=False):
    generator = torch.Generator("cpu").manual_seed(sum(shape))
    made = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    return made.to(torch.get_default_device(), dtype).requires_grad_(grad)


def rounding(dtype, impl):
    """The relative error of one rounding; Triton's interpreter cuts bfloat16 off instead of rounding it."""
    cuts = impl == "triton" and dtype == torch.bfloat16 and interpreted()
    return torch.finfo(dtype).eps / (1 if cuts else 2)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("size", "fraction"), [(16, 1.0), (80, 0.4), (2, 1.0), (9, 0.67)])
def test_pairs_are_turned_as_points_and_the_rest_is_kept(impl, size, fraction):
    places = [0, 1, 300, 131_071, FAR]
    q, k = rand(2, 3, 5, size), rand(2, 1, 5, size)
    got_q, got_k = rotary(q, k, positions=torch.tensor(places), fraction=fraction, impl=impl)
    for got, x in ((got_q, q), (got_k, k)):
        want = by_complex_numbers(x, places, fraction=fraction)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-8)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_result_is_the_exact_one_rounded_once(impl, dtype):
    places = [0, 257, 131_071, 999_999, FAR]
    x = rand(1, 3, 5, 32, dtype=dtype)
    got = rotary(x, positions=torch.tensor(places), impl=impl)
    want = by_complex_numbers(x, places)
    assert got.dtype == dtype
    # half a unit in the last place of the result; and the float32 arithmetic before it
    bound = want.abs() * rounding(dtype, impl) + x.double().abs().max() * 2e-7
    assert ((got.double() - want).abs() <= bound).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_both_layouts_and_strided_inputs_give_the_same(impl):
    x = rand(2, 7, 3, 20)  # [B, T, H, D], e.g. sliced out of a fused projection
    qkv = torch.cat((x, rand(2, 7, 3, 21)[..., :20], x), dim=-1)
    sliced = qkv[..., :20]
    positions = torch.randint(0, 99, (2, 7))
    want = rotary(x.transpose(1, 2).contiguous(), positions=positions, impl="reference").transpose(1, 2)
    for given in (x, sliced, x.flip(-1).flip(-1), rand(2, 7, 3, 20).expand(2, 7, 3, 20)):
        got = rotary(given, positions=positions, heads_first=False, impl=impl)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-14)
    got = rotary(x.transpose(1, 2), positions=positions, impl=impl)
    torch.testing.assert_close(got.transpose(1, 2), want, rtol=0, atol=1e-14)
    assert impl == "reference" or got.stride() == x.transpose(1, 2).stride()  # the layout of the input
    backwards = torch.empty(20, 3, 7, 2, dtype=torch.float64).permute(3, 2, 1, 0).copy_(x)
    got = rotary(backwards, positions=positions, heads_first=False, impl=impl)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-14)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_table_may_be_a_strided_part_of_a_larger_one(impl):
    x = rand(2, 3, 4, 8)
    large = rotary_table(torch.arange(9), 16, dtype=torch.float64)
    cos, sin = large.cos[1:9:2, 1:8:2], large.sin[1:9:2, 1:8:2].contiguous()
    want = rotary(x, table=RotaryTable(cos.contiguous(), sin), impl="reference")
    expanded = RotaryTable(cos.expand(2, 4, 4), sin.expand(2, 4, 4))
    for table in (RotaryTable(cos, sin), RotaryTable(cos, large.sin[1:9:2, 1:8:2]), expanded):
        torch.testing.assert_close(rotary(x, table=table, impl=impl), want, rtol=0, atol=1e-14)


@pytest.mark.parametrize("impl", IMPLS[1:])
def test_a_bf16_gradient_is_the_exact_one_rounded_once(impl):
    x, upstream = rand(1, 2, 5, 32, dtype=torch.bfloat16, grad=True), rand(1, 2, 5, 32, dtype=torch.bfloat16)
    positions = torch.arange(5) + 2**20
    rotary(x, positions=positions, impl=impl).backward(upstream)
    exact_x = rand(1, 2, 5, 32, grad=True)
    rotary(exact_x, positions=positions, impl="reference").backward(upstream.double())
    want = exact_x.grad
    assert ((x.grad.double() - want).abs() <= want.abs() * rounding(torch.bfloat16, impl) + 1e-6).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_only_the_table_is_kept_for_backward(impl):
    table = rotary_table(torch.arange(6), 8)
    x = rand(1, 2, 6, 8, dtype=torch.bfloat16, grad=True)
    assert saved_beside([table.cos, table.sin], lambda: rotary(x, table=table, impl=impl)) == []


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # of the interpreter's numpy
@pytest.mark.parametrize("impl", IMPLS)
def test_the_input_is_not_changed_and_nan_stays_where_it_is(impl):
    copied = torch.full((1, 4, 3, 8), torch.inf)
    assert torch.equal(rotary(copied, turned_heads=2, impl=impl)[:, 2:], copied[:, 2:])
    x = rand(1, 2, 3, 8)
    x[0, 1, 2, 3] = math.nan
    before = x.clone()
    got = rotary(x, impl=impl)
    torch.testing.assert_close(x, before, equal_nan=True)
    assert got.isnan().sum() == 2  # the pair of the NaN
    assert got[0, 1, 2, [3, 7]].isnan().all()


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_prediction_sees_one_output_and_one_gradient_and_no_copies(device):
    q_bytes, k_bytes = 32 * 4096 * 128 * 2, 8 * 4096 * 128 * 2
    table_bytes = 2 * 4096 * 64 * 4

    def step():
        q = torch.empty(1, 32, 4096, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        k = torch.empty(1, 8, 4096, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        table = rotary_table(torch.arange(4096, device="cuda"), 128)
        new_q, new_k = rotary(q, k, table=table, impl="auto" if device == "cuda" else "chunked")
        torch.autograd.backward((new_q, new_k), (new_q.detach(), new_k.detach()))

    # q and k, their outputs, their gradients; nothing else of that size
    floor = 3 * (q_bytes + k_bytes) + table_bytes
    beside = oomph.predict(step).peak.allocated - floor
    assert 0 <= beside <= (MiB if device == "cuda" else 12 * MiB)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("shape", [(1, 2, 4, 8), (2, 4, 8)])
def test_the_first_heads_are_turned_and_the_rest_is_copied(impl, shape):
    torch.manual_seed(0)
    x = torch.randn(shape, requires_grad=True)
    options = {"fraction": 0.5, "heads_first": False, "impl": impl}
    for heads in (1, 3):
        y = rotary(x, turned_heads=heads, **options)
        expected = torch.cat((rotary(x[..., :heads, :], **options), x[..., heads:, :]), -2)
        torch.testing.assert_close(y, expected)
        assert torch.equal(y[..., heads:, :], x[..., heads:, :])
        weight = torch.randn(shape)
        grads = [torch.autograd.grad(each, x, weight)[0] for each in (y, expected)]
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize("heads_first", [True, False])
def test_rotate_is_rotary_in_the_form_of_the_module(heads_first):
    rope = RotaryEmbedding(16, 500.0, fraction=0.5, heads_first=heads_first).to(torch.bfloat16)
    assert not rope.state_dict()
    assert not list(rope.buffers())  # nothing that a cast could harm
    q, k = torch.randn(2, 4, 4, 16), torch.randn(2, 4, 4, 16)
    positions = torch.randint(0, 9, (2, 4))
    got = rope.rotate(q, k, rope(positions))
    want = rotary(q, k, positions=positions, theta=500.0, fraction=0.5, heads_first=heads_first)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    options = {"fraction": 0.5, "heads_first": heads_first}
    first = rotary(q, table=rope(positions), turned_heads=3, **options)
    assert torch.equal(rope.rotate_first(q, 3, rope(positions)), first)
