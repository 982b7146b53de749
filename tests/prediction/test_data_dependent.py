"""Ops whose memory depends on values, and linear algebra: against an H200 with torch 2.11."""

import json

import pytest
import torch
import torch.nn.functional as F
from benchmarks import RESULTS
from benchmarks.accuracy.kernels import KERNELS
from small_programs import in_trace, notes_of
from torch import nn

import oomph
from oomph.errors import ProgramError
from oomph.prediction.tracer.values import DATA_DEPENDENT_RESULTS, Assumptions, assuming

aten = torch.ops.aten
in_process = pytest.mark.usefixtures("in_process")
ROWS = json.loads((RESULTS / "kernels_h200_torch2.11.json").read_text())
GROUP = list(ROWS)[list(ROWS).index("nonzero all") :]
LINEAR_ALGEBRA = ["irfft2", "eigh", "eigh small", "eigvalsh", "svd", "qr", "cholesky_solve"]
# Measured with other random values than the trace draws.
DRAWN = {"index rows by mask bf16", "index by mask half", "repeat_interleave counts", "repeat_interleave ids"}


@pytest.mark.parametrize("name", GROUP + LINEAR_ALGEBRA)
@in_process
def test_the_prediction_is_what_was_measured(name):
    measured = ROWS[name]["steps"][-1][0]
    predicted = oomph.predict(KERNELS[name], gpu="h200").steps[-1].allocated
    assert predicted == pytest.approx(measured, rel=2e-2 if name in DRAWN else 5e-4)


def test_cumprod_takes_the_longer_way_back_where_an_element_is_zero():
    """The measured input has a zero."""
    interval = oomph.predict(KERNELS["cumprod"], gpu="h200").interval
    assert interval is not None
    measured = ROWS["cumprod"]["steps"][-1][0]
    assert interval.low.allocated < measured

    def program(zeros):
        x = torch.arange(0 if zeros else 1, 1024 * 64 + (0 if zeros else 1), device="cuda").float()
        x = x.view(1024, 64).requires_grad_()
        x.cumprod(-1).sum().backward()

    with_zeros, without = (oomph.predict(lambda flag=flag: program(flag)) for flag in (True, False))
    assert with_zeros.interval is without.interval is None
    assert with_zeros.peak.allocated > without.peak.allocated


@in_trace(lambda found: "depends on values" not in notes_of(found))
def test_values_written_into_parts_of_an_uninitialized_tensor_are_known():
    graph = torch.tensor([0, 0, 0, 1, 2, 2]).cuda()  # of each node
    x = torch.ones(6, 4, device="cuda")
    count = torch.zeros(3, dtype=torch.long, device="cuda").scatter_add_(0, graph, torch.ones_like(graph))
    first = count.new_empty(4)
    first.narrow(0, 0, 1).zero_()
    torch.cumsum(count, dim=0, out=first.narrow(0, 1, 3))
    position = torch.arange(6, device="cuda") - first[graph] + graph * int(count.max())
    mask = torch.zeros(9, dtype=torch.bool, device="cuda")
    mask[position] = True
    assert torch.ones(9, 4, device="cuda")[mask].shape == x.shape
    assert first[-1].item() == 6


@in_process
def test_large_values_that_sizes_depend_on_are_computed_from_the_data():
    """Pairs of points within a radius, and masks of lengths; both too large to follow through every op."""
    points = torch.rand(2000, 3, generator=torch.Generator().manual_seed(0))
    near = (points[:, None] - points[None]).norm(dim=-1) < 0.1
    counts = {order: int((torch.cdist(points, points, order) < 0.1).sum()) for order in (1.0, 2.0)}
    lengths = torch.arange(1, 3001)

    def program():
        moved = points.to("cuda")
        pairs = ((moved[:, None] - moved[None]).norm(dim=-1) < 0.1).nonzero()
        assert len(pairs) == int(near.sum())
        for order in (1.0, 2.0):  # kernels of their own
            assert len((torch.cdist(moved, moved, order) < 0.1).nonzero()) == counts[order]
        mask = torch.arange(3000, device="cuda") < lengths.to("cuda")[:, None]
        assert len(torch.ones(9_000_000, device="cuda")[mask.view(-1)]) == int(lengths.sum())
        assert mask.sum().item() == int(lengths.sum())
        edges = torch.stack([torch.arange(800_000), torch.arange(800_000) + 800_000])
        edges = torch.cat([edges, edges.flip(0)], dim=1).to(
            "cuda"
        )  # made on the host, too large for real data
        forth = edges[:, edges[0] < edges[1]]
        assert forth.shape == (2, 800_000)
        assert len(forth[:, :100].unique()) == 200
        changed = moved * 1
        distances = (changed[:, None] - changed[None]).norm(dim=-1)
        distances.exponential_()
        assert len((distances < 0.1).nonzero()) != int(near.sum())

    assert "depends on values" in notes_of(oomph.predict(program, gpu="h200"))  # of the random distances


