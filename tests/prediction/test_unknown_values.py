"""Programs that branch on values that a trace does not have, or read them."""

import linecache
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console
from small_programs import in_trace, notes_of
from torch import distributions, nn
from torch.nn import functional as F

import oomph
from oomph import gpus
from oomph.cli.targets import program_error_text
from oomph.errors import ProgramError
from oomph.prediction import Script, retry
from oomph.prediction.intervals import calibrated
from oomph.prediction.result import fits_on, verdicts_at
from oomph.records import SIZES_DEPEND_ON_VALUES
from oomph.report.as_json import prediction_to_json
from oomph.report.terminal import report_text

in_process = pytest.mark.usefixtures("in_process")  # not where attempts are repeated


def training(check):
    def setup():
        model = nn.Linear(1024, 1024, device="cuda")
        optimizer = torch.optim.Adam(model.parameters())

        def step():
            loss = model(torch.randn(64, 1024, device="cuda")).square().mean()
            check(model, loss, optimizer)
            optimizer.zero_grad()

        return step

    return setup


def always(model, loss, optimizer):
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def if_finite(model, loss, optimizer):
    if torch.isfinite(loss):
        always(model, loss, optimizer)


def if_norm_is_small(model, loss, optimizer):
    loss.backward()
    if nn.utils.clip_grad_norm_(model.parameters(), 1.0) < 1e3:
        optimizer.step()


def fail_unless_finite(model, loss, optimizer):
    if not torch.isfinite(loss).all() or loss.isnan().any() or loss.item() != loss.item() or loss.isinf():
        raise FloatingPointError("the loss is not finite")
    always(model, loss, optimizer)
    if any(not parameter.grad.isfinite().all() for parameter in model.parameters()):
        raise FloatingPointError("a gradient is not finite")


@pytest.mark.parametrize("check", [if_finite, if_norm_is_small, fail_unless_finite])
@in_process
def test_checks_of_finite_numbers_pass(check):
    expected = oomph.predict(training(always), gpu="h200").peak.allocated
    assert oomph.predict(training(check), gpu="h200").peak.allocated == pytest.approx(expected, rel=0.05)


@in_trace()
def test_arguments_of_distributions_are_valid():
    x = torch.randn(64, 10, device="cuda", requires_grad=True)
    square = x[:10] @ x[:10].T
    for one in (
        distributions.Categorical(logits=x),
        distributions.Categorical(probs=x.softmax(-1)),
        distributions.OneHotCategorical(logits=x),
        distributions.Bernoulli(x.sigmoid()),
        distributions.Independent(distributions.Normal(x, x.exp()), 1),
        distributions.Beta(x.exp(), x.exp()),
        distributions.Dirichlet(x.exp()),
        distributions.Poisson(x.exp()),
        distributions.Uniform(x.detach() - 1, x.exp() + 1),
        distributions.MultivariateNormal(x, torch.eye(10, device="cuda")),
        distributions.MultivariateNormal(x[:10], square),
        distributions.MultivariateNormal(x[:10], scale_tril=square.tril()),
        distributions.TransformedDistribution(
            distributions.Normal(x, x.exp()), [distributions.TanhTransform()]
        ),
    ):
        one.log_prob(one.sample()).sum()
    policy = distributions.Categorical(logits=x)
    (policy.log_prob(policy.sample()).mean() + policy.entropy().mean()).backward()


@pytest.mark.parametrize("size", [8, 1024])
@in_trace()
def test_a_matrix_has_a_cholesky_factor(size):
    x = torch.randn(size, size, device="cuda", requires_grad=True)
    factor, info = torch.linalg.cholesky_ex(x @ x.T)
    if torch.any(info):
        raise ValueError("the matrix is not positive definite")
    factor.sum().backward()


@in_trace()
def test_boxes_are_valid_and_probabilities_add_up():
    x = torch.randn(8, 100, 4, device="cuda").sigmoid()
    center, size = x.split(2, -1)
    boxes = torch.cat([center - size / 2, center + size / 2], -1)
    assert (boxes[..., 2:] >= boxes[..., :2]).all()
    probabilities = x.softmax(-1)
    assert torch.allclose(probabilities.sum(-1), torch.ones(8, 100, device="cuda"))
    assert ((probabilities.sum(-1) - 1).abs() < 1e-5).all()
    assert torch.equal(x, x.clone())
    assert x.min() >= 0
    assert x.max() <= 1
    assert 0 < x.cpu().numpy().max() <= 1


