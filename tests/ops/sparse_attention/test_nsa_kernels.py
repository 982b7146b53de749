"""The Triton kernels of nsa (in Triton's interpreter where there is no GPU), and on a real GPU."""

import pytest
import torch
from kernel_device import DEVICE
from nsa_inputs import NAMES, ODD, SMALL, assert_close, call, inputs, learned
from torch._subclasses.fake_tensor import FakeTensorMode

from oomph.errors import ArgumentError
from oomph.ops.common import TileConfig
from oomph.ops.sparse_attention import autograd, chunked, nsa, selection
from oomph.ops.sparse_attention.arguments import NSAConfig, compress_keys_and_values
from oomph.ops.sparse_attention.reference import reference, select_blocks
from oomph.units import KiB

pytest.importorskip("triton")
DEFAULT = {"block_size": 64, "compress_block": 32, "compress_stride": 16, "top_n": 16, "window": 512}


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch):
    """The interpreter's time grows with the number of programs: large tiles, but several of each kind."""
    if DEVICE == "cuda":
        return
    monkeypatch.setattr(autograd, "_window_tiles", lambda *_: (TileConfig(32, 32, 4, 1),) * 3)
    monkeypatch.setattr(selection, "_selected_tiles", lambda *_: (TileConfig(64, 0, 4, 1),) * 3)
    monkeypatch.setattr(selection, "_ROWS_PER_SUM", 128)
    monkeypatch.setattr(selection, "_importance_tile", lambda *_: TileConfig(128, 64, 4, 1))


@pytest.fixture
def _many_segments(monkeypatch):
    """Segments of 16 tokens, and no more than 16 pairs x heads of a block at a time."""
    monkeypatch.setattr(selection, "_MIN_INDEX_TILE", 16)
    monkeypatch.setattr(selection, "_ROWS_PER_LONG_ITEM", 16)
    monkeypatch.setattr(selection, "importance_segment", lambda *_: 32)


def compare(tokens, tolerance=1e-5, dtype=torch.float32, options=SMALL, **shape):
    case = inputs(tokens, device=DEVICE, **shape)
    case = ([x.to(dtype).double() for x in case[0]], case[1])
    got = call(*case, "triton", dtype=dtype, **options)
    assert got[0].dtype == dtype
    assert_close(got, call(*case, "reference", **options), tolerance)


@pytest.mark.usefixtures("_many_segments")
def test_values_and_gradients_over_several_segments_and_work_items():
    compare(49, heads=2, key_heads=1)


def test_sizes_that_are_no_power_of_two():
    compare(61, options=ODD, heads=3, key_heads=1, width=20)


def test_sequence_too_short_to_compress():
    compare(7, heads=2, key_heads=2, batch=2)


def test_half_precision():
    # All blocks selected: rounded scores cannot change the choice.
    compare(40, 4e-3, torch.float16, {**SMALL, "top_n": 9}, heads=2, key_heads=1)


@pytest.mark.parametrize("max_row", [16, 2048])
def test_blocks_are_selected_by_importance_then_by_index(max_row, monkeypatch):
    monkeypatch.setattr(selection, "_MAX_ROW", max_row)
    config = NSAConfig(2, 2, 2, 7, 1, 1.0)
    tokens = 64
    make = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 5, (1, 1, tokens, 32), generator=make).float().to(DEVICE)  # many are equal

    class OnlySelect:
        def launch(self, name, grid, *arguments, **constants):
            if name == "block_importance":
                arguments[9].copy_(scores.flatten())
            else:
                kernels.launch(name, grid, *arguments, **constants)

    kernels = selection._KERNELS
    monkeypatch.setattr(selection, "_KERNELS", OnlySelect())
    q, k = torch.zeros(1, tokens, 1, 4, device=DEVICE), torch.zeros(1, 32, 1, 4, device=DEVICE)
    chosen = selection.select_blocks(q, k, torch.zeros(1, 1, tokens, device=DEVICE), config)[0, :, 0].cpu()
    expected = select_blocks(scores, config)[0, 0].cpu()
    for t in range(tokens):
        taken = chosen[t][chosen[t] >= 0].tolist()
        assert len(set(taken)) == len(taken)
        assert sorted(taken) == expected[t].nonzero().flatten().tolist()
    values = scores[0, 0, 63].cpu()[chosen[63, 3:].long()].tolist()
    assert values == sorted(values, reverse=True)


