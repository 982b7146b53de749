"""Work that is the same for every row: done once, with the gradients of the whole batch."""

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from small import MLP, gradients, same_gradients, seeded, state_of
from torch import nn

import oomph
from oomph import fixes
from oomph.errors import UserError
from oomph.fixes.activation_checkpointing import KEEP
from oomph.fixes.hoist_batch_invariant import BatchInvariantMode


class Attention(nn.Module):
    def __init__(self, width, heads=2):
        super().__init__()
        self.heads = heads
        self.q, self.kv, self.out = (
            nn.Linear(width, width),
            nn.Linear(width, 2 * width),
            nn.Linear(width, width),
        )

    def forward(self, x, context=None):
        b, n, c = x.shape
        context = x if context is None else context
        q, k, v = (
            y.reshape(b, -1, self.heads, c // self.heads).transpose(1, 2)
            for y in (self.q(x), *self.kv(context).chunk(2, -1))
        )
        weights = (q @ k.transpose(-2, -1) / (c // self.heads) ** 0.5).softmax(dim=-1)
        return x + self.out((weights @ v).transpose(1, 2).reshape(b, n, c))


class Decoder(nn.Module):
    """Field report 004: the bandwidth branch sees the coordinates only, the modulation branch the images."""

    def __init__(self, width=16, scales=2, drop=0.0, norm=None):
        super().__init__()
        self.features = nn.Linear(2, width)
        self.bandwidth_lins = nn.ModuleList(
            nn.Sequential(Attention(width), nn.LayerNorm(width), MLP(width)) for _ in range(scales)
        )
        self.modulation = Attention(width)
        self.drop = nn.Dropout(drop)
        self.norm = norm
        self.head = nn.Linear(width, 3)

    def forward(self, latents, queries):
        gamma = self.features(queries.expand(latents.shape[0], -1, -1)).sin()
        gamma = self.drop(gamma)
        if self.norm is not None:
            gamma = self.norm(gamma.transpose(1, 2)).transpose(1, 2)
        h = 0
        for bandwidth in self.bandwidth_lins:
            h = F.relu(bandwidth(gamma) + self.modulation(gamma, latents) + h)
        return self.head(h)


def batch(device="cpu", rows=5, width=16, queries=12, dtype=torch.float32):
    made = torch.Generator().manual_seed(4)
    latents = torch.randn(rows, 7, width, generator=made, dtype=dtype)
    return latents.to(device), torch.rand(1, queries, 2, generator=made, dtype=dtype).to(device)


def loss(model, given):
    return model(*given).square().mean()


def test_the_branch_runs_on_one_row_and_the_rest_on_all():
    model = seeded(Decoder)
    fixes.apply_to_model("hoist_batch_invariant", model)
    sizes = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.addmm.default:
                sizes.append(args[1].shape[0] // 12)
            return func(*args, **(kwargs or {}))

    with Sizes():
        model(*batch())
    assert sizes.count(1) > sizes.count(5) > 0


@pytest.mark.parametrize("others", [[], *(["activation_checkpointing:keep=" + keep] for keep in KEEP)])
def test_gradients_are_the_same_and_undo_restores_the_model(others):
    model, given = seeded(Decoder).double(), batch(dtype=torch.float64)
    before, state = gradients(model, loss, given), state_of(model)
    fixes.apply_to_model(["hoist_batch_invariant", *others], model)
    for each in (model, copy.deepcopy(model)):
        same_gradients(before, gradients(each, loss, given), 1e-12 if others else 1e-13)
    fixes.undo(model)
    assert state_of(model) == state


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(16), nn.Sequential()])
def test_batch_statistics_see_all_rows_and_an_empty_sequential_is_the_identity(norm):
    model, given = seeded(lambda: Decoder(norm=norm)).double(), batch(dtype=torch.float64)
    other = copy.deepcopy(model)
    fixes.apply_to_model("hoist_batch_invariant", other)
    same_gradients(gradients(model, loss, given), gradients(other, loss, given), 1e-12)
    for name, one in model.named_buffers():
        torch.testing.assert_close(other.get_buffer(name), one)


def test_dropout_differs_between_rows():
    model, made = seeded(lambda: Decoder(drop=0.5)), []
    fixes.apply_to_model("hoist_batch_invariant", model)
    model.drop.register_forward_hook(lambda module, args, out: made.append(out))
    model(*batch())
    assert not torch.equal(made[0][0] == 0, made[0][1] == 0)


class Counting(Decoder):
    """Has every kind of state that a second forward would advance."""

    def __init__(self, write=False):
        super().__init__(drop=0.5, norm=nn.BatchNorm1d(16))
        self.calls, self.write = 0, write

    def forward(self, latents, queries):
        self.calls += 1
        out = super().forward(latents, queries)
        gamma = self.features(queries.expand(latents.shape[0], -1, -1))
        if self.write:
            gamma += latents.mean(1, keepdim=True)
        return out + self.head(gamma)


def test_forward_runs_once():
    """Counters, batch statistics and the random state are those of one forward without the fix."""
    given, states = batch(dtype=torch.float64), []
    for names in ([], ["hoist_batch_invariant"]):
        model = seeded(Counting).double()
        fixes.apply_to_model(names, model)
        torch.manual_seed(3)
        for _ in range(2):
            out = model(*given)
        buffers = [buffer.clone() for buffer in model.buffers()]
        states.append((model.calls, torch.get_rng_state(), out.detach(), *buffers))
    assert states[0][0] == states[1][0] == 2
    for one, other in zip(states[0][1:], states[1][1:], strict=True):
        torch.testing.assert_close(one, other)


def test_a_write_into_such_a_result_is_refused_with_its_line_and_not_run_again():
    model = seeded(lambda: Counting(write=True))
    fixes.apply_to_model("hoist_batch_invariant", model)
    with pytest.raises(UserError, match=r"test_hoist_batch_invariant\.py:\d+: add_ writes into a tensor"):
        model(*batch())
    assert model.calls == 1
    assert model.norm.num_batches_tracked == 1
    fixes.undo(model)
    model(*batch())
    work = oomph.Workload(lambda: Counting(write=True), batch, loss)
    assert fixes.propose(oomph.predict(work, gpu="h200"), work, only=("hoist_batch_invariant",)) == []


def test_the_model_returns_what_may_be_written():
    model = nn.Sequential(nn.Linear(3, 3))
    fixes.apply_to_model("hoist_batch_invariant", model)
    with torch.no_grad():
        model(torch.ones(1, 3).expand(4, 3)).add_(torch.arange(4.0).unsqueeze(1))


X = torch.randn(1, 6, 8, generator=torch.Generator().manual_seed(0)).expand(5, 6, 8)
REAL = torch.randn(5, 6, 8, generator=torch.Generator().manual_seed(1))
W = torch.randn(8, 8, generator=torch.Generator().manual_seed(2)).requires_grad_()
IMAGE, TOKENS = X[:4, :1], torch.tensor([[0, 0, 2]]).expand(4, 3)
OPERATIONS = {
    "linear": lambda: F.linear(X, W),
    "sum of two": lambda: X + X * 2 - 1,
    "real rows": lambda: X * REAL,
    "one more dimension": lambda: X + REAL.unsqueeze(1),
    "the same row lower down": lambda: X.unsqueeze(0) * REAL.unsqueeze(1),
    "softmax over the batch": lambda: X.softmax(0),
    "softmax": lambda: X.softmax(-1),
    "mean": lambda: X.mean((1, 2), keepdim=True),
    "cat along the batch": lambda: torch.cat([X, X]),
    "cat": lambda: torch.cat((X, X.sin()), dim=-1),
    "stack": lambda: torch.stack([X, X], 1),
    "products": lambda: X @ X.transpose(1, 2) @ X,
    "product with weights": lambda: X @ W,
    "merged": lambda: X.relu().view(-1, 8) @ W,
    "reshaped": lambda: X.relu().transpose(1, 2).reshape(5, -1),
    "attention": lambda: F.scaled_dot_product_attention(X, X, X.sin(), is_causal=True),
    "attention with a mask of rows": lambda: F.scaled_dot_product_attention(X, X, X, REAL @ REAL.mT),
    "norm": lambda: F.layer_norm(X, (8,)),
    "norm over rows": lambda: F.layer_norm(X, (5, 6, 8)),
    "convolution": lambda: F.conv1d(X, torch.ones(4, 6, 3)),
    "unbatched convolution": lambda: F.conv1d(X[:, 0], torch.ones(4, 5, 3)),
    "repeat": lambda: X[:1].repeat(5, 1, 1).exp() + X[0].repeat(5, 1, 1),
    "where": lambda: torch.where(X > 0, X, REAL),
    "embedding": lambda: F.embedding(torch.arange(3).expand(4, 3), W),
    "flip": lambda: X.flip(0).cumsum(0),
    "all of it, unbiased": lambda: X.var(True) + torch.std(X, False) + X.sum([]) + X.mean(dim=None),
    "norm of all": lambda: torch.norm(X) + torch.norm(X, 2, 1, True),
    "unbatched images": lambda: F.conv2d(X[:4], torch.ones(4, 4, 3, 3)),
    "unbatched volumes": lambda: F.conv3d(X[:4, None], torch.ones(4, 4, 1, 3, 3)),
    "places": lambda: torch.where(X > 0)[0].float(),
    "frequencies": lambda: F.embedding(TOKENS, W, scale_grad_by_freq=True),
    "a weight of equal rows": lambda: torch.embedding(X[:, 0] * 2, TOKENS),
    "named arguments": lambda: F.linear(weight=W, input=torch.reshape(input=X * 2, shape=(5, 6, 8))),
    "other bits": lambda: (X * 2).view(torch.int32).view(dtype=torch.float64).view(torch.float32),
    "a norm's weight": lambda: F.layer_norm(X, (8,), torch.ones(1).expand(8), W[0]),
    "attention without a batch": lambda: F.scaled_dot_product_attention(
        *[X[:, 0] * n for n in (1, 2, 3)], W[:1, :5]
    ),
    "out": lambda: torch.matmul(X, W.detach(), out=(out := torch.empty(5, 6, 8))) * 0 + out,
    "a custom op": lambda: torch.ops.test_hoist.softmax(X * 2, 1),
    "a kernel": lambda: WithKernel.apply(X * 2),
    "sparse": lambda: torch.eye(8).to_sparse() @ W,
    "vmap": lambda: torch.vmap(lambda row: torch.softmax(X[:, 0] * row, 1))(W),
    "a source that is changed": lambda: changed_afterwards(lambda one: one.repeat(5, 1, 1)),
    "an expanded source that is changed": lambda: changed_afterwards(
        lambda one: one.expand(5, 6, 8).contiguous()
    ),
    "rows that the program made": lambda: X.reshape(30, 8).clone().add_(1) + X.reshape(30, 8).mul_(2),
}


@torch.library.custom_op("test_hoist::softmax", mutates_args=())
def softmax(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.softmax(0)


@torch.library.custom_op("test_hoist::fill_first", mutates_args=("y",))
def fill_first(x: torch.Tensor, y: torch.Tensor) -> None:
    y[0].fill_(3)


class WithKernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.as_strided(x.contiguous(), x.shape, (48, 8, 1)) * 2


def changed_afterwards(take):
    source = torch.ones(1, 6, 8)
    taken = take(source)
    source.zero_()
    return taken


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_gives_what_it_gives_without(name):
    results = []
    for mode in (contextlib.nullcontext(), BatchInvariantMode()):
        with mode:
            result = OPERATIONS[name]()
        of_weights = torch.autograd.grad(result.square().sum(), W)[0] if result.requires_grad else None
        results.append((result.detach().contiguous(), of_weights))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


WRITES = {
    "a row": lambda y: y[0].zero_(),
    "rows": lambda y: [row.add_(number) for number, row in enumerate(y.unbind())],
    "data": lambda y: y.data[:2].zero_(),
    "a reshaped copy": lambda y: y.reshape(30, 8).mul_(2),
    "out": lambda y: torch.add(REAL, 1, out=y),
    "inplace": lambda y: F.elu(y, 1.0, True),
    "a list": lambda y: torch._foreach_add_([y[0]], 1),
    "a custom op": lambda y: torch.ops.test_hoist.fill_first(REAL, y),
}


@pytest.mark.parametrize("name", WRITES)
def test_no_write_changes_other_rows(name):
    with BatchInvariantMode(), pytest.raises(UserError, match="writes into a tensor that holds one row"):
        WRITES[name](X * 2)


class Slopes(nn.Module):
    """The derivative of a field at coordinates, as physics-informed networks have it."""

    def __init__(self, inside):
        super().__init__()
        self.field, self.inside = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)), inside

    def forward(self, places):
        if not self.inside:
            return self.field(places)
        places = places.expand(5, -1, -1) * 1
        return torch.autograd.grad(self.field(places).sum(), places, create_graph=True)[0]


@pytest.mark.parametrize("as_leaf", [True, False])
def test_the_gradient_of_every_row_that_the_caller_gives_is_its_own(as_leaf):
    model, found = seeded(lambda: Slopes(False)), []
    for names in ([], ["hoist_batch_invariant"]):
        fixes.apply_to_model(names, model)
        places = torch.rand(1, 6, 2, generator=torch.Generator().manual_seed(0))
        rows = places.expand(5, 6, 2).requires_grad_() if as_leaf else places.requires_grad_().expand(5, 6, 2)
        found.append(torch.autograd.grad((model(rows) * torch.arange(5.0).view(5, 1, 1)).sum(), rows)[0])
    torch.testing.assert_close(*found)


def test_a_gradient_of_every_row_inside_the_model_is_refused():
    model = Slopes(True)
    fixes.apply_to_model("hoist_batch_invariant", model)
    with pytest.raises(UserError, match="grad asks for the gradient of every row"):
        model(torch.rand(1, 6, 2).requires_grad_())


def big(device):
    return batch(device, rows=64, width=256, queries=1024)


def test_the_saving_is_proposed_where_the_branch_is():
    work = oomph.Workload(lambda: Decoder(256), big, loss)
    prediction = oomph.predict(work, gpu="h200")
    (proposal,) = fixes.propose(prediction, work, only=("hoist_batch_invariant",))
    assert proposal.saving > prediction.peak.reserved * 0.4
    assert proposal.slowdown < 1
