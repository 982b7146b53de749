"""PyTorch's fused attention kernels (cuDNN, flash, memory-efficient, CPU flash): which apply, and the calls.

Only calls that need no [Q, K] mask of full size are run here. Two things are added to the kernels of
scaled_dot_product_attention: exact zeros for queries without keys, and a backward pass by groups of heads.
"""

import contextlib
import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from oomph.ops.common import OpFunction, no_compile, refuse_forward_mode, refuse_second_derivatives
from oomph.ops.softmax_attention.arguments import AttentionArguments
from oomph.units import MiB

aten = torch.ops.aten
_SDPA_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
BACKENDS = tuple(_SDPA_BACKENDS)
_MIN_CUDNN = 91501  # earlier kernels have errors at lengths that are no multiple of 128


# Which backends can run a call -----------------------------------------------------------------------


def usable_backends(a: AttentionArguments) -> tuple[list[str], str]:
    """The backends that can run the call in linear memory, best first, and why the others cannot."""
    kind = a.q.device.type
    reason = _why_no_backend(a)
    if reason is None and kind == "cpu":
        reason = _why_not_cpu(a)
        return ([], reason) if reason else (["sdpa"], "the fused CPU kernel")
    if reason is None and kind != "cuda":
        reason = f"no fused kernel is known on {kind}"
    if reason is not None:
        return [], reason
    capability = _capability(a.q)
    rules = {"cudnn": _why_not_cudnn, "flash": _why_not_flash, "efficient": _why_not_efficient}
    reasons = {name: rule(a, capability) for name, rule in rules.items()}
    usable = [name for name, reason in reasons.items() if reason is None]
    refused = [f"{name}: {reason}" for name, reason in reasons.items() if reason is not None]
    return usable, "; ".join(refused)


def _why_no_backend(a: AttentionArguments) -> str | None:
    if a.pattern is not None:
        return "a block pattern"
    if a.bias_function is not None:
        return "a bias function"
    if a.has_empty:
        return "an empty tensor"
    if a.key_mask is not None and (a.masks_future or a.bias is not None):
        return "padding together with causality or a bias needs a full-size mask"
    if a.bias is None:
        return None
    if a.masks_future:
        return "a bias together with causality needs a full-size mask"
    if a.bias.dtype != a.q.dtype:
        return f"a {_name(a.bias.dtype)} bias would be rounded to {_name(a.q.dtype)}"
    if a.bias.shape[3] != a.keys or a.bias.stride(3) != 1:
        return "the bias is not contiguous along the keys"
    full = (a.q.shape[0], a.q.shape[1], a.queries, a.keys)
    if a.bias_needs_grad and (a.q.device.type == "cpu" or tuple(a.bias.shape) != full):
        return "the gradient of a bias that is broadcast would be formed at full size"
    return None


def _why_not_cpu(a: AttentionArguments) -> str | None:
    if a.q.shape[3] != a.v.shape[3]:
        return "the CPU kernel needs equal head sizes"
    if _is_lower_right(a):
        return "the CPU kernel aligns causality at the first key"
    return None


def _why_not_cudnn(a: AttentionArguments, capability: tuple[int, int]) -> str | None:
    if capability[0] not in (9, 10):
        return "not the fastest on this GPU"
    version = torch.backends.cudnn.version() if torch.version.cuda else None
    if version is not None and version < _MIN_CUDNN:
        return f"cuDNN {version} is too old"
    if torch.are_deterministic_algorithms_enabled():
        return "not deterministic"
    if _is_lower_right(a):
        return "aligns causality at the first key"
    if a.bias_needs_grad:
        return "gives no gradient of the bias"
    head_size = max(a.q.shape[3], a.v.shape[3])
    if head_size > (256 if capability == (9, 0) else 128):
        return f"head size {head_size} is too large"
    if a.keys == 1:
        return "a single key"
    return _why_not_half(a, capability)


def _why_not_flash(a: AttentionArguments, capability: tuple[int, int]) -> str | None:
    if a.bias is not None or a.key_mask is not None:
        return "takes no mask"
    if a.q.shape[3] != a.v.shape[3] or a.q.shape[3] > 256:
        return "needs equal head sizes of at most 256"
    return _why_not_half(a, capability)


def _why_not_efficient(a: AttentionArguments, capability: tuple[int, int]) -> str | None:
    if _is_lower_right(a):
        return "aligns causality at the first key"
    if a.q.dtype == torch.float64:
        return "no float64 kernel"
    if a.q.dtype == torch.bfloat16 and capability < (8, 0):
        return "bfloat16 needs compute capability 8.0"
    return None


