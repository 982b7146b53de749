"""The Triton kernels, in Triton's interpreter where there is no GPU: small cases of every kind."""

import pytest
import torch
from sparse_cases import ODD, SMALL, assert_close, call, inputs, learned

from oomph.errors import ArgumentError
from oomph.ops.sparse_attention import function, nsa
from oomph.ops.sparse_attention.banded import attend as banded
from oomph.ops.sparse_attention.gathered import attend as gathered
from oomph.ops.sparse_attention.pairs import index
from oomph.ops.sparse_attention.problem import Sizes
from oomph.ops.sparse_attention.reference import choose_blocks
from oomph.ops.sparse_attention.selection import select as selection
from oomph.ops.sparse_attention.tensors import Tile
from oomph.units import KiB

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch):
    """The interpreter's time goes with the number of programs: large tiles, but several of each kind."""
    if DEVICE == "cuda":
        return
    monkeypatch.setattr(banded, "tiles", lambda *_: banded.Tiles(*[Tile(32, 32, 4, 1)] * 3))
    monkeypatch.setattr(gathered, "_tiles", lambda *_: (Tile(64, 0, 4, 1),) * 3)
    monkeypatch.setattr(gathered, "_ROWS_ADDED", 128)
    monkeypatch.setattr(selection, "_tile", lambda *_: Tile(128, 64, 4, 1))


@pytest.fixture
def _many_segments(monkeypatch):
    """Segments of 16 tokens, and no more than 16 pairs x heads of a block at a time."""
    monkeypatch.setattr(index, "_ALIGNED", 16)
    monkeypatch.setattr(gathered, "_ROWS_OF_LONG_PIECE", 16)
    monkeypatch.setattr(selection, "segment_tokens", lambda *_: 32)


def compare(tokens, tolerance=1e-5, dtype=torch.float32, options=SMALL, **shape):
    case = inputs(tokens, device=DEVICE, **shape)
    case = ([x.to(dtype).double() for x in case[0]], case[1])
    got = call(*case, "triton", dtype=dtype, **options)
    assert got[0].dtype == dtype
    assert_close(got, call(*case, "reference", **options), tolerance)


@pytest.mark.usefixtures("_many_segments")
def test_all_gradients_agree_over_segments_and_pieces_of_work():
    compare(71, heads=2, key_heads=1)


def test_a_group_that_is_no_power_of_two_and_sizes_that_are_none_agree():
    compare(61, options=ODD, heads=3, key_heads=1, width=20)


def test_a_batch_of_one_head_each_agrees_before_anything_can_be_compressed():
    compare(7, heads=2, key_heads=2, batch=2)


def test_half_precision_loses_no_more_than_its_rounding():
    # All blocks selected: rounded scores cannot change the choice.
    compare(40, 4e-3, torch.float16, {**SMALL, "top_n": 9}, heads=2, key_heads=1)


def test_a_token_changes_nothing_before_it():
    tensors, _ = inputs(40, heads=1, key_heads=1, dtype=torch.float32, device=DEVICE)
    weight = torch.randn(2, 8, device=DEVICE)
    before = nsa(*tensors, compress=learned(weight), impl="triton", **SMALL)
    for x in tensors:
        x[:, 32:] = 3 * torch.randn_like(x[:, 32:])
    after = nsa(*tensors, compress=learned(weight), impl="triton", **SMALL)
    torch.testing.assert_close(after[:, :32], before[:, :32])


def test_all_lengths_that_the_window_covers_share_their_kernels():
    sizes = Sizes(64, 32, 16, 16, 512, 1.0)
    bands = {function._window(torch.empty(1, tokens, 1, 1), sizes) for tokens in (1, 100, 511, 512)}
    assert bands == {banded.Band()}
    assert function._window(torch.empty(1, 513, 1, 1), sizes) == banded.Band(window=512)


@pytest.mark.parametrize("widest", [16, 2048])
def test_the_largest_importances_are_taken_in_order_and_the_lower_index_where_equal(widest, monkeypatch):
    monkeypatch.setattr(selection, "_WIDEST_ROW", widest)
    sizes = Sizes(2, 2, 2, 7, 1, 1.0)
    tokens = 64
    make = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 5, (1, 1, tokens, 32), generator=make).float().to(DEVICE)  # many are equal

    class OnlySelect:
        def launch(self, name, grid, *arguments, **constants):
            if name == "importance":
                arguments[9].copy_(scores.flatten())
            else:
                kernels.launch(name, grid, *arguments, **constants)

    kernels = selection._KERNELS
    monkeypatch.setattr(selection, "_KERNELS", OnlySelect())
    q, k = torch.zeros(1, tokens, 1, 4, device=DEVICE), torch.zeros(1, 32, 1, 4, device=DEVICE)
    chosen = selection.select(q, k, torch.zeros(1, 1, tokens, device=DEVICE), sizes)[0, :, 0].cpu()
    expected = choose_blocks(scores, sizes)[0, 0].cpu()
    for t in range(tokens):
        taken = chosen[t][chosen[t] >= 0].tolist()
        assert len(set(taken)) == len(taken)
        assert sorted(taken) == expected[t].nonzero().flatten().tolist()
    values = scores[0, 0, 63].cpu()[chosen[63, 3:].long()].tolist()
    assert values == sorted(values, reverse=True)