def _selected(points):
    points = points * 2
    points -= 0.5
    parts = torch.zeros(len(points), 3, device=points.device)
    parts[:, 0] = points[:, 1]
    parts[:, 1:2] = points[:, :1].clamp(max=0.5)
    return points[(parts @ parts.T.new_ones(3, 1))[:, 0] > 0.4]


@pytest.mark.parametrize("rows", [1000, 200_000])
@in_process
def test_masks_follow_from_data_that_is_written_into_parts_of_tensors(rows):
    points = torch.arange(3 * rows).view(rows, 3) * 0.37 % 1
    selected = len(_selected(points))
    found = []
    assert "depends on values" not in notes_of(oomph.predict(lambda: found.append(_selected(points.cuda()))))
    assert [len(each) for each in found] == [selected]


@in_trace(lambda found: found.interval.low.allocated < found.peak.allocated < found.interval.high.allocated)
def test_random_numbers_and_parameters_made_of_data_give_shares():
    n = 1 << 18
    wide = torch.empty(n, device="cuda").uniform_(-1, 1)
    assert len(wide[wide > 0.8]) == pytest.approx(0.1 * n, rel=0.02)
    normal = torch.randn(n, device="cuda") * 2 + 1
    assert len(normal[normal > 2]) == pytest.approx(0.3085 * n, rel=0.02)
    positions = nn.Parameter(torch.arange(1000.0).cuda())
    sizes = nn.Parameter(torch.empty(1000, device="cuda").log_normal_().log())  # as an unknown 1.0 gives
    optimizer = torch.optim.Adam([positions, sizes])
    for _ in range(3):
        near = positions[positions < 300]
        assert len(near) == 300
        inside = sizes[positions + sizes.exp() < 300]
        assert len(inside) == 299
        (near.sum() + inside.sum()).backward()
        optimizer.step()


@in_trace(lambda found: "depends on values" not in notes_of(found))
def test_parameters_that_are_not_trained_keep_the_data_that_they_are_made_of():
    schedule = nn.Parameter(torch.linspace(-10, 10, 1001), requires_grad=False)
    position = torch.round(torch.zeros(1, 1) * 1000).long()
    assert schedule[position].sigmoid().item() == pytest.approx(4.54e-5, rel=1e-3)
    assert schedule.cuda()[-1].item() == 10


@in_process
def test_a_trained_number_has_the_value_that_it_starts_with():
    """As a span of attention that is learned and cuts the keys."""

    def program(start):
        span = nn.Parameter(torch.zeros(8, 1, 1) + start)
        model = nn.Module()
        model.span = span
        model.cuda()
        x = torch.ones(1024, 1024, device="cuda", requires_grad=True)
        (x[: 1024 - int(model.span.max().item() * 1000)] * 2).sum().backward()

    low, high = (oomph.predict(lambda start=start: program(start)).peak.allocated for start in (1.0, 0.0))
    assert high - low > 2**21


@in_trace(lambda found: "depends on values" not in notes_of(found))
def test_large_targets_that_are_made_on_the_host_have_what_was_written_into_them():
    """As detectors match boxes of an image at a time with the truth."""
    for made in (torch.zeros(16, 50_000, dtype=torch.int64), torch.LongTensor(16, 50_000).zero_()):
        for image in range(16):
            made[image] = torch.arange(50_000) < image
        positive = made.cuda() > 0
        assert len(positive.nonzero()) == sum(range(16))
        both = positive.unsqueeze(2).expand(16, 50_000, 2)
        assert torch.ones(16, 50_000, 2, device="cuda")[both].view(-1, 2).shape == (sum(range(16)), 2)


