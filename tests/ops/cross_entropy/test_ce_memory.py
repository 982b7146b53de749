"""What is computed and allocated: matrix products, predicted memory, accumulation into .grad."""

import pytest
import torch
import torch.nn.functional as F
from ce_cases import TINY, TOLERANCE, Inputs, assert_close, inputs, leaves
from checks import Products
from torch import nn

import oomph
from oomph.ops import compute_loss_chunked, linear_cross_entropy
from oomph.units import GiB, MiB, parse_bytes

# 37 tokens by 300 classes in the smallest blocks: five of rows by three of classes.
ROW_BLOCKS, CLASS_BLOCKS = 5, 3


def products(frozen=(), leading=37, v=300, backward=True, **options):
    case = leaves(inputs(leading, v=v, bias=True))
    for name in frozen:
        getattr(case, name).requires_grad_(False)
    with Products() as counted:
        loss = linear_cross_entropy(case.x, case.weight, case.target, bias=case.bias, **options)
        if backward:
            loss.sum().backward()
    return len(counted.shapes)


@pytest.mark.parametrize(
    ("frozen", "count"),
    [((), 3), (("x",), 2), (("weight",), 2), (("x", "weight"), 1), (("x", "weight", "bias"), 1)],
)
def test_frozen_inputs_skip_their_product(frozen, count):
    backward = len(frozen) < 3
    assert products(frozen, impl="chunked", backward=backward) == count
    in_blocks = products(frozen, impl="chunked", v=100, memory_budget=TINY, backward=backward)
    assert in_blocks == count * ROW_BLOCKS


def test_in_blocks_of_classes_the_logits_are_computed_twice_but_for_the_last_block():
    logits = 2 * CLASS_BLOCKS - 1
    assert products(impl="chunked", memory_budget=TINY) == ROW_BLOCKS * (logits + 2 * CLASS_BLOCKS)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_without_gradients_there_is_one_product_per_block(reduction):
    with torch.no_grad():
        for budget, count in ((None, 1), (TINY, ROW_BLOCKS * CLASS_BLOCKS)):
            found = products(impl="chunked", memory_budget=budget, backward=False, reduction=reduction)
            assert found == count
    with torch.inference_mode():
        assert products(("x", "weight", "bias"), impl="chunked", backward=False) == 1


def test_losses_per_token_cost_one_product_more():
    assert products(impl="chunked", reduction="none") == 4


WORKSPACE = 32 * MiB  # cuBLAS's, on this GPU, per thread that computes: forward, backward