def _why_not_half(a: AttentionArguments, capability: tuple[int, int]) -> str | None:
    if capability < (8, 0):
        return "needs compute capability 8.0"
    return None if a.q.dtype in (torch.float16, torch.bfloat16) else f"no {_name(a.q.dtype)} kernel"


def _is_lower_right(a: AttentionArguments) -> bool:
    """Causal with fewer queries than keys, aligned at the last key: only flash's own operator has it."""
    return a.masks_future and a.offset > 0


def _capability(tensor: Tensor) -> tuple[int, int]:
    try:
        return torch.cuda.get_device_capability(tensor.device)
    except (RuntimeError, AssertionError):  # a fake tensor where there is no GPU
        return (9, 0)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# Calls -----------------------------------------------------------------------------------------------


def sdpa(a: AttentionArguments, backend: str) -> Tensor:
    """Run one of `usable_backends(a)`."""
    refuse_forward_mode("attention", a.q, a.k, a.v)
    if a.masks_future and a.offset < 0:
        # The first queries precede every key: they are cut off, and zeros are put in their place.
        out = _run(a, a.q[:, :, -a.offset :], backend)
        return F.pad(out, (0, 0, -a.offset, 0))
    return _run(a, a.q, backend)


def _run(a: AttentionArguments, q: Tensor, backend: str) -> Tensor:
    k, v = a.k, a.v
    head_size, grouped = v.shape[3], a.group > 1
    if backend != "sdpa":
        q, k, v = (_pad_heads(tensor) for tensor in (q, k, v))
    if _is_lower_right(a):
        out = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False, scale=a.scale)[0]
        return out[..., :head_size]
    if backend == "cudnn" and (a.bias is not None or a.key_mask is not None):
        kernel = FusedKernel("cudnn", False, a.scale, k.shape[1])
        return fused_attention(q, k, v, _additive_mask(a), kernel)[..., :head_size]
    if grouped and backend == "efficient":  # it has no grouped heads; the copies are of the size of q
        k, v, grouped = k.repeat_interleave(a.group, 1), v.repeat_interleave(a.group, 1), False
    if backend in ("cudnn", "flash") and a.is_plain and torch.is_grad_enabled():
        heads = key_heads_per_group(q, k)
        if heads < k.shape[1] and any(x.requires_grad for x in (q, k, v)):
            out = fused_attention(q, k, v, None, FusedKernel(backend, a.masks_future, a.scale, heads))
            return out if v.shape[3] == head_size else out[..., :head_size]
    mask, has_key = _boolean_mask(a)
    chosen = sdpa_kernel([_SDPA_BACKENDS[backend]]) if backend in BACKENDS else contextlib.nullcontext()
    with chosen:
        out = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=a.masks_future, scale=a.scale, enable_gqa=grouped
        )
    out = out if v.shape[3] == head_size else out[..., :head_size]
    return out if has_key is None else torch.where(has_key, out, 0.0)


def _pad_heads(tensor: Tensor) -> Tensor:
    """Contiguous heads of a multiple of 8. Zeros add nothing to a product, and are cut off the result."""
    missing = -tensor.shape[3] % 8
    if missing:
        return F.pad(tensor, (0, missing))
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()


def _additive_mask(a: AttentionArguments) -> Tensor:
    """The bias, or the padding as a bias [B, 1, 1, K]: 0 where a key may be attended to, else -inf."""
    if a.bias is not None:
        return a.bias.detach()
    assert a.key_mask is not None
    allowed, masked = (a.q.new_full((), value) for value in (0.0, -math.inf))
    return torch.where(a.key_mask, allowed, masked)[:, None, None, :]


def _boolean_mask(a: AttentionArguments) -> tuple[Tensor | None, Tensor | None]:
    """(attn_mask, [B, 1, 1, 1] whether the batch entry has any key).

    An entry without keys attends to all of them, and its output is replaced by zeros afterwards, so its
    gradients are exact zeros whatever a kernel computes for a row of -inf.
    """
    if a.key_mask is None:
        return a.bias, None
    has_key = a.key_mask.any(1, keepdim=True)
    mask = a.key_mask | ~has_key
    return mask[:, None, None, :], has_key[:, :, None, None]


# ATen's kernels, called directly ---------------------------------------------------------------------
#
# For two reasons. cuDNN returns an average of all values for a row of -inf in the bias. Here such a row
# becomes zero and its log-sum-exp +inf: in backward its weights exp(score - inf) and its gradients are 0.
#
# And in backward the fused kernels hold float32 sums of q's size, and the gradients of k and v once per query
# head: at 131,072 tokens and 32 heads of 80 that is 2.5 GiB, beside gradients of 0.9. Heads are independent,
# so the same kernels run on one group of key/value heads at a time and hold that for one group. (With
# deterministic algorithms flash holds a sum per multiprocessor, whatever the group: little is saved then.)