def test_gradient_of_a_gate_alone():
    tensors, grad = inputs(20, heads=1, key_heads=1, dtype=torch.float32, device=DEVICE)
    tensors[4].requires_grad_()
    out = nsa(*tensors, compress="mean", impl="triton", **SMALL)
    (got,) = torch.autograd.grad(out, tensors[4], grad)
    wide = [x.detach().double() for x in tensors]
    wide[4].requires_grad_()
    expected = nsa(*wide, compress="mean", impl="reference", **SMALL)
    torch.testing.assert_close(
        got.double(), torch.autograd.grad(expected, wide[4], grad.double())[0], rtol=0, atol=1e-5
    )


@pytest.mark.parametrize(
    ("shape", "options", "reason"),
    [
        ({"width": 257, "dtype": torch.float32}, {}, "head sizes above 256"),
        ({"heads": 65, "key_heads": 1, "dtype": torch.float32}, {}, "groups of more than 64"),
        ({"dtype": torch.float64}, {}, "no float64 kernel"),
        ({"dtype": torch.float32}, {"compress_block": 68}, "compressed blocks of more than 16 strides"),
    ],
)
def test_unsupported_calls_are_refused_with_the_reason(shape, options, reason):
    tensors, _ = inputs(20, device=DEVICE, **shape)
    with pytest.raises(ArgumentError, match=reason):
        nsa(*tensors, compress="mean", impl="triton", **{**SMALL, **options})


# Shared memory (KiB) that the compiler takes on sm_90 for the largest selected_* kernel and block_importance.
@pytest.mark.parametrize(
    ("width", "group", "dtype", "options", "selected_KiB", "importance_KiB"),
    [
        (128, 4, torch.bfloat16, {}, 104.75, 94),
        (128, 4, torch.bfloat16, {"block_size": 256}, 200.75, 170),
        (256, 4, torch.bfloat16, {}, 128, 113),
        (256, 4, torch.bfloat16, {"block_size": 128}, 192, 177),
        (256, 4, torch.bfloat16, {"block_size": 256}, 320, 305),
        (256, 4, torch.float32, {}, 164, 96),
        (32, 64, torch.float32, {"block_size": 512}, 272, 72),
        (128, 4, torch.bfloat16, {"compress_block": 256}, 104.75, 186),
        (128, 4, torch.bfloat16, {"compress_stride": 4}, 104.75, 218),
        (128, 4, torch.bfloat16, {"compress_stride": 2, "compress_block": 4}, 104.75, 298),
    ],
)
def test_kernels_run_only_where_they_fit_into_shared_memory(
    width, group, dtype, options, selected_KiB, importance_KiB, monkeypatch
):
    monkeypatch.undo()  # the tiles of a GPU
    config = NSAConfig(**{**DEFAULT, "scale": 1.0, **options})
    for estimate, taken in (
        (selection.selected_shared_bytes(dtype, width, group, config), selected_KiB),
        (selection.importance_shared_bytes(dtype, width, group, config), importance_KiB),
    ):
        assert -16 <= taken - estimate / KiB <= 10
    with FakeTensorMode():
        q, k = (torch.empty(1, 1, heads, width, device="cuda") for heads in (group, 1))
    reason = autograd.why_not_kernels(q, k, dtype, config)
    assert (reason is None) == (max(selected_KiB, importance_KiB) <= 227)


# On a real GPU


