"""A step of deterministic kernels: what they need more, and that asking for them ends with the trace."""

import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import oomph
from oomph.errors import UserError
from oomph.prediction.ops.matmul import cublas_workspace_bytes
from oomph.torch_internals import deterministic_algorithms
from oomph.workload import Workload

pytestmark = pytest.mark.usefixtures("in_process")

MiB = 2**20
B, H, T, D = 1, 8, 4096, 64


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(H * D, 3 * H * D, bias=False)

    def forward(self, x):
        q, k, v = (part.unflatten(2, (H, D)).transpose(1, 2) for part in self.proj(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def attention(deterministic):
    return Workload(
        model=Attention,
        batch=lambda device: torch.randn(B, T, H * D, device=device, dtype=torch.bfloat16),
        loss=lambda model, x: model(x).float().sum(),
        optimizer=None,
        dtype="bfloat16",
        deterministic=deterministic,
    )


def test_flash_keeps_a_sum_for_every_part_of_the_keys():
    """On an A100 with its 108 multiprocessors, 8 heads: 14 sums of q's size in float32, in place of one."""
    plain, exact = (oomph.predict(attention(each), gpu="a100-80gb").peak.allocated for each in (False, True))
    more_sums = (14 - 1) * B * H * T * D * 4
    workspaces = 2 * (32 * MiB - cublas_workspace_bytes((8, 0)))  # forward's thread and backward's
    assert exact - plain == pytest.approx(more_sums + workspaces, abs=MiB)


def test_a_program_that_asks_does_not_change_the_next_prediction(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)

    def program():
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.utils.deterministic.fill_uninitialized_memory = False
        torch.use_deterministic_algorithms(True)
        torch.empty(1, device="cuda")

    before = oomph.predict(attention(False), gpu="a100-80gb").peak.allocated
    oomph.predict(program)
    assert oomph.predict(attention(False), gpu="a100-80gb").peak.allocated == before
    assert torch.utils.deterministic.fill_uninitialized_memory


ROWS, WIDTH = 1 << 16, 256


def moved(how, deterministic):
    def loss(model, x):
        rows = model(x)
        into = torch.zeros_like(rows)
        index = torch.zeros(ROWS, dtype=torch.int64, device=rows.device)
        if how == "index_add":
            return into.index_add(0, index, rows).sum()
        if how == "scatter_add":
            whole = torch.zeros(ROWS, WIDTH, dtype=torch.int64, device=rows.device)
            return into.scatter_add(0, whole, rows).sum()
        if how == "scatter_add of rows":
            return into.scatter_add(0, index[:, None].expand(ROWS, WIDTH), rows).sum()
        if how == "cumsum":
            return rows.cumsum(0).sum()
        return F.cross_entropy(rows.view(64, WIDTH, -1), index.view(64, -1), reduction=how)

    work = Workload(
        model=lambda: nn.Linear(WIDTH, WIDTH),
        batch=lambda device: torch.randn(ROWS, WIDTH, device=device),
        loss=loss,
        deterministic=deterministic,
    )
    return oomph.predict(work, gpu="h200")


@pytest.mark.parametrize(
    ("how", "more"),
    [
        ("index_add", ROWS * WIDTH * 4),  # the product with alpha; sorting so few indices is little beside it
        ("scatter_add", 3 * ROWS * WIDTH * 8),  # an index for every number, sorted with where each came from
        ("scatter_add of rows", 0),
    ],
)
def test_scatters_sort_their_indices(how, more):
    plain, exact = (moved(how, each).peak.allocated for each in (False, True))
    assert more <= exact - plain <= 2 * more + 8 * MiB


def test_an_op_that_torch_would_refuse_is_an_error():
    assert moved("mean", False).peak.allocated > 0
    message = r"torch has none for nll_loss2d_forward of .*test_deterministic\.py:\d+$"
    with pytest.raises(UserError, match=message):
        moved("mean", True)


def test_a_program_that_asks_itself_ends_where_a_run_would():
    def program():
        torch.use_deterministic_algorithms(True)
        row = torch.ones(8, device="cuda")
        row.put_(torch.zeros(2, dtype=torch.int64, device="cuda"), row[:2])

    with pytest.raises(oomph.ProgramError, match=r"put_ of .* does not have a deterministic implementation"):
        oomph.predict(program)


def test_what_was_asked_before_is_left_as_it_was(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with deterministic_algorithms():
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
            assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
        with pytest.raises(ZeroDivisionError), deterministic_algorithms():
            print(1 / 0)
        with deterministic_algorithms():
            del os.environ["CUBLAS_WORKSPACE_CONFIG"]
        oomph.predict(attention(False), gpu="h200")
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("given", "right"),
    [(None, 8320 * 1024), (":4096:8", 32 * MiB), (":16:8", 128 * 1024), (":4096:2:16:8", 8320 * 1024)],
)
def test_the_workspace_of_matrix_products_is_what_the_environment_asks_for(monkeypatch, given, right):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if given is not None:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", given)
    assert cublas_workspace_bytes((8, 0)) == right


def test_a_word_is_neither_true_nor_false():
    with pytest.raises(UserError, match="deterministic='no' is not valid; give True or False"):
        Workload(model=Attention, batch=lambda device: None, deterministic="no")
