"""On two ranks: a vocabulary-sharded weight, and FSDP2. The processes are started once."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ce_cases import TINY, Outcome, assert_close, expected, inputs, numbers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from oomph.errors import ArgumentError
from oomph.nn.loss import LinearCrossEntropyLoss
from oomph.ops import explain, linear_cross_entropy

RANKS = 2


def split(tensor, mesh, placement=None):
    return distribute_tensor(tensor.detach(), mesh, [placement or Shard(0)]).requires_grad_()


def run_split(i, mesh, *, plain_bias, plain_x, through_lse, **options):
    """As ce_cases.run, with all gradients made whole again."""
    x = i.x.detach().requires_grad_() if plain_x else split(i.x, mesh, Replicate())
    weight, bias = split(i.weight, mesh), None
    if i.bias is not None:
        bias = i.bias.detach().requires_grad_() if plain_bias else split(i.bias, mesh)
    loss, lse = linear_cross_entropy(x, weight, i.target, bias=bias, return_lse=True, **options)
    total = (loss * numbers(*loss.shape).to(loss)).sum()
    if through_lse:
        total = total + (lse * numbers(*lse.shape, seed=8).to(lse)).sum()
    total.backward()
    found = [None if each is None else each.grad for each in (x, weight, bias)]
    whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in found]
    return Outcome(loss.detach(), lse.detach(), tuple(whole))


CASES = [
    {},
    {"reduction": "sum", "label_smoothing": 0.1},
    {"reduction": "none", "through_lse": True, "softcap": 2.0},
    {"z_loss": 0.1, "through_lse": True},
    {"label_smoothing": 0.2, "class_weight": True, "shift": True, "plain_x": False},
    {"label_smoothing": 0.2, "class_weight": True, "memory_budget": TINY, "plain_bias": True},
    {"ignore_index": 0, "memory_budget": TINY, "check": True},
]


def losses_and_gradients_are_those_of_the_whole_vocabulary():
    mesh = init_device_mesh("cpu", (RANKS,))
    for v in (13, 301):
        for position, given in enumerate(CASES):
            options = {"plain_bias": False, "plain_x": True, "through_lse": False} | given
            if options.pop("class_weight", False):
                options["class_weight"] = numbers(v)
            case = inputs(20, v=v, bias=position % 3 != 1, ignored=options.get("ignore_index", -100), seed=v)
            ours = run_split(case, mesh, impl="chunked", **options)
            layout = ("plain_bias", "plain_x")
            theirs = expected(case, **{name: value for name, value in options.items() if name not in layout})
            assert_close(ours.all, theirs.all, 1e-11)


def what_cannot_be_split_is_refused(rank):
    mesh = init_device_mesh("cpu", (RANKS,))
    case = inputs(6)
    weight = split(case.weight, mesh)
    with pytest.raises(ArgumentError, match="x differs between them; x must be the same on all"):
        linear_cross_entropy(case.x + rank, weight, case.target, check=True)
    # A NaN is no difference.
    linear_cross_entropy(case.x * float("nan"), weight, case.target, check=True)
    for placement in (Shard(1), Replicate()):
        with pytest.raises(
            ArgumentError, match=r"a DTensor weight must be Shard\(0\) over one mesh dimension"
        ):
            linear_cross_entropy(case.x, split(case.weight, mesh, placement), case.target)
    with pytest.raises(ArgumentError, match="1 classes over 2 ranks leave a rank without any"):
        linear_cross_entropy(case.x, split(case.weight[:1], mesh), case.target)
    for impl in ("plain", "reference"):
        with pytest.raises(
            ArgumentError, match=f"impl='{impl}' takes no vocabulary-sharded weight; choose from"
        ):
            linear_cross_entropy(case.x, weight, case.target, impl=impl)
    with pytest.raises(ArgumentError, match="accumulate_into_grad=True is not supported"):
        linear_cross_entropy(case.x, weight, case.target, accumulate_into_grad=True)
    assert explain(linear_cross_entropy, case.x, weight, case.target).impl == "chunked"

    wrong = case.target.clone()
    wrong[3] = 13
    losses = linear_cross_entropy(case.x, weight, wrong, reduction="none")
    assert losses[3].isnan()
    assert losses[torch.arange(6) != 3].isfinite().all()
    with pytest.raises(ArgumentError, match="target 13 is out of range; valid: 0 to 12"):
        linear_cross_entropy(case.x, weight, wrong, check=True)


D, CLASSES = 6, 13


class Model(nn.Module):
    """The head is inside the loss, which is sharded on its own."""

    def __init__(self, **options):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))
        self.loss = LinearCrossEntropyLoss(D, CLASSES, bias=True, **options)

    def forward(self, x, target):
        return self.loss(self.body(x), target).mean()


def batch(rank):
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(4, 5, D, generator=generator, dtype=torch.float64)
    return x, torch.randint(CLASSES, (4, 5), generator=generator)


def a_sharded_model_trains_like_the_whole_one(rank):
    for options in ({"impl": "chunked"}, {"impl": "chunked", "reduction": "none"}, {"impl": "plain"}):
        models = []
        for given in ({"impl": "reference"}, options):
            torch.manual_seed(0)
            models.append(Model(**given).double())
        whole, sharded = models
        for part in (sharded.body, sharded.loss, sharded):
            fully_shard(part)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in models]
        for _ in range(3):
            loss = sharded(*batch(rank))
            loss.backward()
            losses = [whole(*batch(each)) for each in range(RANKS)]
            (sum(losses) / RANKS).backward()
            assert_close([loss.detach()], [losses[rank].detach()], 1e-11)
            found = [each.grad.full_tensor() for each in sharded.parameters()]
            assert_close(found, [each.grad for each in whole.parameters()], 1e-11)
            for each in optimizers:
                each.step()
                each.zero_grad()


def check_on_a_rank(rank, port):
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    # Where one rank has failed, the other waits for it no longer than this.
    options = {"rank": rank, "world_size": RANKS, "timeout": timedelta(seconds=10)}
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", **options)
    try:
        losses_and_gradients_are_those_of_the_whole_vocabulary()
        what_cannot_be_split_is_refused(rank)
        a_sharded_model_trains_like_the_whole_one(rank)
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")
def test_on_two_ranks(run_ranks):
    run_ranks(check_on_a_rank, RANKS)