def _record_selection(monkeypatch):
    """The blocks that the kernels select, for the reference: rounding may decide between almost equals."""
    kept = []
    select = selection.select_blocks

    def remember(*arguments):
        kept.append(select(*arguments))
        return kept[-1]

    monkeypatch.setattr(selection, "select_blocks", remember)
    return kept


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("tokens", "heads", "key_heads", "width", "dtype", "tolerance"),
    [
        (1024, 32, 8, 128, torch.bfloat16, 0.02),
        (1001, 64, 4, 128, torch.bfloat16, 0.02),
        (777, 4, 4, 64, torch.bfloat16, 0.02),
        (1337, 64, 1, 128, torch.float16, 0.005),
        (513, 6, 2, 80, torch.bfloat16, 0.02),
        (400, 4, 1, 256, torch.bfloat16, 0.02),
        (500, 4, 1, 64, torch.float32, 1e-4),
        (20, 4, 1, 64, torch.bfloat16, 0.02),
    ],
)
def test_gpu_agrees_with_the_reference(tokens, heads, key_heads, width, dtype, tolerance, monkeypatch):
    kept = _record_selection(monkeypatch)
    tensors, grad = inputs(tokens, heads, key_heads, width, dtype=dtype, device="cuda")
    weight = torch.randn(2, 32, device="cuda", dtype=dtype, requires_grad=True)
    for tensor in tensors:
        tensor.requires_grad_()
    out = nsa(*tensors, compress=learned(weight))
    wanted = [*tensors, weight]
    got = torch.autograd.grad(out, wanted, grad, retain_graph=True, allow_unused=True)
    again = torch.autograd.grad(out, wanted[:6], grad)
    assert all(torch.equal(a, b) for a, b in zip(got[:6], again, strict=True))

    wide = [x.detach().double().requires_grad_() for x in wanted]
    q, k, v, *gates, wide_weight = wide
    config = NSAConfig.create(width, **DEFAULT)
    ck, cv = compress_keys_and_values(k, v, learned(wide_weight), config)
    slots_BHTS = kept[0].permute(0, 2, 1, 3).long()
    blocks = config.blocks(tokens)
    chosen = torch.zeros((*slots_BHTS.shape[:3], blocks + 1), dtype=torch.bool, device="cuda")
    chosen = chosen.scatter_(-1, torch.where(slots_BHTS < 0, blocks, slots_BHTS), True)[..., :blocks]
    expected = reference(q, k, v, gates, ck, cv, config, chosen_BHTP=chosen)
    right = torch.autograd.grad(expected, wide, grad.double(), allow_unused=True)
    for name, a, b in zip(NAMES, (out, *got), (expected, *right), strict=True):
        if a is not None and b is not None and b.abs().max() > 0:
            assert (a.double() - b).abs().max() <= tolerance * b.abs().max(), name


@pytest.mark.gpu
def test_gpu_selects_as_the_reference():
    tensors, _ = inputs(1500, 8, 2, 64, dtype=torch.float32, device="cuda")
    out = nsa(*tensors, compress="mean", top_n=6)
    expected = nsa(*(x.double() for x in tensors), compress="mean", top_n=6, impl="reference")
    wrong = ((out.double() - expected).abs().amax((0, 2, 3)) > 1e-4).float().mean()
    assert wrong < 0.005  # tokens for which two blocks are equal within float32's rounding


@pytest.mark.gpu
def test_long_sequence_on_a_gpu():
    tokens, config = 65_536, NSAConfig.create(16, **DEFAULT)
    tensors, _ = inputs(tokens, 2, 1, 16, dtype=torch.float32, device="cuda")
    out = nsa(*tensors, compress="mean")
    q, k, v, *gates = (x.double() for x in tensors)
    whole = (q, k, v, *compress_keys_and_values(k, v, "mean", config), *gates)
    for start in (0, 30_000, tokens - 100):
        right = chunked._attend(chunked._slices(whole, start, start + 100, config), start, config)
        found = out[:, start : start + 100].double()
        wrong = ((found - right).abs().amax((0, 2, 3)) > 1e-4).float().mean()
        assert wrong <= 0.02  # tokens for which two blocks are equal within float32's rounding