@in_trace()
def test_the_values_of_an_empty_tensor_are_known():
    weights = torch.nn.Linear(4, 4).cuda()(torch.randn(6, 4, device="cuda"))
    x = torch.arange(24.0, device="cuda").view(6, 4) * weights
    selected = (x * weights)[torch.zeros(6, dtype=torch.bool, device="cuda")]
    assert torch.cat([selected, x, x]).max() == x.max()
    assert not (selected > 0).any()
    assert selected.sum() == 0
    assert (selected > 0).nonzero().shape == (0, 2)


@in_trace()
def test_ids_are_followed_through_slices():
    ids = torch.full((2, 8), 7, device="cuda")
    for position in range(1, 8):
        ids[:, position] = torch.randn(2, 50, device="cuda").argmax(-1)
    assert ids[:, 0].tolist() == [7, 7]
    assert (ids[:, 1:] >= 25).all()
    assert not (ids == 2).any()
    weights = torch.zeros(8, device="cuda")
    weights[2:4] = 0.5
    assert weights.sum() == 1
    assert weights[2:6].tolist() == [0.5, 0.5, 0, 0]
    assert weights.nonzero().flatten().tolist() == [2, 3]
    weights[0] = torch.randn((), device="cuda")
    assert weights.sum() > 0


@in_trace(lambda found: not any("NumPy" in str(note) for note in found.notes))
def test_arrays_of_known_values_have_them():
    lengths = torch.tensor([3, 9]).cuda()
    assert (lengths + 1).cpu().numpy().tolist() == [4, 10]
    positions = torch.arange(2048, device="cuda")
    mask = positions < lengths.sum() + 0 * positions[:, None]
    assert mask.cpu().numpy().sum() == 12 * 2048
    image = torch.from_numpy(np.full((1024, 2048), 3.0))
    assert image.cuda().cpu().numpy()[0, 0] == 3


@in_trace()
def test_files_are_read_into_large_arrays_of_host_tensors(tmp_path):
    (tmp_path / "tokens.bin").write_bytes(bytes(12 << 20))
    tokens = torch.empty(6 << 20, dtype=torch.uint16)
    with open(tmp_path / "tokens.bin", "rb", buffering=0) as file:
        assert file.readinto(tokens.numpy()) == 12 << 20
    assert tokens.cuda().shape == (6 << 20,)


@in_trace(lambda found: found.assumptions == ())
def test_generation_with_an_end_token_stops_at_its_length():
    head = torch.randn(64, 100, device="cuda", requires_grad=True)
    ids = torch.zeros(4, 1, dtype=torch.long, device="cuda")
    unfinished = torch.ones(4, dtype=torch.long, device="cuda")
    while unfinished.max() != 0:
        new = (head[ids[:, -1] % 64] * 2).argmax(-1)
        ids = torch.cat([ids, (new * unfinished)[:, None]], -1)
        full = torch.full((4,), ids.shape[1] >= 20, device="cuda", dtype=torch.bool)
        unfinished = unfinished & ~(torch.isin(ids[:, -1], torch.tensor([1, 2], device="cuda")) | full)
    assert ids.shape == (4, 20)
    head.sum().backward()


def endless_while():
    x = torch.randn(64, 64, device="cuda", requires_grad=True)
    while (x - x.T).norm() > 1e-6:
        x = (x + x.T) / 2
    x.sum().backward()


def endless_break():
    x = torch.randn(64, 64, device="cuda", requires_grad=True)
    while True:
        x = x * 0.99
        if x.abs().max().item() < 1e-3:
            break
    x.sum().backward()


def long_solve():
    x = torch.randn(64, 64, device="cuda", requires_grad=True)
    for rounds in range(10**9):
        x = x * 0.99
        if (
            rounds > 10  # at least
            and bool(x.abs().max() < 1e-3)
        ):
            rounds = 0
            break
    x.sum().backward()


