"""Values and gradients of linear_cross_entropy against the float64 reference."""

import pytest
import torch
import torch.nn.functional as F
from ce_cases import TINY, Inputs, assert_close, check, expected, inputs, leaves, numbers, run
from kernel_device import DEVICE, HALF

from oomph.errors import ArgumentError
from oomph.ops import linear_cross_entropy
from oomph.ops.cross_entropy.reference import CrossEntropyOptions, linear_cross_entropy_reference


def logits_of(i):
    return F.linear(i.x, i.weight, i.bias)


def by_hand(i, losses):
    """A scalar and its gradients."""
    return [losses.detach(), *torch.autograd.grad(losses, [i.x, i.weight, i.bias], retain_graph=True)]


def by_reference(i, **options):
    loss, _ = linear_cross_entropy_reference(i.x, i.weight, i.target, i.bias, CrossEntropyOptions(**options))
    return by_hand(i, loss)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignore_index", [-100, 0])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_reference_is_torchs_cross_entropy(reduction, ignore_index, label_smoothing, weighted):
    i = leaves(inputs(20, bias=True, ignored=ignore_index))
    class_weight = numbers(13) if weighted else None
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    theirs = F.cross_entropy(logits_of(i), i.target, class_weight, reduction=reduction, **options)
    given = CrossEntropyOptions(class_weight=class_weight, reduction=reduction, **options)
    ours, _ = linear_cross_entropy_reference(i.x, i.weight, i.target, i.bias, given)
    assert_close([ours], [theirs], 1e-13)
    factor = numbers(*theirs.shape)
    assert_close(by_hand(i, (ours * factor).sum()), by_hand(i, (theirs * factor).sum()), 1e-13)


def test_the_additions_of_the_reference_are_what_they_say():
    i, token_weight = leaves(inputs(4, 5, bias=True)), numbers(4, 5)
    kept, logits = i.target != -100, logits_of(i)
    losses = F.cross_entropy(logits.view(20, 13), i.target.view(20), reduction="none").view(4, 5)
    mean, lse = losses.sum() / kept.sum(), logits.logsumexp(-1)
    theirs = mean + 0.3 * lse[kept].square().mean()
    assert_close(by_reference(i, z_loss=0.3), by_hand(i, theirs), 1e-13)
    theirs = F.cross_entropy(1.5 * torch.tanh(logits[kept] / 1.5), i.target[kept])
    assert_close(by_reference(i, softcap=1.5), by_hand(i, theirs), 1e-13)
    theirs = (losses * token_weight).sum() / token_weight[kept].sum()
    assert_close(by_reference(i, token_weight=token_weight), by_hand(i, theirs), 1e-13)
    next_losses = F.cross_entropy(
        logits[:, :-1].reshape(16, 13), i.target[:, 1:].reshape(16), reduction="none"
    )
    theirs = (next_losses * token_weight[:, 1:].reshape(16)).sum()
    ours = by_reference(i, shift=True, token_weight=token_weight, reduction="sum")
    assert_close(ours, by_hand(i, theirs), 1e-13)
    assert_close([expected(i).lse], [torch.where(kept, lse, 0.0).detach()], 1e-13)


# "chunked" and the kernels in one tile, and in the smallest tiles.
WAYS = {
    "plain": {"impl": "plain"},
    "one tile": {"impl": "chunked"},
    "small tiles": {"impl": "chunked", "memory_budget": TINY},
    "kernels": {"impl": "triton"},
    "kernels, small tiles": {"impl": "triton", "memory_budget": TINY},
}
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
pytestmark = [
    # NumPy, which Triton's interpreter computes with, warns of NaN and infinity; kernels do not.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.*deterministic"),
]


def inputs_for(way, *leading, **options):
    return inputs(*leading, dtype=torch.float32 if way["impl"] == "triton" else torch.float64, **options)


def assert_equal(way, ours, theirs):
    assert_close(ours, theirs, 1e-5 if way["impl"] == "triton" else 1e-13)


