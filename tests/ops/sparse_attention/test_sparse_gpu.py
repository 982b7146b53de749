"""nsa on a real GPU: the kernels against the float64 reference, the same bits every time, predicted peaks."""

import pytest
import torch
from sparse_cases import NAMES, inputs, learned
from test_sparse_memory import over_inputs

from oomph.ops.sparse_attention import chunked, nsa
from oomph.ops.sparse_attention.compression import compressed_pair
from oomph.ops.sparse_attention.problem import make_sizes
from oomph.ops.sparse_attention.reference import reference
from oomph.ops.sparse_attention.selection import select as selection

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def _poisoned():
    """torch.empty gives NaNs."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def _choice_of(monkeypatch):
    """The blocks that the kernels select, for the reference: rounding may decide between almost equals."""
    kept = []
    select = selection.select

    def remember(*arguments):
        kept.append(select(*arguments))
        return kept[-1]

    monkeypatch.setattr(selection, "select", remember)
    return kept


@pytest.mark.usefixtures("_poisoned")
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
def test_a_gpu_agrees_with_the_reference(tokens, heads, key_heads, width, dtype, tolerance, monkeypatch):
    kept = _choice_of(monkeypatch)
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
    sizes = make_sizes(width, 64, 32, 16, 16, 512, None)
    ck, cv = compressed_pair(k, v, learned(wide_weight), sizes)
    slots_BHTS = kept[0].permute(0, 2, 1, 3).long()
    blocks = sizes.blocks(tokens)
    chosen = torch.zeros((*slots_BHTS.shape[:3], blocks + 1), dtype=torch.bool, device="cuda")
    chosen = chosen.scatter_(-1, torch.where(slots_BHTS < 0, blocks, slots_BHTS), True)[..., :blocks]
    expected = reference(q, k, v, tuple(gates), ck, cv, sizes, chosen)
    right = torch.autograd.grad(expected, wide, grad.double(), allow_unused=True)
    for name, a, b in zip(NAMES, (out, *got), (expected, *right), strict=True):
        if a is not None and b is not None and b.abs().max() > 0:
            assert (a.double() - b).abs().max() <= tolerance * b.abs().max(), name


def test_the_kernels_choose_as_the_reference_does():
    tensors, _ = inputs(1500, 8, 2, 64, dtype=torch.float32, device="cuda")
    out = nsa(*tensors, compress="mean", top_n=6)
    expected = nsa(*(x.double() for x in tensors), compress="mean", top_n=6, impl="reference")
    wrong = ((out.double() - expected).abs().amax((0, 2, 3)) > 1e-4).float().mean()
    assert wrong < 0.005  # tokens for which two blocks are equal within float32's rounding


def test_65536_tokens_in_float32_agree_with_plain_torch_in_float64_on_slices():
    tokens, sizes = 65_536, make_sizes(16, 64, 32, 16, 16, 512, None)
    tensors, _ = inputs(tokens, 2, 1, 16, dtype=torch.float32, device="cuda")
    out = nsa(*tensors, compress="mean")
    q, k, v, *gates = (x.double() for x in tensors)
    whole = (q, k, v, *compressed_pair(k, v, "mean", sizes), *gates)
    for start in (0, 30_000, tokens - 100):
        right = chunked._attend(chunked._slices(whole, start, start + 100, sizes), start, sizes)
        found = out[:, start : start + 100].double()
        wrong = ((found - right).abs().amax((0, 2, 3)) > 1e-4).float().mean()
        assert wrong <= 0.02  # tokens for which two blocks are equal within float32's rounding


def test_predicted_and_measured_peaks_agree():
    tokens, heads, key_heads, width = 8192, 16, 4, 64
    predicted, _ = over_inputs(tokens, heads, key_heads, width)
    tensors, grad = inputs(tokens, heads, key_heads, width, dtype=torch.bfloat16, device="cuda")
    for tensor in tensors:
        tensor.requires_grad_()
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        nsa(*tensors, compress="mean").backward(grad)
        measured = torch.cuda.max_memory_allocated() - before
        for tensor in tensors:
            tensor.grad = None
    assert abs(measured - predicted) <= 0.01 * predicted