@pytest.mark.parametrize("program", [endless_while, endless_break, long_solve])
@in_process
def test_loops_that_wait_for_a_value_are_cut_and_the_verdict_says_so(program):
    (assumed,) = oomph.predict(program).assumptions
    assert "loop" in assumed.text
    assert assumed.site.function == program.__name__


@in_process
def test_rounds_of_a_loop_are_counted_in_each_call_of_its_function():
    def solve(x):
        for _ in range(60):
            x = x * 0.99
            if x.abs().max() < 1e-3:
                break
        return x

    def program():
        x = torch.randn(64, device="cuda", requires_grad=True)
        sum(solve(x).sum() for _ in range(2)).backward()

    assert oomph.predict(program).assumptions == ()


@in_process
def test_a_number_that_a_loop_waits_for_becomes_small():
    def solve(x):
        rounds = 0
        while True:
            error = (x * 0.99).abs().max().item()
            rounds += 1
            assert error > 0  # it divides by it
            if error < 1e-6:
                return rounds

    def program():
        x = torch.randn(64, 64, device="cuda", requires_grad=True)
        assert 20 < solve(x) == solve(x) < 30
        x.sum().backward()

    assert any("halves" in note.text for note in oomph.predict(program).notes)


def own_loop(iterations, optimizers=1, layers=60):
    """Each optimizer has a share of the layers, and steps once in an iteration."""
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(layers))).cuda()
    shares = [[each.weight for each in model[first::optimizers]] for first in range(optimizers)]
    made = [torch.optim.Adam(share) for share in shares]
    for _ in range(iterations):
        model(torch.ones(16, 256, device="cuda")).sum().backward()
        for optimizer in made:
            optimizer.step()
            optimizer.zero_grad()


def test_a_function_that_trains_without_end_is_stopped():
    stopped, whole = (oomph.predict(lambda n=n: own_loop(n, layers=3), gpu="h200") for n in (10**9, 3))
    assert stopped.peak.allocated == whole.peak.allocated
    assert stopped.step_seconds == pytest.approx(whole.step_seconds, rel=0.01)
    assert any(" was stopped after " in note.text for note in stopped.notes)


def test_optimizers_of_single_parameters_are_no_loop_without_end():
    found = oomph.predict(lambda: own_loop(2, optimizers=60), gpu="h200")
    assert not any(" was stopped after " in note.text for note in found.notes)


@in_process
@in_trace()
def test_a_choice_keeps_its_values_where_gradients_go_straight_through():
    x = nn.Linear(8, 17).cuda()(torch.randn(1, 8, device="cuda"))
    choice = nn.functional.one_hot(x.argmax(-1), 17)
    drawn = torch.distributions.OneHotCategorical(logits=x).sample()
    drawn += x - x.detach()
    through = nn.functional.gumbel_softmax(x, hard=True), x + (choice - x).detach(), drawn
    for found in (choice + x - x.detach(), *through):
        assert sorted(found.detach().cpu().numpy()[0]) == [0.0] * 16 + [1.0]


def test_truncated_normals_are_drawn_once():
    """torch 2.13 draws again while a value is out of bounds."""

    def program():
        weight = torch.empty(2048, 2048, device="cuda")
        nn.init.trunc_normal_(weight, std=0.06, a=-0.18, b=0.18)

    notes = " ".join(note.text for note in oomph.predict(program).notes)
    assert "loop" not in notes
    assert "condition" not in notes


@in_trace(lambda found: found.assumptions == ())
def test_evenly_spaced_numbers_are_known():
    times = torch.linspace(0, 1, 20, device="cuda")
    assert (times[1:] > times[:-1]).all()
    assert times[-1].item() == 1
    times.requires_grad_().sum().backward()


@in_trace(lambda found: found.assumptions == ())
def test_a_condition_that_is_asked_often_but_ends_no_loop_keeps_its_answer():
    x = torch.randn(64, device="cuda", requires_grad=True)
    for _ in range(120):
        if x.sum() < 0:
            raise ValueError("negative")
    x.sum().backward()


