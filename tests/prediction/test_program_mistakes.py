"""Mistakes of a program come out as the program's, with its own line and in CUDA's words."""

import pytest
import torch
import torch.nn.functional as F
from small_programs import line_of, mean_square, workload
from torch import nn

import oomph
from oomph import ProgramError, UserError, Workload

pytestmark = pytest.mark.usefixtures("in_process")


class Stray(nn.Module):
    """Forgets to register its table, so that it stays on the host."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.table = torch.zeros(64)

    def forward(self, x):
        x = self.linear(x)
        return x + self.table


class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        return self.linear(x[:, 1:])


def test_a_tensor_on_the_wrong_device_inside_the_model_is_named_with_its_line():
    with pytest.raises(ProgramError, match="Expected all tensors to be on the same device") as caught:
        oomph.predict(workload(Stray))
    assert caught.value.file == __file__
    assert caught.value.line == line_of(Stray.forward, "self.table")


@pytest.mark.parametrize(
    ("batch", "loss"),
    [
        (lambda device: {"a": {"x": torch.randn(32, 64)}}, lambda model, b: mean_square(model, b["a"]["x"])),
        (lambda device: torch.randn(32, 64), lambda model, b: mean_square(model, b[:4])),
        (lambda device: [torch.randn(64, 32)], lambda model, b: mean_square(model, b[0].T)),
    ],
    ids=["nested", "sliced", "transposed"],
)
def test_a_batch_on_the_wrong_device_is_found_when_nested_or_seen_through_a_view(batch, loss):
    with pytest.raises(UserError, match="batch"):
        oomph.predict(workload(batch=batch, loss=loss))


def test_a_stray_tensor_in_a_batch_is_named_by_its_key():
    def batch(device):
        return {"x": torch.randn(32, 64, device=device), "target": torch.randn(32, 64)}

    def loss(model, batch):
        return F.mse_loss(model(batch["x"]), batch["target"])

    with pytest.raises(UserError, match="'target'"):
        oomph.predict(workload(batch=batch, loss=loss))


def test_a_target_that_is_neither_workload_nor_function_is_the_users_mistake():
    with pytest.raises(UserError, match="int was given"):
        oomph.predict(42)


def test_a_model_that_raises_gives_its_own_line_and_traceback():
    with pytest.raises(ProgramError, match=r"shapes cannot be multiplied \(32x63 and 64x64\)") as caught:
        oomph.predict(workload(Broken))
    assert (caught.value.file, caught.value.line) == (__file__, line_of(Broken.forward, "return"))
    assert f"line {caught.value.line}, in forward" in caught.value.traceback
    assert "RuntimeError: " in caught.value.traceback
    assert caught.value.exit_status == 3


def test_a_gpu_that_is_a_number_is_the_users_mistake():
    with pytest.raises(UserError, match="is not a name"):
        oomph.predict(workload(), gpu=24)


def test_the_default_loss_says_what_it_needs():
    with pytest.raises(UserError, match="returned no loss"):
        oomph.predict(
            Workload(lambda: nn.Linear(4, 4), lambda device: {"input": torch.ones(2, 4, device=device)})
        )


BF16 = torch.bfloat16


def make(*shape, dtype=torch.float32):
    return torch.randn(*shape, device="cuda", dtype=dtype)


def whole(*shape):
    return torch.zeros(*shape, device="cuda", dtype=torch.int64)


REFUSED = {
    "linear": lambda: F.linear(make(4, 8), make(6, 8, dtype=BF16)),
    "linear of tokens": lambda: F.linear(make(2, 4, 8, dtype=BF16), make(6, 8)),
    "linear with bias": lambda: F.linear(make(4, 8), make(6, 8, dtype=BF16), make(6, dtype=BF16)),
    "linear with another bias": lambda: F.linear(make(4, 8), make(6, 8), make(6, dtype=BF16)),
    "product of whole numbers": lambda: whole(4, 8) @ whole(8, 6),
    "products": lambda: make(2, 4, 8) @ make(2, 8, 6, dtype=BF16),
    "products of whole numbers": lambda: whole(2, 4, 8) @ whole(2, 8, 6),
    "sum of products": lambda: torch.addbmm(make(4, 6), make(2, 4, 8), make(2, 8, 6, dtype=BF16)),
    "product with a vector": lambda: make(4, 8) @ make(8, dtype=BF16),
    "product in place": lambda: make(4, 6).addmm_(make(4, 8), make(8, 6, dtype=BF16)),
    "product into a tensor": lambda: torch.mm(make(4, 8), make(8, 6, dtype=BF16), out=make(4, 6)),
    "convolution": lambda: F.conv2d(make(1, 2, 8, 8), make(3, 2, 3, 3, dtype=BF16)),
    "convolution with another bias": lambda: F.conv2d(
        make(1, 2, 8, 8), make(3, 2, 3, 3), make(3, dtype=BF16)
    ),
    "layer norm": lambda: F.layer_norm(make(4, 8, dtype=BF16), (8,), make(8)),
    "group norm": lambda: F.group_norm(make(4, 8, dtype=BF16), 2, make(8)),
    "weights of classes": lambda: F.cross_entropy(make(4, 8, dtype=BF16), whole(4), weight=make(8)),
    "added rows": lambda: make(4, 8).index_add_(0, whole(2), make(2, 8, dtype=BF16)),
    "assigned rows": lambda: make(4, 8).__setitem__(whole(2), make(2, 8, dtype=BF16)),
}


def run(call):
    def program():
        call()

    return oomph.predict(program, gpu="h200")


@pytest.mark.parametrize("name", REFUSED)
def test_what_cuda_refuses_is_refused(name):
    words = "not implemented on CUDA: self is int64" if "whole numbers" in name else "(?i)bfloat16"
    with pytest.raises(ProgramError, match=words):
        run(REFUSED[name])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda x: torch.nn.BatchNorm1d(9).cuda()(x.transpose(1, 2)),
            "running_mean should contain 8 elements",
        ),
        (lambda x: torch.nn.RMSNorm(9).cuda()(x), "normalized_shape"),
    ],
    ids=["batch norm", "RMS norm"],
)
def test_what_torch_says_of_wrong_sizes_is_said(call, words):
    with pytest.raises(ProgramError, match=words):
        run(lambda: call(make(4, 6, 8)))


def under_autocast():
    with torch.autocast("cuda", BF16):
        return F.layer_norm(F.linear(make(4, 8), make(8, 8, dtype=BF16)), (8,), make(8))


TAKEN = {
    "autocast": under_autocast,
    "RMS norm": lambda: F.rms_norm(make(4, 8), (8,), make(8, dtype=BF16)),
    "batch norm": lambda: F.batch_norm(make(4, 8, dtype=BF16), None, None, make(8), training=True),
    "mean square": lambda: F.mse_loss(make(4, 8), make(4, 8, dtype=BF16)),
    "probabilities": lambda: F.cross_entropy(make(4, 8), make(4, 8, dtype=BF16)),
    "product in a wider dtype": lambda: torch.mm(
        make(4, 8, dtype=BF16), make(8, 6, dtype=BF16), out_dtype=torch.float32
    ),
    "sum in a wider dtype": lambda: torch.addmm(
        make(4, 6), make(4, 8, dtype=BF16), make(8, 6, dtype=BF16), out_dtype=torch.float32
    ),
    "a number": lambda: make(4, 8).__setitem__(whole(2), 1),
}


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("name", TAKEN)
def test_what_cuda_takes_is_taken(name):
    assert run(TAKEN[name]).peak.allocated > 0
