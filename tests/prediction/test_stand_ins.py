"""Programs that import packages which need a GPU to be built, on a machine that has none of them."""

import importlib.metadata
import importlib.util
import sys

import pytest
import torch
import torch.nn.functional as F
from small_programs import in_trace, notes_of
from torch.nn.attention import SDPBackend, sdpa_kernel

import oomph
from oomph.prediction.compat import stand_ins

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) for name in stand_ins.VERSIONS), reason="one is installed"
)


@pytest.fixture(autouse=True)
def _all_stand_ins(monkeypatch):
    monkeypatch.setenv("OOMPH_STAND_INS", ",".join(stand_ins.VERSIONS))


BATCH, LENGTH, HEADS, HEAD = 2, 256, 4, 64
ROWS = BATCH * LENGTH
OUT = ROWS * HEADS * HEAD * 2
LSE = ROWS * HEADS * 4
STATE = 16  # of the random generator


def _random(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=True)


def _grown(call):
    """What a call returns, by how much it raised allocated memory, and by how much it did meanwhile."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    returned = call()
    return returned, torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before


def _check(call, tensors, forward, backward, during=None):
    """Bytes that stay after the forward pass (and the most meanwhile), and the most in the backward pass."""
    out, kept, most = _grown(call)
    assert kept == forward
    assert during is None or most == during
    out = out[0] if isinstance(out, tuple) else out
    grad = torch.ones_like(out)
    assert _grown(lambda: out.backward(grad))[2] == backward
    assert all(each.grad.shape == each.shape and each.grad.dtype == each.dtype for each in tensors)


@in_trace(lambda found: "flash_attn is not installed here" in notes_of(found))
def test_flash_attention_has_the_memory_of_flash_api():
    from flash_attn import flash_attn_func

    query, key, value = (_random(BATCH, LENGTH, HEADS, HEAD) for _ in range(3))
    sums = ROWS * HEADS * HEAD * 4  # of the gradient of queries, in float32
    _check(
        lambda: flash_attn_func(query, key, value, causal=True),
        (query, key, value),
        forward=OUT + LSE + STATE,
        during=OUT + LSE + STATE,
        backward=3 * OUT + LSE + sums,
    )
    few = [_random(1, length, HEADS, HEAD) for length in (64, 4096, 4096)]
    rows = 64 * HEADS
    kept = rows * HEAD * 2 + rows * 4 + STATE
    splits = 16 * (rows * 4 + rows * HEAD * 4)  # 4 blocks on 132 multiprocessors: one for each 256 keys
    assert _grown(lambda: flash_attn_func(*few))[1:] == (kept, kept + splits)
    parts = -(-132 // (BATCH * HEADS))
    _check(
        lambda: flash_attn_func(query, key, value, deterministic=True, dropout_p=0.1),
        (),
        forward=OUT + LSE + STATE,
        during=OUT + LSE + STATE,
        backward=3 * OUT + LSE + parts * sums,
    )


@in_trace()
def test_flash_attention_expands_gradients_of_grouped_keys_and_pads_heads():
    from flash_attn import flash_attn_func

    query, key, value = (_random(BATCH, LENGTH, heads, HEAD) for heads in (HEADS, 2, 2))
    _check(
        lambda: flash_attn_func(query, key, value),
        (query, key, value),
        forward=OUT + LSE + STATE,
        backward=OUT + 2 * OUT // 2 + LSE + ROWS * HEADS * HEAD * 4 + 2 * OUT,
    )
    odd = [_random(BATCH, LENGTH, HEADS, HEAD - 4) for _ in range(3)]
    out, kept, _ = _grown(lambda: flash_attn_func(*odd))
    assert kept == 4 * OUT + LSE + STATE
    assert out.shape == odd[0].shape
    out.float().sum().backward()
    assert odd[0].grad.shape == odd[0].shape


@in_trace()
def test_flash_attention_of_joined_sequences_is_padded_by_128_rows_each():
    from flash_attn import flash_attn_varlen_func, flash_attn_varlen_qkvpacked_func

    starts = torch.tensor([0, 100, ROWS], dtype=torch.int32, device="cuda")
    padded = ROWS + 128 * BATCH
    backward = 3 * OUT + padded * HEADS * 4 + padded * HEADS * HEAD * 4
    parts = [_random(ROWS, HEADS, HEAD) for _ in range(3)]
    packed = _random(ROWS, 3, HEADS, HEAD)
    _check(
        lambda: flash_attn_varlen_func(*parts, starts, starts, LENGTH, LENGTH),
        parts,
        forward=OUT + LSE + STATE,
        backward=backward,
    )
    _check(
        lambda: flash_attn_varlen_qkvpacked_func(packed, starts, LENGTH),
        (packed,),
        forward=OUT + LSE + STATE,
        backward=backward,
    )


@in_trace()
def test_flash_attention_takes_what_pytorchs_own_takes():
    from flash_attn import flash_attn_func
    from xformers.ops import LowerTriangularMask, memory_efficient_attention

    def run(attend):
        tensors = [_random(4, 1000, 8, 96) for _ in range(3)]
        out, kept, most = _grown(lambda: attend(*tensors))
        grad = torch.ones_like(out)
        return kept, most, _grown(lambda: out.backward(grad))[2]

    def of_pytorch(*tensors):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            heads_first = (each.transpose(1, 2) for each in tensors)
            return F.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)

    def of_xformers(*tensors):
        return memory_efficient_attention(*tensors, LowerTriangularMask())

    *expected, backward = run(of_pytorch)
    unused = 8  # a second tensor for the state of the random generator
    for attend in (lambda *tensors: flash_attn_func(*tensors, causal=True), of_xformers):
        assert run(attend) == (*(each - unused for each in expected), backward)


@in_trace()
def test_selective_scan_has_the_memory_of_its_source():
    from mamba_ssm import selective_scan_fn

    batch, channels, length, states = 2, 256, 4096, 16
    u, delta, z = (_random(batch, channels, length) for _ in range(3))
    A = _random(channels, states, dtype=torch.float32)
    B, C = (_random(batch, states, length) for _ in range(2))
    D, bias = (_random(channels, dtype=torch.float32) for _ in range(2))
    wide, of_states = batch * channels * length * 2, batch * states * length
    chunks = batch * channels * 2 * (2 * states) * 4
    _check(
        lambda: selective_scan_fn(u, delta, A, B, C, D, z, bias, delta_softplus=True),
        (u, delta, A, B, C, D, z, bias),
        forward=2 * wide + chunks,
        backward=3 * wide + channels * states * 4 + 2 * of_states * (4 + 2) + 2 * channels * 4,
    )


@in_trace()
def test_mamba_layers_train_in_bf16_and_under_autocast():
    from mamba_ssm import Mamba, Mamba2
    from mamba_ssm.modules.block import Block
    from mamba_ssm.ops.triton.layer_norm import RMSNorm

    for layer in (Mamba, Mamba2):
        for dtype in (torch.bfloat16, torch.float32):
            block = Block(256, layer, norm_cls=RMSNorm, fused_add_norm=True, residual_in_fp32=True)
            block = block.cuda().to(dtype)
            x = _random(2, 512, 256, dtype=dtype)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                out, residual = block(x)
            (out.float().sum() + residual.sum()).backward()
            grads = [x, *block.parameters()]
            assert all(each.grad.shape == each.shape for each in grads)
            assert residual.dtype == torch.float32


@in_trace()
def test_the_other_parts_of_flash_attn_run():
    from flash_attn.bert_padding import pad_input, unpad_input
    from flash_attn.layers.rotary import RotaryEmbedding
    from flash_attn.losses.cross_entropy import CrossEntropyLoss
    from flash_attn.modules.mha import MHA
    from flash_attn.ops.rms_norm import rms_norm

    x = _random(2, 128, 256)
    mask = torch.ones(2, 128, dtype=torch.int32, device="cuda")
    rows, indices, starts, longest, _ = unpad_input(x, mask)
    mixer = MHA(256, 4, rotary_emb_dim=32, causal=True, use_flash_attn=True).cuda().bfloat16()
    joined = MHA(256, 4, num_heads_kv=2, use_flash_attn=True).cuda().bfloat16()
    out = mixer(x) + pad_input(joined(rows, cu_seqlens=starts, max_seqlen=longest), indices, 2, 128)
    out = rms_norm(out, torch.ones(256, device="cuda", dtype=torch.bfloat16), 1e-5)
    labels = torch.zeros(256, dtype=torch.int64, device="cuda")
    CrossEntropyLoss(inplace_backward=True)(out.flatten(0, 1), labels).backward()
    assert x.grad.shape == x.shape
    assert RotaryEmbedding(32).inv_freq.shape == (16,)


@pytest.mark.parametrize(
    ("gpu", "dtype", "message"),
    [
        ("h200", torch.float32, "FlashAttention only support fp16 and bf16 data type"),
        ("t4", torch.float16, "FlashAttention only supports Ampere GPUs or newer"),
    ],
)
def test_flash_attention_refuses_what_the_real_one_refuses(gpu, dtype, message):
    def program():
        from flash_attn import flash_attn_func

        flash_attn_func(*(_random(1, 128, 2, 64, dtype=dtype) for _ in range(3)))

    with pytest.raises(oomph.ProgramError, match=message) as caught:
        oomph.predict(program, gpu=gpu)
    assert caught.value.file == __file__


def test_stand_ins_are_found_in_predictions_only(monkeypatch):
    def find():
        return [importlib.util.find_spec(name) is not None for name in stand_ins.VERSIONS]

    def program():
        assert all(find())
        assert importlib.metadata.version("flash-attn") == stand_ins.VERSIONS["flash_attn"]
        import flash_attn

        assert flash_attn.__version__ == stand_ins.VERSIONS["flash_attn"]
        torch.ones(1, device="cuda", requires_grad=True).sum().backward()

    oomph.predict(program)
    assert not any(find())
    assert "flash_attn" not in sys.modules
    monkeypatch.setenv("OOMPH_STAND_INS", "flash-attn, mamba-ssm,xformers,causal-conv1d")
    oomph.predict(program)
    monkeypatch.setenv("OOMPH_STAND_INS", "xformers")
    with pytest.raises(oomph.ProgramError, match="AssertionError"):
        oomph.predict(program)


def test_a_name_without_a_stand_in_is_refused(monkeypatch):
    monkeypatch.setenv("OOMPH_STAND_INS", "flash-atn")
    with pytest.raises(oomph.UserError, match="no stand-in for flash_atn; valid: flash_attn, xformers"):
        oomph.predict(print)


@pytest.mark.usefixtures("in_process")
def test_a_trace_in_this_process_removes_what_it_imported():
    def program():
        import causal_conv1d

        assert sys.modules["causal_conv1d"] is causal_conv1d
        torch.ones(1, device="cuda", requires_grad=True).sum().backward()

    oomph.predict(program)
    assert "causal_conv1d" not in sys.modules
    assert importlib.util.find_spec("causal_conv1d") is None


def test_transformers_takes_its_paths_with_the_packages():
    transformers = pytest.importorskip("transformers")

    def program():
        config = transformers.LlamaConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=128,
            attn_implementation="flash_attention_2",
        )
        model = transformers.LlamaForCausalLM(config).cuda().bfloat16()
        tokens = torch.zeros(2, 64, dtype=torch.int64, device="cuda")
        mask = torch.ones_like(tokens)
        mask[:, :8] = 0
        return lambda: model(tokens, attention_mask=mask, labels=tokens).loss.backward()

    found = oomph.predict(program, gpu="h200")
    assert "flash_attn is not installed here" in notes_of(found)
    assert not transformers.utils.is_flash_attn_2_available()


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("import apex", "torch.optim.AdamW(fused=True)"),
        ("import deepspeed.ops", "install it here"),
        ("from flash_attn import not_there", "stand-in for flash_attn"),
        ("import mamba_ssm.not_there", "stand-in for mamba_ssm"),
    ],
)
def test_a_missing_package_says_what_to_do(line, advice):
    if importlib.util.find_spec(line.split()[1].partition(".")[0]):
        pytest.skip("installed")
    with pytest.raises(oomph.ProgramError) as caught:
        oomph.predict(lambda: exec(line))
    assert advice in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_program_that_fails_without_a_package_runs_again_with_its_stand_in(monkeypatch):
    monkeypatch.delenv("OOMPH_STAND_INS")

    def needs():
        from flash_attn import flash_attn_func

        query, key, value = (_random(BATCH, LENGTH, HEADS, HEAD) for _ in range(3))
        flash_attn_func(query, key, value).sum().backward()

    def does_without():
        try:
            import mamba_ssm  # noqa: F401
        except ImportError:
            torch.ones(1, device="cuda", requires_grad=True).sum().backward()

    assert "flash_attn is not installed here" in notes_of(oomph.predict(needs))
    assert oomph.predict(does_without).peak.allocated