def test_after_a_failure_the_last_condition_gets_the_other_answer():
    def program():
        x = torch.empty(1 << 20, device="cuda", requires_grad=True)
        if x.sum() > 0:
            raise ValueError("positive")
        x.sum().backward()

    prediction = oomph.predict(program, gpu="h200")
    (assumed,) = prediction.assumptions
    assert "ValueError: positive" in assumed.text
    assert prediction.peak.allocated >= 8 << 20
    first_lines = lines_of(prediction)[:3]
    assert any("ValueError: positive" in line and "test_unknown_values.py" in line for line in first_lines)
    (in_json,) = prediction_to_json(prediction)["assumptions"]
    assert in_json["line"] == assumed.site.line  # type: ignore[union-attr]


def test_a_check_that_fails_is_passed_every_time():
    def program():
        x = torch.empty(1 << 20, device="cuda", requires_grad=True)
        for _ in range(3):
            if x.sum() > 0:
                raise ValueError("positive")
        x.sum().backward()

    (assumed,) = oomph.predict(program).assumptions
    assert "ValueError: positive" in assumed.text


def test_a_check_that_fails_for_one_guess_is_passed_for_others():
    def program():
        x = torch.empty(4, 1 << 20, device="cuda", requires_grad=True)
        for position in x.view(-1, 4).argmax(1)[:4]:  # guesses: every position in turn
            if position == 2:
                raise ValueError("infeasible")
        x.sum().backward()

    (assumed,) = oomph.predict(program).assumptions
    assert "ValueError: infeasible" in assumed.text


def test_two_checks_that_fail_are_both_passed():
    def program():
        x = torch.empty(1 << 20, device="cuda", requires_grad=True)
        if x.sum() > 0:
            raise ValueError("positive")
        if x.prod() > 0:
            raise ValueError("also positive")
        x.sum().backward()

    first, second = oomph.predict(program).assumptions
    assert "ValueError: positive" in first.text
    assert "ValueError: also positive" in second.text


def test_a_failure_with_both_answers_is_reported_after_the_guesses():
    def program():
        x = torch.randn(8, device="cuda")
        if x.sum() > 0:
            raise ValueError("first")
        raise ValueError("second")

    with pytest.raises(ProgramError, match="ValueError: first") as caught:
        oomph.predict(program)
    text, _ = program_error_text(caught.value)
    assert text.index("is taken as true") < text.index("Traceback")


def test_a_failure_without_a_guess_is_not_tried_again():
    texts = []

    def program():
        torch.randn(8, device="cuda")
        raise ValueError("at once")

    with pytest.raises(ProgramError, match="at once"):
        oomph.predict(program, progress=lambda text, fraction: texts.append(text))
    assert len(texts) == 1


@in_process
def test_a_skipped_backward_pass_or_update_is_said_with_the_verdict():
    def no_backward(model, loss, optimizer):
        if loss > 10:
            loss.backward()

    def no_update(model, loss, optimizer):
        loss.backward()
        if loss > 10:
            optimizer.step()

    for check, expected in ((no_backward, "no backward"), (no_update, "no optimizer")):
        (assumed,) = oomph.predict(training(check)).assumptions
        assert expected in assumed.text
        assert assumed.site.function.endswith(check.__name__)


def lines_of(prediction):
    return report_text(prediction, Console(width=400)).splitlines()


# -- sizes ----------------------------------------------------------------------------------------------

TOKENS, WIDTH, EXPERTS = 4096, 256, 8


def mixture_of_experts():
    experts = nn.ModuleList(
        nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        for _ in range(EXPERTS)
    ).cuda()
    router = nn.Linear(WIDTH, EXPERTS).cuda()
    x = torch.randn(TOKENS, WIDTH, device="cuda")
    weights, chosen = router(x).softmax(-1).topk(2)
    out = torch.zeros_like(x)
    for index, expert in enumerate(experts):
        token, nth = torch.where(chosen == index)
        out.index_add_(0, token, expert(x[token]) * weights[token, nth, None])
    out.square().mean().backward()


