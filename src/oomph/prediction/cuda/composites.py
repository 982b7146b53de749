"""Composite ops that decompose differently on CUDA: linear, dropout, RMSNorm, softmax, attention, one_hot.

They dissolve above the dispatch mode, so CUDA's path is taken at autograd's own key, for tensors of the fake
GPU only. All other tensors take torch's own decomposition.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from oomph.prediction.cuda.attention import attention_like_cuda
from oomph.prediction.cuda.reductions import partial_sums
from oomph.prediction.cuda.rules import (
    COMPOSITES,
    BoundArguments,
    RuleContext,
    bind,
    composite,
    is_program_error,
    op_name,
)
from oomph.torch_internals import OpOverload, decomposition_table

aten = torch.ops.aten
# The compiler's own decompositions are the same on all devices, but for these.
_IN_COMPILER = (aten.scaled_dot_product_attention.default, aten.rms_norm.default)


@contextlib.contextmanager
def cuda_composites(context: RuleContext) -> Iterator[None]:
    """Register CUDA's paths for the duration."""
    library = torch.library.Library("aten", "IMPL")
    active = [context]  # torch never drops a Python kernel: emptied, it keeps nothing of the trace
    for op in COMPOSITES:
        library.impl(op_name(op).removeprefix("aten."), _kernel(op, active), "AutogradCPU")
    for op in _IN_COMPILER:  # whose fake tensors have CUDA's keys
        library.impl(op.name()[6:], _kernel(op, active), "AutogradCUDA")
    try:
        yield
    finally:
        library._destroy()
        active.clear()