def over_floor(n, d, v, loss=None, **options):
    """The predicted peak less x, weight, target and the gradients of x and weight."""

    def one_pass():
        x = torch.empty(n, d, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(v, d, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        target = torch.zeros(n, device="cuda", dtype=torch.int64)
        found = loss(x, weight, target) if loss else linear_cross_entropy(x, weight, target, **options)
        found.sum().backward()

    floor = 2 * (n + v) * d * 2 + n * 8
    return oomph.predict(one_pass, gpu="h200").peak.allocated - floor


@pytest.mark.parametrize(
    ("n", "d", "v", "budget"),
    [(4096, 4096, 128256, "64MiB"), (4096, 4096, 128256, "1GiB"), (16384, 2560, 151936, None)],
)
def test_the_budget_is_kept(n, d, v, budget):
    over = over_floor(n, d, v, memory_budget=budget)
    allowed = parse_bytes(budget or "512MiB")
    assert over <= allowed + WORKSPACE
    # And used: an unused budget would cost time.
    assert over >= 0.4 * min(allowed, n * v * 2)


@pytest.mark.parametrize(
    "options",
    [
        {"reduction": "none"},
        {"label_smoothing": 0.1, "z_loss": 1e-4, "softcap": 30.0},
        {"impl": "chunked", "softcap": 30.0},
    ],
    ids=str,
)
def test_the_budget_is_kept_with_options(options):
    assert over_floor(2048, 1024, 65536, memory_budget="128MiB", **options) <= 128 * MiB + 2 * WORKSPACE


def next_token_loss(x, weight, target):
    """As report 002 had it: logits, and their shifted copy in fp32."""
    logits = F.linear(x, weight)
    return F.cross_entropy(logits[:-1].float(), target[1:])


def test_the_reports_size_takes_over_111_gibibytes_plainly_and_under_one_here():
    n, d, v = 131_072, 2560, 151_936
    assert over_floor(n, d, v, next_token_loss) > 111 * GiB
    assert over_floor(n, d, v, shift=True) < GiB


def test_the_reports_function_holds_one_chunk():
    n, d, v, chunk = 16384, 512, 65536, 1024

    def loss(x, weight, target):
        return compute_loss_chunked(x, target, _Head(weight), chunk_size=chunk)

    assert over_floor(n, d, v, loss) <= chunk * v * 2 + 64 * n + WORKSPACE


class _Head(torch.nn.Module):
    """A linear layer around a weight that already exists."""

    def __init__(self, weight):
        super().__init__()
        self.weight, self.bias = weight, None


WAYS = [
    {"impl": "chunked"},
    {"impl": "chunked", "memory_budget": TINY},
    {"impl": "chunked", "reduction": "none"},
    {"impl": "plain"},
    {"impl": "auto"},
]


def micro_batches(dtype=torch.float64):
    first, second, third = (inputs(20, v=200, dtype=dtype, seed=seed) for seed in range(3))
    return [first, second.but(weight=first.weight), third.but(weight=first.weight)]


def train(weight, batches, **options):
    """The gradients of x; the weight's is in weight.grad."""
    found = []
    for each in batches:
        x = each.x.detach().requires_grad_()
        loss = linear_cross_entropy(x, weight, each.target, **options)
        loss.sum().backward()
        found.append(x.grad)
    return found


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_later_micro_batches_add_to_the_same_memory(dtype, way):
    batches = micro_batches(dtype)
    weight, plain = nn.Parameter(batches[0].weight), nn.Parameter(batches[0].weight.double())
    ours = train(weight, batches[:1], accumulate_into_grad=True, **way)
    memory = weight.grad.data_ptr()
    ours += train(weight, batches[1:], accumulate_into_grad=True, **way)
    assert weight.grad.data_ptr() == memory
    reduction = way.get("reduction", "mean")
    wide = [Inputs(each.x.double(), each.weight, each.target) for each in batches]
    theirs = train(plain, wide, impl="plain", reduction=reduction)
    assert_close([*ours, weight.grad], [*theirs, plain.grad], TOLERANCE[dtype])


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_what_arrives_in_grad_is_what_autograd_would_add(way):
    (batch, *_) = micro_batches()
    weight, x = nn.Parameter(batch.weight), batch.x.detach().requires_grad_()
    train(weight, [batch], **way)
    once = weight.grad.clone()

    def loss():
        return linear_cross_entropy(x, weight, batch.target, accumulate_into_grad=True, **way).sum()

    # A gradient that is handed out leaves .grad alone.
    (handed_out,) = torch.autograd.grad(loss(), weight)
    assert_close([handed_out, weight.grad], [once, once], 1e-12)
    loss().backward(inputs=[x])
    assert_close([weight.grad], [once], 0)
    loss().backward(inputs=[weight])
    assert_close([weight.grad], [2 * once], 1e-12)
    # The factor that arrives scales what is added only, and a graph that is kept adds at every backward.
    scaled = loss() * -3.0
    scaled.backward(retain_graph=True)
    scaled.backward()
    assert_close([weight.grad], [-4 * once], 1e-12)
    # Set to None between forward and backward.
    total = loss()
    weight.grad = None
    total.backward()
    assert_close([weight.grad], [once], 1e-12)
    seen = []
    weight.register_hook(lambda grad: (seen.append(1), 2 * grad)[1])
    loss().backward()
    assert seen == [1]
    assert_close([weight.grad], [3 * once], 1e-12)


def test_under_autocast_it_adds_in_fp32():
    batches = micro_batches(torch.float32)
    weight, plain = nn.Parameter(batches[0].weight), nn.Parameter(batches[0].weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        train(weight, batches, accumulate_into_grad=True, impl="chunked")
    train(plain, batches, impl="plain")
    assert weight.grad.dtype == torch.float32
    assert_close([weight.grad], [plain.grad], TOLERANCE[torch.bfloat16])


def test_a_frozen_weight_is_left_alone():
    (batch, *_) = micro_batches()
    weight = nn.Parameter(batch.weight, requires_grad=False)
    weight.grad = torch.ones_like(weight)
    train(weight, [batch], accumulate_into_grad=True, impl="chunked")
    assert (weight.grad == 1).all()


def test_the_predicted_peak_on_a_gpu_is_less_by_one_gradient_of_the_weight():
    n, d, v = 512, 512, 32768

    def peak(accumulate):
        def prepare():
            weight = nn.Parameter(torch.empty(v, d, device="cuda", dtype=torch.bfloat16))
            weight.grad = torch.zeros_like(weight)
            x = torch.empty(n, d, device="cuda", dtype=torch.bfloat16)
            target = torch.zeros(n, device="cuda", dtype=torch.int64)
            other = torch.empty(8, 8, device="cuda", requires_grad=True)

            def step():
                # The rest of a model: cuBLAS has its workspaces in both passes already.
                (other @ other).sum().backward()
                linear_cross_entropy(
                    x, weight, target, accumulate_into_grad=accumulate, impl="triton"
                ).backward()

            return step

        return oomph.predict(prepare, gpu="h200").peak.allocated

    assert abs(peak(False) - peak(True) - v * d * 2) < MiB