@in_trace(lambda found: "values that are assumed" in notes_of(found))
def test_of_unknown_boxes_and_known_ones_together_the_known_ones_match():
    """A detector adds the true boxes to those it proposes, which overlap none before it is trained."""
    true = torch.tensor([[2.0, 2, 8, 8], [10, 10, 40, 40], [20, 5, 30, 9]], device="cuda")
    proposed = nn.Linear(4, 4, device="cuda")(torch.randn(1000, 4, device="cuda"))
    boxes = torch.cat([proposed.detach(), true])
    corners = torch.maximum(boxes[:, None, :2], true[:, :2]), torch.minimum(boxes[:, None, 2:], true[:, 2:])
    shared = (corners[1] - corners[0]).clamp(min=0).prod(-1)
    areas = [(each[:, 2:] - each[:, :2]).prod(-1) for each in (boxes, true)]
    overlap, _ = (shared / (areas[0][:, None] + areas[1] - shared)).max(dim=1)
    assert len(boxes[overlap >= 0.5]) == 3
    assert len(boxes[overlap < 0.5]) == 1000


@in_trace(lambda found: "depends on values" not in notes_of(found))
def test_a_mask_that_is_expanded_for_every_query_is_followed():
    """As Longformer and LED make their masks: a row for each query, of which they take the first."""
    kept = torch.zeros(4, 8192, dtype=torch.int64, device="cuda")
    kept[:, 0] = 1
    expanded = kept[:, None, None, :].expand(4, 1, 8192, 8192).float()
    inverted = 1.0 - expanded
    mask = inverted.masked_fill(inverted.bool(), torch.finfo(torch.float32).min) * inverted
    assert len((mask[:, 0, 0, :] == 0).nonzero()) == 4
    assert len((mask[:, 0, 5, :] < 0).nonzero()) == 4 * 8191
    filled = inverted.masked_fill(kept.bool()[:, None, None, :].expand(4, 1, 8192, 8192), -1.0)
    assert len((filled[:, 0, 5, :] < 0).nonzero()) == 4


@in_trace(lambda found: "taken as 1" in notes_of(found))
def test_large_matrices_are_not_multiplied_for_a_number_that_is_read():
    positions = torch.arange(1200, device="cuda")
    differences = (positions[:, None] - positions).float()
    assert differences.sum().item() == 0
    assert (differences @ differences).sum().item() == 1


@in_trace(lambda found: "depends on values" not in notes_of(found))
def test_a_tensor_whose_data_is_assigned_has_the_values_of_the_data():
    ids, large = (torch.zeros(size, dtype=torch.int64, device="cuda") for size in (4, 1200**2))
    ids.data = torch.full((4,), 5, device="cuda")
    assert ids.sum().item() == 20
    positions = torch.arange(1200, device="cuda")
    large.data = (positions[:, None] - positions).view(-1)
    assert len(torch.ones(1200**2, device="cuda")[large == 0]) == 1200


@in_trace(lambda found: not any(each.dtype == "int64" for each in found.allocations))
def test_a_number_assigned_by_a_mask_needs_no_indices_in_backward_either():
    x = torch.randn(512, 512, device="cuda", requires_grad=True) * 1
    x[x > 0.5] = 0
    x.sum().backward()


@in_trace(lambda found: "depends on values" in notes_of(found))
def test_large_values_made_of_some_that_are_written_later_are_guessed():
    positions = torch.arange(1200, device="cuda")
    products = positions[:, None] * positions
    row = positions.expand(1200, 1200) + 0
    positions.zero_()
    assert len(torch.ones(1200, device="cuda")[products[1] == 0]) > 0
    assert row[0].sum().item() > 0


@in_trace(lambda found: "depends on values" not in notes_of(found))
def test_known_values_give_exact_sizes_without_a_note():
    x = torch.randn(6, 4, device="cuda")
    ids = torch.tensor([0, 3, 3, 1, 5, 3]).cuda()
    mask = torch.arange(6, device="cuda") < 2
    found = [
        x.repeat_interleave(ids, dim=0), x[mask], x[:, torch.arange(4, device="cuda") > 2], ids.unique(),
        ids.unique_consecutive(), ids.view(3, 2).unique(dim=0), torch.bincount(ids), F.one_hot(ids),
        mask.nonzero(), torch.masked_select(x, mask[:, None]), torch.argwhere(mask),
        *torch.unique(ids, return_inverse=True, return_counts=True),
    ]  # fmt: skip
    assert [tuple(each.shape) for each in found] == [
        (15, 4), (2, 4), (6, 1), (4,), (5,), (3, 2), (6,), (6, 6), (2, 1), (8,), (2, 1), (4,), (6,), (4,),
    ]  # fmt: skip