def dense():
    """Twice as many tokens through one expert: the activations of a balanced router."""
    experts = nn.ModuleList(
        nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        for _ in range(EXPERTS)
    ).cuda()
    x = torch.randn(2 * TOKENS // EXPERTS, WIDTH, device="cuda")
    sum(expert(x).square().mean() for expert in experts).backward()


def test_each_expert_gets_its_share_and_the_interval_holds_an_unbalanced_router():
    prediction = oomph.predict(mixture_of_experts, gpu="h200")
    balanced = oomph.predict(dense, gpu="h200")
    assert balanced.interval is None
    experts = balanced.peak.allocated
    assert experts < prediction.peak.allocated < 1.25 * experts
    interval = prediction.interval
    assert interval.low.allocated <= prediction.peak.allocated < interval.high.allocated
    assert interval.high.allocated < 1.5 * prediction.peak.allocated


def test_an_unknown_mask_selects_half_and_the_interval_reaches_towards_none_and_all():
    def program(rows=None):
        x = torch.empty(4096, 256, device="cuda", requires_grad=True)
        w = torch.randn(256, 8192, device="cuda", requires_grad=True)
        y = x * 2
        chosen = y[y.sum(-1) > 0] if rows is None else y[torch.arange(4096, device="cuda") < rows]
        (chosen @ w).square().sum().backward()

    prediction = oomph.predict(program, gpu="h200")
    none, half, all = (oomph.predict(lambda n=n: program(n), gpu="h200") for n in (1, 2048, 4096))
    assert none.interval is half.interval is all.interval is None
    assert prediction.peak.allocated == pytest.approx(half.peak.allocated, rel=0.035)
    _check_calibrated(prediction.interval, half, none, all)
    in_json = prediction_to_json(prediction)["interval"]
    assert in_json["high"]["allocated"] == prediction.interval.high.allocated
    low, limit = prediction.interval.low.allocated // 2, prediction.peak.reserved
    high = int(1.1 * prediction.interval.high.reserved)
    assert verdicts_at(prediction, [low, limit, high]) == ["does not fit", "too close to call", "fits"]
    h200 = gpus.find("h200")
    cards = [replace(h200, memory=h200.context + most) for most in (limit, high)]
    assert fits_on(prediction, cards) == [False, True]
    between = oomph.predict(program, max=limit)
    assert any("verdict depends on" in line for line in lines_of(between)[:4])
    assert (between.verdict, between.fits) == ("too close to call", False)
    assert "with other values" in lines_of(between)[0]
    assert oomph.predict(program, max=high).verdict == "fits"


def _check_calibrated(interval, typical, fewest, most):
    """The interval reaches towards these two as far as measured programs did."""
    expected = calibrated(typical.peak, [fewest.peak, most.peak], SIZES_DEPEND_ON_VALUES)
    assert interval.low.allocated == pytest.approx(expected.low.allocated, rel=0.04)
    assert interval.high.allocated == pytest.approx(expected.high.allocated, rel=0.04)


def test_a_run_with_other_sizes_says_so_and_is_left_out_where_it_takes_long(monkeypatch):
    def program():
        x = torch.randn(64, 256, device="cuda", requires_grad=True)
        chosen = x[x.sum(-1) > 0]
        while len(chosen) == len(x):
            time.sleep(0.1)
        chosen.sum().backward()

    monkeypatch.setattr(retry, "_LEAST_SECONDS_MORE", 3.0)
    texts = []
    prediction = oomph.predict(program, progress=lambda text, fraction: texts.append(text))
    assert not texts[0].startswith("again")
    assert any(text.startswith("again, with the largest sizes: ") for text in texts)
    assert any("largest and smallest were not traced" in note.text for note in prediction.assumptions)


def test_sizes_that_follow_from_guessed_sizes_do_not_multiply():
    def program():
        x = torch.randn(512, 8, device="cuda")
        chosen = x[x.sum(-1) > 0]
        pairs = (chosen @ chosen.T).flatten()
        again = pairs[pairs > 0]
        again[: len(chosen)].outer(again[: 4 * len(chosen)])

    prediction = oomph.predict(program)
    assert prediction.interval.high.allocated <= 3 * prediction.peak.allocated


class Periods(nn.Module):
    """Folds a sequence by the periods that are strongest in it."""

    def __init__(self, frequencies=None):
        super().__init__()
        self.layer, self.frequencies = nn.Linear(256, 256), frequencies

    def forward(self, x):
        x, folded = self.layer(x), 0
        amplitudes = torch.fft.rfft(x).abs().mean(0)
        given = self.frequencies
        for period in 256 // (amplitudes.topk(2)[1].cpu().numpy() if given is None else given):
            rows = F.pad(x, (0, -256 % int(period))).view(len(x), -1, int(period))
            folded = folded + (rows @ rows.mT).softmax(-1).square().sum()
        return folded


def test_positions_by_which_a_model_computes_sizes_give_an_interval():
    def program(frequencies=None):
        Periods(frequencies).cuda()(torch.randn(64, 256, device="cuda")).backward()

    found = oomph.predict(program, gpu="h200")
    known = oomph.predict(lambda: program(np.array((3, 7))), gpu="h200")
    assert known.interval is None
    assert found.interval.low.allocated < known.peak.allocated < found.interval.high.allocated


@in_process
def test_nms_keeps_half_of_the_boxes():
    library = torch.library.Library("torchvision", "FRAGMENT")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

    @torch.library.register_fake("torchvision::nms")
    def _(dets, scores, threshold):
        return dets.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.long)

    def program():
        boxes, scores = torch.rand(1000, 4, device="cuda"), torch.rand(1000, device="cuda")
        kept = torch.ops.torchvision.nms(boxes, scores, 0.5)
        mask = torch.zeros_like(scores, dtype=torch.bool)
        mask[kept] = True
        assert kept.shape == mask.nonzero()[:, 0].shape == (500,)

    prediction = oomph.predict(program)
    assert any("nms" in note.text for note in prediction.notes)
    assert prediction.interval is not None


