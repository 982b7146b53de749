"""PyTorch's fused attention kernels: when they apply without a full-size mask, and how they are called."""

import contextlib
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel

from oomph.ops.softmax_attention.by_heads import attention_by_heads, key_heads_at_a_time
from oomph.ops.softmax_attention.cudnn import cudnn_with_bias
from oomph.ops.softmax_attention.problem import Problem

aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
BACKENDS = tuple(_BACKENDS)
# Before this version, cuDNN's kernels had errors at lengths that are no multiple of 128.
_SOUND_CUDNN = 91501


_MOST_REMEMBERED = 256
_remembered: dict[tuple[object, ...], tuple[list[str], str]] = {}


def fused_backends(p: Problem) -> tuple[list[str], str]:
    """The backends that can run the call in linear memory, best first, and why the others cannot."""
    # Small models wait for the host: for calls without masks, answers are remembered. Only a tensor of data
    # is on the GPU that it says: in a prediction the rules are asked anew.
    if type(p.q) is not Tensor or not p.is_plain or torch.compiler.is_compiling():
        return _find_backends(p)
    shapes = p.q.shape, p.k.shape, p.v.shape
    key = (*shapes, p.causal, p.q.dtype, p.q.device, torch.are_deterministic_algorithms_enabled())
    found = _remembered.get(key)
    if found is None:
        if len(_remembered) >= _MOST_REMEMBERED:  # lengths that grow by one, as in generation
            _remembered.clear()
        found = _remembered[key] = _find_backends(p)
    return found


def _find_backends(p: Problem) -> tuple[list[str], str]:
    kind = p.q.device.type
    objection = _shared_objection(p)
    if objection is None and kind == "cpu":
        objection = _cpu_objection(p)
        return ([], objection) if objection else (["sdpa"], "the fused CPU kernel")
    if objection is None and kind != "cuda":
        objection = f"no fused kernel is known on {kind}"
    if objection is not None:
        return [], objection
    capability = _capability(p.q)
    rules = {"cudnn": _cudnn_objection, "flash": _flash_objection, "efficient": _efficient_objection}
    objections = {name: rule(p, capability) for name, rule in rules.items()}
    usable = [name for name, objection in objections.items() if objection is None]
    passed_over = [f"{name}: {objection}" for name, objection in objections.items() if objection is not None]
    return usable, "; ".join(passed_over)


def _shared_objection(p: Problem) -> str | None:
    if p.pattern is not None:
        return "a block pattern"
    if p.bias_function is not None:
        return "a bias function"
    if 0 in (p.q.numel(), p.k.numel(), p.v.numel()):
        return "an empty tensor"
    if p.padded and (p.cuts_future or p.bias is not None):
        return "padding together with causality or a bias needs a full-size mask"
    if p.bias is None:
        return None
    if p.cuts_future:
        return "a bias together with causality needs a full-size mask"
    if p.bias.dtype != p.q.dtype:
        return f"a {_name(p.bias.dtype)} bias would be rounded to {_name(p.q.dtype)}"
    if p.bias.shape[3] != p.keys or p.bias.stride(3) != 1:
        return "the bias is not contiguous along the keys"
    if p.bias_needs_grad:
        full = (p.q.shape[0], p.q.shape[1], p.queries, p.keys)
        if p.q.device.type == "cpu" or tuple(p.bias.shape) != full:
            return "the gradient of a bias that is broadcast would be formed at full size"
    return None


def _cpu_objection(p: Problem) -> str | None:
    if p.q.shape[3] != p.v.shape[3]:
        return "the CPU kernel needs equal head sizes"
    if p.cuts_future and p.offset > 0:
        return "the CPU kernel aligns causality at the first key"
    return None


def _capability(tensor: Tensor) -> tuple[int, int]:
    try:
        return torch.cuda.get_device_capability(tensor.device)
    except (RuntimeError, AssertionError):  # a fake tensor where there is no GPU
        return (9, 0)


def _lower_right(p: Problem) -> bool:
    """Causal with fewer queries than keys, aligned at the last key: only flash's own operator has it."""
    return p.cuts_future and p.offset > 0


def _half_objection(p: Problem, capability: tuple[int, int]) -> str | None:
    if capability < (8, 0):
        return "needs compute capability 8.0"
    return None if p.q.dtype in _HALF else f"no {_name(p.q.dtype)} kernel"


def _cudnn_objection(p: Problem, capability: tuple[int, int]) -> str | None:
    if capability[0] not in (9, 10):
        return "not the fastest on this GPU"
    version = torch.backends.cudnn.version() if torch.version.cuda else None
    if version is not None and version < _SOUND_CUDNN:
        return f"cuDNN {version} is too old"
    if torch.are_deterministic_algorithms_enabled():
        return "not deterministic"
    if _lower_right(p):
        return "aligns causality at the first key"
    if p.bias_needs_grad:
        return "gives no gradient of the bias"
    widest = max(p.q.shape[3], p.v.shape[3])
    if widest > (256 if capability == (9, 0) else 128):
        return f"head size {widest} is too large"
    if p.keys == 1:
        return "a single key"
    return _half_objection(p, capability)