@in_trace()
def test_positions_and_random_ids_are_in_their_range():
    logits = torch.randn(64, 10, device="cuda")
    best = logits.topk(2, dim=-1).indices
    assert best.shape == (64, 2)
    assert (best[:, 0] != best[:, 1]).all()
    assert torch.bincount(best.flatten()).tolist() == pytest.approx([12.8] * 10, abs=1)
    assert F.one_hot(logits.argmax(dim=0)).shape == (10, 42)  # 10 ids from the middle of 64
    drawn = torch.randint(1, 7, (100,), device="cuda").to(torch.int32)
    assert 1 <= drawn.min() <= drawn.max() < 7
    assert 250 < len(drawn.repeat_interleave(drawn)) < 450
    assert sorted(torch.randperm(50, device="cuda").tolist()) == list(range(50))
    assert 400 < torch.rand(1000, device="cuda").lt(0.5).sum() < 600
    many = torch.randint(0, 1000, (2048, 1024), device="cuda")
    assert F.one_hot(many[:2], 1000).shape == (2, 1024, 1000)
    assert torch.bincount(many.flatten()).shape == (1000,)
    assert 0.1 < len(many[many < 200]) / many.numel() < 0.3
    order = torch.randn(1 << 33, device="cuda").sort().indices  # more than the host could hold
    assert 0.4 < len(order[order < (1 << 32)]) / len(order) < 0.6


@in_trace(lambda found: "repeat_interleave" in notes_of(found))
def test_repeats_by_counts_of_tokens_give_one_row_per_token():
    chosen = torch.randn(64, 8, device="cuda").topk(2, dim=-1).indices
    experts = torch.arange(8, device="cuda")
    for counts in (
        torch.bincount(chosen.flatten(), minlength=8),
        F.one_hot(chosen, 8).sum(dim=(0, 1)),
        chosen.flatten().unique(return_counts=True)[1][:8],
    ):
        assert experts.repeat_interleave(counts.to(torch.int32)).shape == (128,)


@in_trace(lambda found: "follows from values that are assumed" in notes_of(found))
def test_one_mask_selects_the_same_number_of_elements_each_time():
    x = torch.randn(64, 16, device="cuda", requires_grad=True)
    out = torch.zeros_like(x)
    experts = F.one_hot(torch.randn(64, 4, device="cuda").argmax(-1), 4).bool()
    sizes = []
    for expert in range(4):
        mask = experts[:, expert]
        out[mask] = out[mask] + x[experts[:, expert]]
        sizes.append(len(x[mask]))
    assert sum(sizes) == 64
    out.sum().backward()


@pytest.mark.parametrize("pairs", [64, 256])
@in_trace(lambda found: "depends on values" not in notes_of(found))
def test_what_a_known_mask_selects_is_known(pairs):
    """The pairs of a contrastive loss, as SimCLR selects them."""
    ids = torch.arange(pairs).repeat(2)
    labels = (ids[None] == ids[:, None]).float().cuda()
    others = ~torch.eye(2 * pairs, dtype=torch.bool, device="cuda")
    labels = labels[others].view(2 * pairs, -1)
    similarity = torch.randn(2 * pairs, 2 * pairs, device="cuda")[others].view(2 * pairs, -1)
    assert similarity[labels.bool()].shape == (2 * pairs,)
    assert similarity[~labels.bool()].view(2 * pairs, -1).shape == (2 * pairs, 2 * pairs - 2)


@in_trace(lambda found: "failed" not in notes_of(found))
def test_a_one_hot_mask_selects_one_element_of_every_row():
    x = torch.randn(128, 5000, device="cuda")
    labels, rows = torch.randint(0, 5000, (128,), device="cuda"), torch.arange(128, device="cuda")
    written = torch.zeros_like(x)
    written[rows, labels] = 1
    scattered = torch.zeros_like(x).scatter_(1, labels[:, None], 1.0)
    for mask in (written == 1, scattered.bool(), F.one_hot(labels, 5000).bool()):
        assert x[mask].shape == (128,)
    many = torch.randint(0, 5, (1 << 20,), device="cuda")
    assert F.one_hot(many, 5).sum(dim=0).tolist() == [round((1 << 20) / 5)] * 5