def adaptive_solver(rounds, keep=True):
    """Steps of a size that depends on values until the time is over, or a known number of steps."""
    layer = nn.Linear(512, 512).cuda()
    x, time, made = torch.randn(4096, 512, device="cuda"), torch.zeros((), device="cuda"), 0
    with torch.set_grad_enabled(keep):
        while (time < 1) if rounds is None else made < rounds:
            change = layer(x).tanh()
            x, made = x + change, made + 1
            before, time = time, time + (1e-3 / change.detach().abs().max().pow(2)).sqrt().clamp(1, 2)
            assert time > before
        assert rounds is not None or before < 1 <= time
    layer(x).sum().backward()


def test_a_loop_that_a_guess_ends_gives_an_interval_of_rounds():
    found = oomph.predict(lambda: adaptive_solver(None), gpu="h200")
    few, typical, most = (oomph.predict(lambda n=n: adaptive_solver(n), gpu="h200") for n in (1, 4, 12))
    assert found.peak.allocated == pytest.approx(typical.peak.allocated, rel=0.01)
    _check_calibrated(found.interval, typical, few, most)
    (assumed,) = found.assumptions
    assert "loop" in assumed.text
    assert "while (time < 1)" in linecache.getline(assumed.site.file, assumed.site.line)


@in_trace(lambda found: "failed" not in notes_of(found))
def test_a_loop_may_compare_with_a_number_that_it_computes():
    x, time = torch.randn(512, 512, device="cuda", requires_grad=True), torch.zeros((), device="cuda")
    step = torch.rand((), device="cuda")
    while time < 1 - step * 0.1:
        x = x.tanh()
        step = x.detach().abs().mean()
        time = time + step
    x.sum().backward()


@pytest.mark.parametrize("bounds", [(0, 0), (0, 2), (2, 0), (2, 2)])
@in_process
def test_a_loop_that_two_conditions_end_is_left(bounds):
    def program():
        x, least = torch.randn(64, 64, device="cuda", requires_grad=True), torch.zeros((), device="cuda")
        while True:
            x = x.tanh()
            error = x.detach().abs().max()
            if error < least + bounds[0] and error < bounds[1]:
                break
        x.sum().backward()

    prediction = oomph.predict(program)
    (assumed,) = prediction.assumptions
    assert "loop" in assumed.text
    assert not any("failed" in note.text for note in prediction.notes)