@pytest.mark.parametrize("stretches", [1, 3])
def test_the_index_lists_each_pair_under_its_block_in_the_order_of_tokens(stretches, monkeypatch):
    monkeypatch.setattr(index, "_STRETCHES", stretches)
    monkeypatch.setattr(index, "_ALIGNED", 1)
    sizes = Sizes(8, 8, 8, 4, 1, 1.0)
    tokens, slots = 50, 4
    make = torch.Generator().manual_seed(0)
    chosen = torch.stack([torch.randperm(7, generator=make)[:slots] for _ in range(2 * tokens)])
    chosen = chosen.view(1, tokens, 2, slots).int()
    chosen[0, 3, 1, 2] = -1
    found = index.make_index(chosen.to(DEVICE), sizes)
    assert found.stretches == stretches
    pairs, starts = found.pairs_ZP.cpu(), found.starts_ZS.cpu()[:, ::stretches]
    for head in range(2):
        for block in range(7):
            listed = pairs[head, starts[head, block] : starts[head, block + 1]].tolist()
            expected = [
                t * slots + s for t in range(tokens) for s in range(slots) if chosen[0, t, head, s] == block
            ]
            assert listed == expected


def test_work_covers_every_pair_once_in_pieces_that_are_not_too_long(monkeypatch):
    monkeypatch.setattr(index, "_STRETCHES", 5)
    monkeypatch.setattr(index, "_ALIGNED", 1)
    sizes = Sizes(8, 8, 8, 4, 1, 1.0)
    make = torch.Generator().manual_seed(1)
    chosen = torch.stack([torch.randperm(7, generator=make)[:4] for _ in range(50)]).view(1, 50, 1, 4).int()
    found = index.make_index(chosen.to(DEVICE), sizes)
    of_segments = index.work_of_segments(found, 4, 20, 3)
    assert of_segments.block.shape[0] == 3
    for work in (of_segments, index.work_of_all(found, 4, 50, 3)):
        block, first, last = (x.cpu().flatten() for x in (work.block, work.first, work.last))
        real = block >= 0
        assert (last - first)[real].max() <= 3
        covered = [pair for a, b in zip(first[real], last[real], strict=True) for pair in range(a, b)]
        assert sorted(covered) == list(range(200))


def test_frozen_keys_cost_no_gradient_and_gates_alone_may_be_trained():
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
def test_kernels_say_what_they_cannot_run(shape, options, reason):
    tensors, _ = inputs(20, device=DEVICE, **shape)
    with pytest.raises(ArgumentError, match=reason):
        nsa(*tensors, compress="mean", impl="triton", **{**SMALL, **options})


# In KiB what the compiler for sm_90 takes for the largest kernel of the gathered part, and of the selection.
@pytest.mark.parametrize(
    ("width", "group", "dtype", "options", "gathered_KiB", "selection_KiB"),
    [
        (128, 4, torch.bfloat16, {}, 104.75, 94),
        (128, 4, torch.bfloat16, {"block": 256}, 200.75, 170),
        (256, 4, torch.bfloat16, {}, 128, 113),
        (256, 4, torch.bfloat16, {"block": 128}, 192, 177),
        (256, 4, torch.bfloat16, {"block": 256}, 320, 305),
        (256, 4, torch.float32, {}, 164, 96),
        (32, 64, torch.float32, {"block": 512}, 272, 72),
        (128, 4, torch.bfloat16, {"span": 256}, 104.75, 186),
        (128, 4, torch.bfloat16, {"stride": 4}, 104.75, 218),
        (128, 4, torch.bfloat16, {"stride": 2, "span": 4}, 104.75, 298),
    ],
)
def test_the_kernels_are_taken_only_where_they_fit(
    width, group, dtype, options, gathered_KiB, selection_KiB, monkeypatch
):
    monkeypatch.undo()  # the tiles of a GPU
    sizes = Sizes(
        **{"block": 64, "span": 32, "stride": 16, "top_n": 16, "window": 512, "scale": 1.0, **options}
    )
    for room, taken in (
        (gathered.shared_bytes(dtype, width, group, sizes), gathered_KiB),
        (selection.shared_bytes(dtype, width, group, sizes), selection_KiB),
    ):
        assert -16 <= taken - room / KiB <= 10
    q, k = torch.empty(1, 1, group, width, device=DEVICE), torch.empty(1, 1, 1, width, device=DEVICE)
    objection = function.why_not_kernels(q, k, dtype, sizes)
    assert (objection is None) == (max(gathered_KiB, selection_KiB) <= 227)