@pytest.mark.parametrize("size", [1000, 1 << 18])
@in_trace()
def test_elements_that_an_unknown_mask_selects_are_distinct(size):
    """As samplers of detectors do: choose some of the selected, then make a mask of the chosen."""
    scores = nn.Linear(8, 1, device="cuda")(torch.randn(size, 8, device="cuda"))[:, 0]
    selected = torch.where(scores > 0)[0]
    chosen = selected[torch.randperm(selected.numel(), device="cuda")[:64]]
    mask = torch.zeros_like(scores, dtype=torch.bool)
    mask[chosen] = True
    assert torch.where(mask)[0].shape == (64,)


@pytest.mark.parametrize("sizes", ["fewest", "typical", "most"])
@in_process
def test_an_unknown_mask_that_is_written_into_another_selects_as_many_there(sizes):
    """Detectors keep some of the anchors that lie in a box, and select them by both masks."""

    def program():
        scores = nn.Linear(8, 1, device="cuda")(torch.randn(1000, 8, device="cuda"))[:, 0]
        inside = torch.arange(1000, device="cuda") % 4 == 0
        chosen = scores[inside] > 0
        inside[inside.clone()] = chosen
        assert scores[inside].shape == scores[: len(chosen)][chosen].shape

    with assuming(Assumptions(sizes=sizes)):
        oomph.predict(program)


@in_trace()
def test_bounds_beyond_one_select_nearly_all_or_nearly_none_of_unknown_numbers():
    x = nn.Linear(64, 64, device="cuda")(torch.randn(4096, 64, device="cuda"))
    inside = (x >= -3) & (x <= 3)
    assert len(x[inside]) > 0.99 * x.numel()
    assert len(x[~inside]) < 0.01 * x.numel()
    assert len(x[x > 0.5]) == x.numel() / 2


@in_trace()
def test_an_unknown_mask_selects_as_much_of_every_row():
    x = torch.randn(8, 511, device="cuda")
    assert x[x > 0].view(8, -1).shape == (8, 256)
    for columns in (1, 2):  # too few to select as many of each
        x = torch.randn(64, columns, device="cuda")
        assert len(x[x > 0]) == 32 * columns
        assert len(torch.where(torch.randint(0, 64, (1 << 16, columns), device="cuda") == 3)[0]) < 1 << 13


@in_trace()
def test_masks_of_the_host_select_what_they_select():
    x = torch.randn(64, 16, device="cuda")
    mask = torch.arange(64) < 5
    assert x[mask].shape == (5, 16)
    assert x.cpu()[mask].shape == (5, 16)
    assert x.cpu()[(x > 0).cpu()].shape == (32 * 16,)
    assert x.cpu().masked_select(mask[:, None]).shape == (5 * 16,)


@in_trace()
def test_values_say_how_many_elements_an_unknown_mask_selects():
    """Fewer values than the mask has elements are no error of the program."""
    text = torch.randn(32, 8, device="cuda", requires_grad=True)
    image = torch.randn(5, 8, device="cuda", requires_grad=True)
    mask = torch.rand(32, device="cuda") < 0.2
    text.masked_scatter(mask[:, None], image).sum().backward()
    assert image.grad.shape == image.shape
    text.detach()[mask] = image.detach()
    assert len(mask.nonzero()) == 5
    text.index_put((mask,), image, accumulate=True).sum().backward()


@in_trace(lambda found: "depends on values" in notes_of(found))
def test_values_and_their_places_may_be_guessed_differently():
    """As in LED, which assigns what one mask selects to where another one does."""
    x = torch.randn(64, 16, device="cuda", requires_grad=True)
    some, others = torch.randn(64, device="cuda") > 0.5, torch.randn(32, device="cuda") > 0.5
    out = torch.zeros(64, 16, device="cuda")
    out[some.nonzero(as_tuple=True)] = x[:32][others.nonzero(as_tuple=True)]
    out.sum().backward()
    assert x.grad.shape == x.shape


def test_a_mask_of_another_shape_is_an_error_of_the_program():
    def program():
        torch.randn(4, 4, device="cuda")[torch.rand(3, device="cuda") < 0.5]

    with pytest.raises(ProgramError, match=r"IndexError: .* mask \[3\] at index 0"):
        oomph.predict(program, gpu="h200")


@in_trace()
def test_results_are_written_into_out():
    mask = torch.randn(64, device="cuda") < 0.5
    out = torch.empty(0, dtype=torch.int64, device="cuda")
    torch.nonzero(mask, out=out)
    assert out.shape == (32, 1)
    selected = torch.empty(0, device="cuda")
    torch.masked_select(torch.ones(64, device="cuda"), mask, out=selected)
    assert selected.shape == (32,)


