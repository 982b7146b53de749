"""Composite ops that decompose differently on CUDA: dropout, RMSNorm, attention.

They dissolve above the dispatch mode, so CUDA's path is taken here, at autograd's own key, for tensors of
the pretend GPU only; every other tensor goes the way it always went.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from oomph.gpus import GPU
from oomph.prediction.cuda import recurrent
from oomph.prediction.cuda.attention import attention_like_cuda
from oomph.prediction.cuda.normalization import partial_sums

aten = torch.ops.aten


@contextlib.contextmanager
def cuda_composites(
    on_gpu: Callable[[Any], bool],
    gpu: GPU,
    note_one_hot: Callable[[torch.Tensor, int], None],
    count_kernel: Callable[..., None] = lambda *tensors, **figures: None,
) -> Iterator[None]:
    """Register CUDA's paths for the duration. `count_kernel` is told of kernels that no op stands for."""
    library = torch.library.Library("aten", "IMPL")

    def dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        # CUDA fuses: a bool mask is kept, not a float one.
        if on_gpu(input) and train and 0 < p < 1 and input.numel() > 0:
            return aten.native_dropout.default(input, p, train)[0]
        if on_gpu(input) and (p == 0 or not train):
            return input
        return aten.dropout.default.decompose(input, p, train)

    def rms_norm(
        input: torch.Tensor,
        normalized_shape: Sequence[int],
        weight: torch.Tensor | None = None,
        eps: float | None = None,
    ) -> torch.Tensor:
        same_type = weight is None or weight.dtype == input.dtype
        if on_gpu(input) and same_type and input.dtype != torch.float64:
            return _FusedRmsNorm.apply(input, weight, len(normalized_shape), gpu, count_kernel)
        return aten.rms_norm.default.decompose(input, normalized_shape, weight, eps)

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        given = (query, key, value, attn_mask, dropout_p, is_causal)
        if on_gpu(query):
            return attention_like_cuda(*given, scale=scale, enable_gqa=enable_gqa, capability=gpu.capability)
        whole = aten.scaled_dot_product_attention.default
        return whole.decompose(*given, scale=scale, enable_gqa=enable_gqa)

    def softmax(input: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        if on_gpu(input) and input.dtype == torch.float16 and dtype == torch.float32:
            return aten._softmax.default(input, dim, True)  # one kernel reads half and writes float
        return aten.softmax.int.decompose(input, dim, dtype)

    def log_softmax(input: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        if on_gpu(input) and input.dtype == torch.float16 and dtype == torch.float32:
            return aten._log_softmax.default(input, dim, True)
        return aten.log_softmax.int.decompose(input, dim, dtype)

    def one_hot(self: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
        if not on_gpu(self) or num_classes <= 0:
            return aten.one_hot.default.decompose(self, num_classes)
        out = self.new_zeros((*self.shape, num_classes))
        out.scatter_(-1, self.unsqueeze(-1), 1)
        note_one_hot(out, num_classes)
        return out

    recurrent.register(library, on_gpu, gpu, count_kernel)
    library.impl("softmax.int", softmax, "AutogradCPU")
    library.impl("log_softmax.int", log_softmax, "AutogradCPU")
    library.impl("one_hot", one_hot, "AutogradCPU")
    library.impl("scaled_dot_product_attention", attention, "AutogradCPU")
    library.impl("dropout", dropout, "AutogradCPU")
    library.impl("rms_norm", rms_norm, "AutogradCPU")
    try:
        yield
    finally:
        library._destroy()


class _FusedRmsNorm(torch.autograd.Function):
    """aten::_fused_rms_norm, which has no fake kernel: the result, and 1/rms in float32 kept for backward."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        dims: int,
        gpu: GPU,
        count_kernel: Callable[..., None],
    ) -> torch.Tensor:
        ctx.count_kernel = count_kernel
        ctx.gpu, ctx.width = gpu, math.prod(input.shape[input.dim() - dims :])
        rows = input.shape[: input.dim() - dims]
        rstd = input.new_empty((math.prod(rows), 1), dtype=torch.float32)
        ctx.save_for_backward(input, weight, rstd)
        out = torch.empty_like(input, memory_format=torch.contiguous_format)
        count_kernel(input, weight, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        input, weight, _ = ctx.saved_tensors
        if weight is None:
            alone = torch.empty_like(input)
            ctx.count_kernel(grad, input, alone)
            return alone, None, None, None, None
        grads = torch.empty_like(input), torch.empty_like(weight)
        ctx.count_kernel(grad, input, grads[0])
        ctx.count_kernel(grad, input, grads[1])
        sums = partial_sums(input, ctx.width, [weight], ctx.gpu)
        held = [input.new_empty(size, dtype=torch.uint8) for size in sums if size > 0]
        del held
        return *grads, None, None, None
