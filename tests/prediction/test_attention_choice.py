"""Which attention backend a GPU would run."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from oomph import gpus
from oomph.gpus import GPU
from oomph.prediction.cuda.attention import (
    AttentionCall,
    Backend,
    Operand,
    SdpaSettings,
    choose_backend,
)

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
P100, V100, T4, A100, RTX3090, H200, B200, RTX5090 = (
    gpus.find(name) for name in ("p100", "v100-16gb", "t4", "a100-40gb", "rtx3090", "h200", "b200", "rtx5090")
)


def operand(*shape: int, dtype: torch.dtype = BF16, requires_grad: bool = False) -> Operand:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return Operand(shape, tuple(strides), dtype, requires_grad)


def call(
    dtype: torch.dtype = BF16,
    head: int = 64,
    *,
    heads: int = 8,
    key_heads: int = 8,
    lengths: tuple[int, int] = (1024, 1024),
    mask: Operand | None = None,
    gpu: GPU = H200,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    value_head: int | None = None,
    grad: bool = True,
) -> AttentionCall:
    return AttentionCall(
        operand(2, heads, lengths[0], head, dtype=dtype, requires_grad=grad),
        operand(2, key_heads, lengths[1], head, dtype=dtype),
        operand(2, key_heads, lengths[1], value_head or head, dtype=dtype),
        mask,
        dropout_p,
        is_causal,
        heads != key_heads,
        True,
        gpu.capability,
    )


def square_mask(dtype: torch.dtype = torch.bool, requires_grad: bool = False) -> Operand:
    return operand(1, 1, 1024, 1024, dtype=dtype, requires_grad=requires_grad)


CHOICES = [
    ("bf16 on Hopper runs cuDNN", call(), Backend.CUDNN),
    ("bf16 on Blackwell data-centre chips runs cuDNN", call(gpu=B200), Backend.CUDNN),
    ("bf16 on Ampere runs flash", call(gpu=A100), Backend.FLASH),
    ("bf16 on consumer Blackwell runs flash", call(gpu=RTX5090), Backend.FLASH),
    ("bf16 before Ampere has no fused kernel", call(gpu=V100), Backend.MATH),
    ("fp16 before Ampere runs efficient", call(FP16, gpu=T4), Backend.EFFICIENT),
    ("fp32 on Pascal runs efficient", call(FP32, gpu=P100), Backend.EFFICIENT),
    ("fp32 runs efficient", call(FP32), Backend.EFFICIENT),
    ("fp32 needs a head size that is a multiple of 4", call(FP32, 66), Backend.MATH),
    ("float64 has no fused kernel", call(torch.float64), Backend.MATH),
    ("fp32 with grouped heads falls to math", call(FP32, key_heads=2), Backend.MATH),
    ("bf16 with grouped heads is native in cuDNN", call(key_heads=2), Backend.CUDNN),
    ("bf16 with grouped heads is native in flash", call(key_heads=2, gpu=A100), Backend.FLASH),
    ("grouped heads with a mask on Ampere fall to math",
     call(key_heads=2, gpu=A100, mask=square_mask()), Backend.MATH),
    ("a mask on Hopper stays with cuDNN", call(mask=square_mask()), Backend.CUDNN),
    ("a mask on Ampere runs efficient", call(mask=square_mask(), gpu=A100), Backend.EFFICIENT),
    ("a mask with a gradient runs efficient", call(mask=square_mask(BF16, True)), Backend.EFFICIENT),
    ("a mask of three dimensions runs efficient",
     call(mask=operand(1, 1024, 1024, dtype=torch.bool)), Backend.EFFICIENT),
    ("a head size of 100 is padded for flash", call(head=100), Backend.FLASH),
    ("a head size of 256 runs cuDNN on Hopper", call(head=256), Backend.CUDNN),
    ("a head size of 256 runs flash on Blackwell", call(head=256, gpu=B200), Backend.FLASH),
    ("a head size above 256 runs efficient", call(head=320), Backend.EFFICIENT),
    ("training with head size 208 on sm_86 cannot use flash",
     call(head=208, gpu=RTX3090), Backend.EFFICIENT),
    ("inference with head size 208 on sm_86 can",
     call(head=208, gpu=RTX3090, grad=False), Backend.FLASH),
    ("head size 256 trains on sm_86 without dropout", call(head=256, gpu=RTX3090), Backend.FLASH),
    ("head size 256 does not train on sm_86 with dropout",
     call(head=256, gpu=RTX3090, dropout_p=0.1), Backend.EFFICIENT),
    ("causal with unequal lengths is not for flash",
     call(lengths=(512, 1024), is_causal=True, gpu=A100), Backend.EFFICIENT),
    ("unequal lengths without causal are", call(lengths=(512, 1024), gpu=A100), Backend.FLASH),
    ("one key is not for cuDNN", call(lengths=(1024, 1)), Backend.FLASH),
    ("value heads narrower than keys are not for flash",
     call(value_head=32, gpu=A100), Backend.EFFICIENT),
]  # fmt: skip


@pytest.mark.parametrize(("attention", "expected"), [c[1:] for c in CHOICES], ids=[c[0] for c in CHOICES])
def test_backend_is_the_one_cuda_runs(attention: AttentionCall, expected: Backend) -> None:
    backend, reason = choose_backend(attention, SdpaSettings())
    assert backend is expected, reason
    assert reason


def test_reason_names_every_backend_passed_over() -> None:
    _, reason = choose_backend(call(FP32, key_heads=2), SdpaSettings())
    assert "cudnn: no kernel for float32" in reason
    assert "flash: no kernel for float32" in reason
    assert "efficient: numbers of heads differ" in reason


def test_an_older_cudnn_is_not_first() -> None:
    assert choose_backend(call(), SdpaSettings(cudnn_version=91002))[0] is Backend.FLASH


def test_deterministic_algorithms_exclude_cudnn() -> None:
    assert choose_backend(call(), SdpaSettings(deterministic=True))[0] is Backend.FLASH


def test_a_last_dimension_that_is_not_contiguous_falls_to_math() -> None:
    strided = Operand((2, 8, 1024, 64), (8 * 1024 * 64, 1024 * 64, 1, 1024), BF16)
    attention = AttentionCall(strided, strided, strided)
    assert choose_backend(attention, SdpaSettings())[0] is Backend.MATH


def test_three_dimensions_fall_to_math() -> None:
    flat = operand(8, 1024, 64)
    assert choose_backend(AttentionCall(flat, flat, flat), SdpaSettings())[0] is Backend.MATH


def test_sdpa_kernel_restricts_the_choice() -> None:
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        assert choose_backend(call())[0] is Backend.EFFICIENT
    with sdpa_kernel(SDPBackend.MATH):
        assert choose_backend(call())[0] is Backend.MATH


def test_sdpa_kernel_sets_the_order() -> None:
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        assert choose_backend(call(gpu=A100))[0] is Backend.EFFICIENT


def test_no_allowed_backend_is_an_error_that_says_why() -> None:
    with (
        sdpa_kernel(SDPBackend.FLASH_ATTENTION),
        pytest.raises(RuntimeError, match="flash: no kernel for float32"),
    ):
        choose_backend(call(FP32))