def test_every_aten_op_of_dynamic_shape_has_a_rule():
    dynamic = []
    for name in dir(aten) + torch._C._dispatch_get_all_op_names():
        packet = getattr(aten, name.removeprefix("aten::").partition(".")[0], None)
        for overload in packet.overloads() if hasattr(packet, "overloads") else ():
            if torch.Tag.dynamic_output_shape in getattr(packet, overload).tags:
                dynamic.append(packet)
    # argwhere is nonzero; one_hot has a rule above autograd.
    assert set(dynamic) - set(DATA_DEPENDENT_RESULTS) == {aten.argwhere, aten.one_hot}


def test_an_op_without_a_rule_is_estimated_with_a_note():
    @torch.library.custom_op("oomph_test::positive", mutates_args=())
    def positive(x: torch.Tensor) -> torch.Tensor:  # the schema of the op
        return x[x > 0]

    @positive.register_fake
    def _(x):
        return x.new_empty((torch.library.get_ctx().new_dynamic_size(),))

    def program():
        assert positive(torch.randn(8, 8, device="cuda")).shape == (8, 8)

    notes = notes_of(oomph.predict(program, gpu="h200"))
    assert "oomph_test.positive" in notes
    assert "as large as the first argument" in notes


@pytest.mark.parametrize("further", [(), (3,)])
def test_a_mask_selects_what_the_shape_of_its_result_says(further):
    def program():
        layer = nn.Linear(20, 20, device="cuda")
        for batch in (16, 4):
            x = torch.ones(batch, 20, 20, *further, device="cuda", requires_grad=True)
            mask = layer(torch.randn(batch, 20, 20, device="cuda")) > 0
            x[mask].view(batch, 18, 18, *further).sum().backward()

    assert oomph.predict(program).interval is None


@in_trace()
def test_a_router_reaches_every_expert():
    scores = nn.Linear(64, 16, device="cuda")(torch.randn(512, 64, device="cuda"))
    chosen = nn.functional.one_hot(scores.topk(2).indices, 16).permute(2, 1, 0)
    reached = (chosen.sum(dim=(-1, -2)) > 0).nonzero()
    assert len(reached) == 16
    scores.sum().backward()


def assigned(scores, taken):
    scores[taken] = -torch.inf
    return scores


DECODERS = {
    "greedy": lambda scores, free: scores.masked_fill(~free, -torch.inf).argmax(-1),
    "in place": lambda scores, free: (
        scores.clone().masked_fill_(~free, -torch.inf).log_softmax(-1).argmax(-1)
    ),
    "assigned": lambda scores, free: assigned(scores.clone(), ~free).argmax(-1),
    "where": lambda scores, free: torch.where(free, scores, -torch.inf).max(-1).indices,
    "added": lambda scores, free: (scores + torch.zeros_like(scores).masked_fill(~free, -1e9)).argmax(-1),
    "sampled": lambda scores, free: torch.distributions.Categorical(
        logits=scores.masked_fill(~free, -torch.inf) / 0.5
    ).sample(),
    "top k": lambda scores, free: scores.masked_fill(~free, -torch.inf).topk(2).indices[:, 1],
    "sorted": lambda scores, free: (-scores).masked_fill(~free, torch.inf).sort(-1).indices[:, 0],
}


@pytest.mark.parametrize("cities", [16, 4096], ids=["small", "large"])
@pytest.mark.parametrize("choose", DECODERS)
@in_trace()
def test_what_is_filled_with_minus_infinity_is_not_chosen(choose, cities):
    """A tour that visits no city twice."""
    model, free = nn.Linear(8, cities, device="cuda"), torch.ones(64, cities, dtype=torch.bool, device="cuda")
    free = free.scatter(1, torch.randint(cities, (64, 1), device="cuda"), False)
    for _ in range(4):
        scores = model(torch.randn(64, 8, device="cuda"))
        selected = DECODERS[choose](scores, free)
        assert free.gather(1, selected[:, None]).all()
        assert len(selected.unique()) > 4
        free = free.scatter(1, selected[:, None], False)
    assert (free.sum(-1) == cities - 5).all()
    scores.sum().backward()