@in_process
def test_one_note_says_that_a_condition_had_both_answers():
    def program():
        x = torch.randn(64, device="cuda", requires_grad=True)
        for bound in (0.5, 2.0):
            if x.detach().abs().max() > bound:
                x = x * 2
        x.sum().backward()

    notes = [note for note in oomph.predict(program).notes if "a condition" in note.text]
    (text,) = (note.text for note in notes)
    assert "true" in text
    assert "false" in text


@in_process
def test_one_note_gives_the_whole_numbers_that_a_line_read():
    def program():
        x = torch.randn(4096, device="cuda", requires_grad=True)
        counts = [(x.detach() > bound).sum().item() for bound in (0.0, 1.0, 2.0)]
        assert len({*counts}) > 1
        x.sum().backward()

    (text,) = (note.text for note in oomph.predict(program).notes if "whole number" in note.text)
    assert " to " in text


@in_process
def test_a_loop_is_not_left_at_once_where_it_runs_again():
    rounds = []

    def program():
        x = torch.randn(64, 64, device="cuda", requires_grad=True)
        for _ in range(2):
            for done in range(10**6):
                if x.detach().abs().max() < 0 and done < 10**5:
                    break
            rounds.append(done)
        x.sum().backward()

    oomph.predict(program)
    assert rounds == [100, 100]


@in_trace()
def test_a_line_with_two_conditions_is_not_answered_for_the_wrong_one():
    x, rounds = torch.randn(512, 512, device="cuda", requires_grad=True), 0
    while rounds < 20:
        x, rounds = x.tanh(), rounds + 1
        large = x.detach().abs().mean() > 0.5
        if not large and rounds > 2:
            break
    assert rounds == 20
    x.sum().backward()


class _Checked(nn.Module):
    def forward(self, x):
        if x.max() > 1e4:
            return x[x > 0]
        return x


def test_a_check_in_every_layer_is_no_loop():
    def program():
        model = nn.Sequential(nn.Linear(64, 64), *(_Checked() for _ in range(102))).cuda()
        wide = torch.empty(1 << 20, device="cuda")
        kept = wide[wide > 0]
        (model(torch.randn(32, 64, device="cuda")).sum() + kept.sum()).backward()

    found = oomph.predict(program)
    assert found.assumptions == ()
    assert found.interval.low.allocated < found.peak.allocated


def test_rounds_that_keep_no_memory_need_no_interval():
    found = oomph.predict(lambda: adaptive_solver(None, keep=False), gpu="h200")
    assert found.interval is None
    assert found.assumptions == ()


def test_a_loop_that_fails_in_more_rounds_than_a_guess_allows_has_those():
    def program():
        x, kept = torch.empty(1 << 20, device="cuda", requires_grad=True), []
        while True:
            if kept:
                raise ValueError("second round")
            kept.append(x * 2)
            if x.sum() >= 1:
                break
        kept[0].sum().backward()

    (assumed,) = oomph.predict(program, gpu="h200").assumptions
    assert "ValueError: second round" in assumed.text


LOOP = """import torch
layer = torch.nn.Linear(8, 8, device="cuda")
def solve(x):
    kept = []
    while True:
        kept.append(x * 2)
        if x.sum() < 9{between}and x.max() > 7:{after}break
    return sum(kept)
for _ in range(3):
    solve(layer(torch.randn(4, 8, device="cuda"))).sum().backward()
"""


@pytest.mark.parametrize("between", [" ", " \\\n                "])
@pytest.mark.parametrize("after", [" ", "\n            "])
def test_the_format_of_a_loop_does_not_matter(between, after, tmp_path):
    (tmp_path / "train.py").write_text(LOOP.format(between=between, after=after))
    (tmp_path / "plain.py").write_text(LOOP.format(between=" ", after=" "))
    found, plain = (oomph.predict(Script(str(tmp_path / name))) for name in ("train.py", "plain.py"))
    assert [each.text for each in found.assumptions] == [each.text for each in plain.assumptions]
    assert found.peak.allocated == plain.peak.allocated