def _kernel(op: OpOverload, active: list[RuleContext]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        return run_composite(active[0], op, args, kwargs) if active else op.decompose(*args, **kwargs)

    return kernel


def run_composite(
    context: RuleContext, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Decompose the op, as CUDA does where it has a path of its own."""
    decompose = functools.partial(op.decompose, *args, **kwargs)
    if op not in COMPOSITES or not context.on_gpu(args[0]):
        return decompose()
    if context.compiling() and op not in _IN_COMPILER:
        return decompose()
    rule = functools.partial(COMPOSITES[op], context, bind(op, args, kwargs))
    fallback = functools.partial(_decomposed_or_like_first_argument, op, decompose, args[0])
    result = context.guard.call("results", op, rule, fallback)
    return decompose() if result is NotImplemented else result


def _decomposed_or_like_first_argument(
    op: OpOverload, decompose: Callable[[], Any], first: torch.Tensor
) -> Any:
    """In place of a rule that failed. Some decompositions read values, which fake tensors do not have."""
    try:
        return decompose()
    except Exception as error:
        if is_program_error(error):
            raise
    results = tuple(torch.empty_like(first) for _ in op._schema.returns)
    return results[0] if len(results) == 1 else results


@composite(aten.linear.default)
def _linear(context: RuleContext, call: BoundArguments) -> Any:
    """Linear.cpp adds the bias to the product in place, except for tensor subclasses such as our fakes."""
    input, weight, bias = call["input"], call["weight"], call["bias"]
    if bias is None or input.dim() <= 2 or input.is_contiguous():
        return NotImplemented
    return torch.matmul(input, weight.t()).add_(bias)


@composite(aten.dropout.default)
def _dropout(context: RuleContext, call: BoundArguments) -> Any:
    """CUDA fuses: a bool mask is kept, not a float one."""
    input, p, train = call["input"], call["p"], call["train"]
    if train and 0 < p < 1 and input.numel() > 0:
        return aten.native_dropout.default(input, p, train)[0]
    return input if p == 0 or not train else NotImplemented


@composite(aten.softmax.int)
def _softmax(context: RuleContext, call: BoundArguments) -> Any:
    if call["self"].dtype == torch.float16 and call["dtype"] == torch.float32:
        return aten._softmax.default(
            call["self"], call["dim"], True
        )  # one kernel reads half and writes float
    return NotImplemented


@composite(aten.log_softmax.int)
def _log_softmax(context: RuleContext, call: BoundArguments) -> Any:
    if call["self"].dtype == torch.float16 and call["dtype"] == torch.float32:
        return aten._log_softmax.default(call["self"], call["dim"], True)
    return NotImplemented


@composite(aten.one_hot.default)
def _one_hot(context: RuleContext, call: BoundArguments) -> Any:
    ids, classes = call["self"], call["num_classes"]
    if classes == -1 and ids.numel() > 0:
        classes = context.count_classes(ids, "aten.one_hot")
    if classes <= 0:
        return NotImplemented
    out = ids.new_zeros((*ids.shape, classes))
    out.scatter_(-1, ids.unsqueeze(-1), 1)
    context.note_one_hot(out, classes)
    return out


@composite(aten.cumprod_backward.default)
def _cumprod_backward(context: RuleContext, call: BoundArguments) -> Any:
    """FunctionsManual.cpp: a short path where no element of the input is zero. Of the other, what is in
    use at its peak; the fake tensors' own decomposition takes a third path, for tensor subclasses."""
    grad, source, dim, output = call["grad"], call["input"], call["dim"], call["output"]
    if source.numel() <= 1 or source.size(dim) == 1:
        return grad
    weighted, is_zero = output * grad, source == 0
    if not context.has_zeros(source):
        return _reversed_cumsum(weighted, dim).div(source)
    gradient, zeros_before = torch.zeros_like(source), is_zero.cumsum(dim)
    mask = zeros_before == 0
    outside = ~mask  # C++ keeps it, and what it masks, to the end of the expression
    masked = weighted.masked_fill(outside, 0.0)
    return gradient.masked_scatter_(mask, _reversed_cumsum(masked, dim).div_(source).masked_select(mask))


def _reversed_cumsum(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    flipped = tensor.flip(dim)
    total = flipped.cumsum(dim)
    return total.flip(dim)


@composite(aten.scaled_dot_product_attention.default)
def _attention(context: RuleContext, call: BoundArguments) -> Any:
    return attention_like_cuda(
        call["query"],
        call["key"],
        call["value"],
        call["attn_mask"],
        call["dropout_p"],
        call["is_causal"],
        scale=call["scale"],
        enable_gqa=call["enable_gqa"],
        capability=context.gpu.capability,
    )


@composite(aten.rms_norm.default)
def _rms_norm(context: RuleContext, call: BoundArguments) -> Any:
    input, weight = call["input"], call["weight"]
    if input.dtype == torch.float64 or (weight is not None and weight.dtype != input.dtype):
        return NotImplemented
    if context.compiling():
        decompose = decomposition_table[aten._fused_rms_norm.default]
        return decompose(input, call["normalized_shape"], weight, call["eps"])[0]
    return _FusedRmsNorm.apply(input, weight, len(call["normalized_shape"]), context)


class _FusedRmsNorm(torch.autograd.Function):
    """aten::_fused_rms_norm, which has no fake kernel: the result, and 1/rms in float32 kept for backward."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, input: torch.Tensor, weight: torch.Tensor | None, dims: int, context: RuleContext
    ) -> torch.Tensor:
        ctx.context = context
        ctx.width = math.prod(input.shape[input.dim() - dims :])
        rows = input.shape[: input.dim() - dims]
        rstd = input.new_empty((math.prod(rows), 1), dtype=torch.float32)
        ctx.save_for_backward(input, weight, rstd)
        out = torch.empty_like(input, memory_format=torch.contiguous_format)
        context.count_kernel(input, weight, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        input, weight, _ = ctx.saved_tensors
        context: RuleContext = ctx.context
        if weight is None:
            grad_input = torch.empty_like(input)
            context.count_kernel(grad, input, grad_input)
            return grad_input, None, None, None
        grads = torch.empty_like(input), torch.empty_like(weight)
        context.count_kernel(grad, input, grads[0])
        context.count_kernel(grad, input, grads[1])
        rule = functools.partial(partial_sums, input, ctx.width, [weight], context.gpu)
        sums: list[int] = context.guard.call("temporaries", "aten.rms_norm", rule, list)
        held = [input.new_empty(size, dtype=torch.uint8) for size in sums if size > 0]
        del held
        return *grads, None, None