@pytest.mark.parametrize("known", [False, True], ids=["samples", "whole"])
@in_trace()
def test_an_unknown_mask_selects_some_elements_even_if_examples_of_its_values_are_alike(known):
    """Points, which are alike in a trace, in a part of an image."""
    x = nn.Linear(2, 2, device="cuda")(torch.randn(64, 2, device="cuda"))
    points = torch.stack([x[:, 0] * 30, x[:, 1] * 50], dim=-1)
    if known:
        points = points + torch.full((64, 2), 3.0, device="cuda")
    inside = (points - 5 < 20).all(dim=-1) & (points[:, 0] > 10)
    assert len(points[inside]) > 0
    points.sum().backward()


@pytest.mark.parametrize("use", ["selected + x", "x[selected[:, 0] > 0]", "torch.cat([selected, x], dim=1)"])
def test_a_mask_selects_all_where_the_program_needs_as_many(use):
    """As a renderer whose points all lie before the camera."""

    def program():
        x = torch.randn(64, 20, device="cuda", requires_grad=True)
        selected = x[nn.Linear(20, 1, device="cuda")(x)[:, 0] > 0]
        eval(use, {"x": x, "selected": selected, "torch": torch}).sum().backward()
        assert len(selected) == 64

    oomph.predict(program)


def test_a_mask_selects_all_where_as_many_are_written():
    def program():
        x = torch.randn(64, 20, device="cuda", requires_grad=True)
        kept = x.detach().clone()
        kept[nn.Linear(20, 1, device="cuda")(x)[:, 0] > 0] = torch.ones(64, 20, device="cuda")
        (kept * x).sum().backward()

    assert oomph.predict(program).interval is None


def test_a_wrong_shape_of_what_a_known_mask_selects_is_the_programs_error():
    def program():
        mask = torch.arange(8, device="cuda") > 3
        torch.ones(8, device="cuda")[mask].view(5)

    with pytest.raises(ProgramError, match="input of size 4"):
        oomph.predict(program)


@in_trace()
def test_the_best_nodes_of_each_graph_are_as_many_as_their_share():
    """As graph pooling selects them, by where the nodes of each graph begin: at 0 and at sums of guesses."""
    scores = nn.Linear(8, 1, device="cuda")(torch.randn(100, 8, device="cuda")).view(-1)
    graph = torch.arange(4, device="cuda").repeat_interleave(torch.tensor([30, 10, 40, 20], device="cuda"))
    for kept in (50, 26, 14):  # 15 + 5 + 20 + 10, 8 + 3 + 10 + 5, 4 + 2 + 5 + 3
        nodes = torch.zeros(4, dtype=torch.long, device="cuda").scatter_add_(0, graph, torch.ones_like(graph))
        order = scores.argsort(descending=True)
        by_graph, stable = graph[order].sort(stable=True)
        first = torch.cat([nodes.new_zeros(1), nodes.cumsum(0)])
        if kept == 14:
            first = nodes.new_empty(5)
            first[:1] = 0
            torch.cumsum(nodes, 0, out=first[1:])
        position = torch.arange(len(graph), device="cuda") - first[by_graph]
        best = order[stable[position < (nodes.float() * 0.5).ceil().long()[by_graph]]]
        scores, graph = scores[best], graph[best]
        assert (len(best), int(graph.max())) == (kept, 3)
    scores.sum().backward()


@in_trace()
def test_sequences_are_packed_by_lengths_that_were_on_the_gpu():
    module = nn.LSTM(4, 8, batch_first=True, bidirectional=True, device="cuda")
    x, lengths = torch.randn(3, 9, 4, device="cuda"), torch.tensor([2, 9, 5]).cuda()
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
    output, _ = nn.utils.rnn.pad_packed_sequence(module(packed)[0], batch_first=True)
    assert (len(packed.data), tuple(output.shape)) == (16, (3, 9, 16))
    output.sum().backward()


def test_a_list_of_unknown_numbers_is_no_loop():
    """Tokens of each expert, listed again and again."""

    def program():
        layer = nn.Linear(64, 8, device="cuda")
        x = torch.randn(4096, 64, device="cuda")
        for _ in range(4):
            chosen = layer(x).topk(2).indices
            for expert in range(8):
                tokens = (chosen == expert).any(1).nonzero().view(-1).tolist()
                assert len(tokens) == len(set(tokens)) == 1024
        layer(x).sum().backward()

    prediction = oomph.predict(program)
    assert not prediction.assumptions