_GROUP_BYTES = 512 * MiB  # smaller groups would launch more kernels and save little


class FusedKernel(NamedTuple):
    backend: str  # "cudnn", "flash", or for tests "cpu"
    causal: bool
    scale: float
    key_heads: int  # of a group in backward

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, needs_backward: bool) -> Any:
        """out, lse, and more, of which backward needs the first six."""
        if self.backend == "cudnn":
            options = (bias, needs_backward, 0.0, self.causal, False)
            return aten._scaled_dot_product_cudnn_attention(q, k, v, *options, scale=self.scale)
        if self.backend == "flash":
            return aten._scaled_dot_product_flash_attention(
                q, k, v, 0.0, self.causal, False, scale=self.scale
            )
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, self.causal, scale=self.scale)

    def backward(self, tensors: Any, bias: Tensor | None, lse: Tensor, rest: Any) -> Any:
        """Of tensors (grad, q, k, v, out): the gradients of q, k and v, maybe followed by others."""
        if self.backend == "cpu":
            return aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *tensors, lse, 0.0, self.causal, scale=self.scale
            )
        *lengths, seed, offset = rest
        if self.backend == "cudnn":
            return aten._scaled_dot_product_cudnn_attention_backward(
                *tensors, lse, seed, offset, bias, *lengths, 0.0, self.causal, scale=self.scale
            )
        return aten._scaled_dot_product_flash_attention_backward(
            *tensors, lse, *lengths, 0.0, self.causal, seed, offset, scale=self.scale
        )


def key_heads_per_group(q: Tensor, k: Tensor) -> int:
    """The key/value heads of a group: all of them where backward needs little memory anyway."""
    heads = k.shape[1]
    per_head = q.numel() // max(1, heads) * (4 + 2 * q.element_size())  # sums for q; k's and v's gradients
    sizes = (size for size in range(heads, 1, -1) if heads % size == 0 and size * per_head <= _GROUP_BYTES)
    return next(sizes, 1)


@no_compile
def fused_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, kernel: FusedKernel) -> Tensor:
    """softmax(q k^T * scale + bias) v, [B, H, T, D]; backward runs `kernel.key_heads` heads at a time.

    A bias, for cuDNN and all heads at once, has 4 dimensions, 1 or full, q's dtype and no gradient.
    """
    out: Tensor = _FusedAttention.apply(q, k, v, bias, kernel)  # type: ignore[no-untyped-call]
    return out


class _FusedAttention(OpFunction):
    op = "attention"

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, kernel: FusedKernel
    ) -> Tensor:
        needs_backward = any(ctx.needs_input_grad)
        out, lse, *rest = kernel.forward(q, k, v, bias, needs_backward)
        if bias is not None:
            no_key = bias.amax(-1, keepdim=True) == -math.inf
            out.masked_fill_(no_key, 0.0)
            if needs_backward:
                lse.view(*q.shape[:3], 1).masked_fill_(no_key, math.inf)
        if needs_backward:
            rest = rest[:6]  # cum_q, cum_k, max_q, max_k, seed, offset
            ctx.save_for_backward(q, k, v, out, lse, bias, *(x for x in rest if isinstance(x, Tensor)))
            ctx.rest = [None if isinstance(x, Tensor) else (x,) for x in rest]
            ctx.kernel = kernel
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives("attention")
        q, k, v, out, lse, bias, *tensors = ctx.saved_tensors
        saved = iter(tensors)
        rest = tuple(next(saved) if x is None else x[0] for x in ctx.rest)
        kernel: FusedKernel = ctx.kernel
        if kernel.key_heads >= k.shape[1]:
            gradients = kernel.backward((grad, q, k, v, out), bias, lse, rest)
        else:
            gradients = [torch.empty_like(x) for x in (q, k, v)]
            group = q.shape[1] // k.shape[1]
            for start in range(0, k.shape[1], kernel.key_heads):
                keys = slice(start, min(start + kernel.key_heads, k.shape[1]))
                queries = slice(keys.start * group, keys.stop * group)
                inputs = (grad[:, queries], q[:, queries], k[:, keys], v[:, keys], out[:, queries])
                # The kernels assume a contiguous log-sum-exp.
                parts = kernel.backward(inputs, None, lse[:, queries].contiguous(), rest)
                for gradient, heads, part in zip(gradients, (queries, keys, keys), parts, strict=True):
                    gradient[:, heads].copy_(part)
        wanted = zip(gradients, ctx.needs_input_grad[:3], strict=True)
        return *(gradient if want else None for gradient, want in wanted), None, None