@pytest.mark.parametrize("way", list(WAYS.values())[:3], ids=list(WAYS)[:3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_every_dtype(dtype, reduction, way):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    case = inputs(40, v=200, dtype=dtype, bias=True)
    options = {"label_smoothing": 0.1, "z_loss": 0.01, "class_weight": numbers(200, dtype=dtype)}
    ours = check(case, reduction=reduction, through_lse=True, **options, **way)
    assert ours.loss.dtype == ours.lse.dtype == wide
    assert all(gradient is not None and gradient.dtype == dtype for gradient in ours.gradients)


@every_way
def test_where_all_targets_are_ignored_or_weigh_nothing_loss_and_gradients_are_zero(way):
    case = inputs_for(way, 5, bias=True)
    ignored = case.but(target=torch.full((5,), -100))
    options = {"label_smoothing": 0.1, "z_loss": 0.1, "class_weight": numbers(13)}
    for reduction in ("mean", "sum", "none"):
        ours = run(ignored, reduction=reduction, through_lse=True, **options, **way)
        assert all(not each.any() for each in ours.all)
    for weights in ({"class_weight": torch.zeros(13)}, {"token_weight": torch.zeros(5)}):
        ours = run(case, **weights, **way)
        assert all(not each.any() for each in (ours.loss, *ours.gradients[:2]))
    empty = run(inputs_for(way, 0), **way)
    assert all(not each.any() for each in empty.all)


NAN, INF = float("nan"), float("inf")
WRONG = [-1, 200, 1 << 31, (1 << 32) + 3, -(1 << 40)]


@every_way
def test_a_target_out_of_range_makes_its_own_token_nan(way):
    case = inputs_for(way, 8, v=200)
    right = case.target.clone()
    wrong = torch.arange(8) > 2
    case.target[wrong], right[wrong] = torch.tensor(WRONG), 2
    options = {"reduction": "none", "label_smoothing": 0.1}
    ours, expected = (run(each, **options, **way) for each in (case, case.but(target=right)))
    assert ours.loss[wrong].isnan().all()
    assert ours.gradients[0][wrong].isnan().all()
    assert torch.equal(ours.loss[~wrong], expected.loss[~wrong])
    assert torch.equal(ours.gradients[0][~wrong], expected.gradients[0][~wrong])
    assert torch.equal(ours.lse, expected.lse)
    for reduction in ("mean", "sum"):
        ours = run(case, reduction=reduction, class_weight=numbers(200), **way)
        assert ours.loss.isnan()
        assert ours.gradients[1].isnan().any()


def test_check_names_the_wrong_target_and_the_valid_ones():
    for wrong in (-1, 13, (1 << 32) + 3):
        case = inputs(20)
        case.target[3] = wrong
        message = rf"target {wrong} is out of range; valid: 0 to 12, or ignore_index=-100"
        for impl in ("auto", "plain", "chunked", "reference"):
            with pytest.raises(ArgumentError, match=message):
                linear_cross_entropy(case.x, case.weight, case.target, check=True, impl=impl)
    case.target[0], case.target[3] = wrong, 2
    run(case, check=True, shift=True)  # shift drops the first target


@every_way
def test_nan_and_infinity_in_the_inputs_reach_the_loss(way):
    case = inputs_for(way, 6, v=200, bias=True)
    for place, value in (("x", NAN), ("weight", -INF), ("bias", NAN)):
        spoiled = getattr(case, place).clone()
        spoiled[int(case.target[0]) if place == "bias" else (0, 0)] = value
        ours = run(case.but(**{place: spoiled}), **way)
        assert not ours.loss.isfinite()
        assert not ours.gradients[1].isfinite().all()
    # A target that cannot happen has an infinite loss with gradients like any other.
    spoiled = case.bias.clone()
    spoiled[int(case.target[0])] = -INF
    ours = run(case.but(bias=spoiled), **way)
    assert not ours.loss.isfinite()
    assert ours.gradients[1].isfinite().all()


OPTIONS = [{}, {"z_loss": 0.1, "label_smoothing": 0.1, "softcap": 2.0}]


@every_way
def test_nan_stays_in_its_token_and_counts_for_nothing_in_an_ignored_one(way):
    others = torch.arange(6) != 3
    for options in OPTIONS:
        case = inputs_for(way, 6, v=200)
        clean = run(case, **options, **way)
        case.x[3] = NAN
        ours = run(case, reduction="none", through_lse=True, **options, **way)
        assert ours.loss[3].isnan()
        assert ours.lse[3].isnan()
        assert ours.loss[others].isfinite().all()
        assert ours.gradients[0][others].isfinite().all()
        if way["impl"] == "plain":  # torch's own softmax gives NaN to the gradient of an ignored token
            continue
        case = inputs_for(way, 6, v=200)
        assert case.target[1] == -100
        case.x[1] = NAN
        ours = run(case, **options, **way)
        found, right = ([each.loss, each.lse, each.gradients[0]] for each in (ours, clean))
        assert_equal(way, found, right)


@every_way
def test_a_class_at_minus_infinity_is_a_class_that_never_happens(way):
    """A mask over classes, given as a bias."""
    case = inputs_for(way, 20, v=200, bias=True, ignored=None)
    case.bias[:150] = -INF  # the first tile of small tiles holds no other class
    target = case.target.clamp(min=150)
    few = case.but(weight=case.weight[150:], bias=case.bias[150:], target=target - 150)
    ours, theirs = run(case.but(target=target), **way), run(few, **way)
    found, right = ([each.loss, each.lse, each.gradients[0]] for each in (ours, theirs))
    assert_equal(way, found, right)
    assert_equal(way, [ours.gradients[1][150:]], [theirs.gradients[1]])
    assert not ours.gradients[1][:150].any()


# Errors of two roundings differ by chance; 5 % is what the issue allows, the rest is noise of few numbers.
FACTOR, NOISE = 1.05, 2e-5


def rounded_case(kind, dtype, n, d, v):
    """Peaked: the model is nearly sure of the right class. Flat: it knows nothing."""
    generator = torch.Generator().manual_seed(n + v)
    weight = torch.randn(v, d, generator=generator) / d**0.5
    target = torch.randint(v, (n,), generator=generator)
    noise = torch.randn(n, d, generator=generator)
    x = 6.0 * weight[target] + 0.5 * noise if kind == "peaked" else 0.1 * noise
    return leaves(Inputs(x.to(dtype), weight.to(dtype), target))


def gradients_of(i, loss):
    return torch.autograd.grad(loss, (i.x, i.weight))


def errors_of(i, **options):
    """(ours, the naive program's) relative error in the Frobenius norm, of dX and of dW."""
    wide = leaves(i.but(x=i.x.double(), weight=i.weight.double()))
    exact = gradients_of(wide, F.cross_entropy(F.linear(wide.x, wide.weight), i.target, reduction="sum"))
    naive = gradients_of(i, F.cross_entropy(F.linear(i.x, i.weight).float(), i.target, reduction="sum"))
    loss = linear_cross_entropy(i.x, i.weight, i.target, reduction="sum", **options)
    ours = gradients_of(i, loss)

    def error(found, right):
        return float((found.double() - right).norm() / right.norm())

    return [
        (error(one, right), error(other, right)) for one, other, right in zip(ours, naive, exact, strict=True)
    ]


@pytest.mark.parametrize("kind", ["peaked", "flat"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("impl", ["plain", "chunked"])
def test_in_one_block_gradients_are_as_exact_as_the_naive_ones(impl, dtype, kind):
    for ours, naive in errors_of(rounded_case(kind, dtype, 128, 32, 300), impl=impl):
        assert ours <= FACTOR * naive + NOISE
        assert naive < 0.05


@pytest.mark.parametrize("kind", ["peaked", "flat"])
def test_the_kernels_are_as_exact_over_several_blocks(kind):
    size, budget = ((4096, 256, 8192), "2MiB") if DEVICE == "cuda" else ((20, 16, 150), TINY)
    case = leaves(rounded_case(kind, HALF, *size).to(DEVICE))
    for ours, naive in errors_of(case, impl="triton", memory_budget=budget):
        assert ours <= FACTOR * naive + NOISE


@pytest.mark.parametrize("kind", ["peaked", "flat"])
def test_dx_is_as_exact_in_blocks_of_rows_and_classes(kind):
    """Of plain torch; there dW is rounded once per block of rows, and is allowed to show it."""
    dx, dw = errors_of(rounded_case(kind, torch.bfloat16, 48, 32, 300), impl="chunked", memory_budget=TINY)
    assert dx[0] <= FACTOR * dx[1] + NOISE
    assert dw[0] <= 2.0 * dw[1]