def _flash_objection(p: Problem, capability: tuple[int, int]) -> str | None:
    if p.bias is not None or p.padded:
        return "takes no mask"
    if p.q.shape[3] != p.v.shape[3] or p.q.shape[3] > 256:
        return "needs equal head sizes of at most 256"
    return _half_objection(p, capability)


def _efficient_objection(p: Problem, capability: tuple[int, int]) -> str | None:
    if _lower_right(p):
        return "aligns causality at the first key"
    if p.q.dtype == torch.float64:
        return "no float64 kernel"
    if p.q.dtype == torch.bfloat16 and capability < (8, 0):
        return "bfloat16 needs compute capability 8.0"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def fused(p: Problem, backend: str) -> Tensor:
    """Run one of `fused_backends(p)`. Zero queries are cut off and put back; head sizes are padded to 8."""
    if p.cuts_future and p.offset < 0:
        # The first queries stand before every key and see none.
        out = _run(p, p.q[:, :, -p.offset :], backend)
        return F.pad(out, (0, 0, -p.offset, 0))
    return _run(p, p.q, backend)


def _run(p: Problem, q: Tensor, backend: str) -> Tensor:
    k, v = p.k, p.v
    if backend == "sdpa":
        mask, has_key = _mask(p)
        out = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=p.cuts_future, scale=p.scale, enable_gqa=p.group > 1
        )
        return out if has_key is None else torch.where(has_key, out, 0.0)
    head = v.shape[3]
    q, k, v = (_padded(tensor) for tensor in (q, k, v))
    if _lower_right(p):
        out = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False, scale=p.scale)[0]
        return out[..., :head]
    if backend == "cudnn" and (p.bias is not None or p.padded):
        return cudnn_with_bias(q, k, v, _additive(p), p.scale)[..., :head]
    grouped = p.group > 1
    if grouped and backend == "efficient":  # it knows no groups; the copies are of the size of q
        k, v, grouped = k.repeat_interleave(p.group, 1), v.repeat_interleave(p.group, 1), False
    if backend in ("cudnn", "flash") and not p.padded and p.bias is None and torch.is_grad_enabled():
        key_heads = key_heads_at_a_time(q, k)
        if key_heads < k.shape[1] and any(x.requires_grad for x in (q, k, v)):
            causal = p.cuts_future
            out = attention_by_heads(
                q, k, v, causal=causal, scale=p.scale, backend=backend, key_heads=key_heads
            )
            return out if v.shape[3] == head else out[..., :head]
    mask, has_key = _mask(p)
    with _allowing(backend):
        out = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=p.cuts_future, scale=p.scale, enable_gqa=grouped
        )
    out = out if v.shape[3] == head else out[..., :head]
    return out if has_key is None else torch.where(has_key, out, 0.0)


_SWITCHES = {
    "cudnn": (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    "flash": (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    "efficient": (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    "math": (cuda.math_sdp_enabled, cuda.enable_math_sdp),
}


def _allowing(backend: str) -> contextlib.AbstractContextManager[None]:
    """As sdpa_kernel, which the compiler knows, and which takes as long as the kernel's own call."""
    if torch.compiler.is_compiling():
        return sdpa_kernel([_BACKENDS[backend]])
    return _Allowing(backend)


class _Allowing:
    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.before: list[tuple[Callable[[bool], None], bool]] = []

    def __enter__(self) -> None:
        for name, (is_on, turn) in _SWITCHES.items():
            was = is_on()
            if was != (name == self.backend):
                self.before.append((turn, was))
                turn(not was)

    def __exit__(self, *_: object) -> None:
        for turn, was in self.before:
            turn(was)


def _padded(tensor: Tensor) -> Tensor:
    """Contiguous heads of a multiple of 8: zeros add nothing to a product, and are cut off the result."""
    missing = -tensor.shape[3] % 8
    if missing:
        return F.pad(tensor, (0, missing))
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()


def _additive(p: Problem) -> Tensor:
    """The bias, or the padding as one: [B, 1, 1, K], 0 where a key may be seen."""
    if p.bias is not None:
        return p.bias.detach()
    seen_BK = p.seen_BK()
    assert seen_BK is not None
    allowed, forbidden = (p.q.new_full((), value) for value in (0.0, -math.inf))
    return torch.where(seen_BK, allowed, forbidden)[:, None, None, :]


def _mask(p: Problem) -> tuple[Tensor | None, Tensor | None]:
    """(what to give as attn_mask, [B, 1, 1, 1] whether the batch entry has any key).

    An entry without keys is given all of them, and its output is replaced by zeros afterwards: so its
    gradients are exact zeros whatever a kernel makes of a row of -inf.
    """
    seen_BK = p.seen_BK()
    if seen_BK is None:
        return p.bias, None
    has_key = seen_BK.any(1, keepdim=True)
    seen = seen_BK | ~has_key
    return seen[:, None, None, :], has_key[:, :, None, None]
