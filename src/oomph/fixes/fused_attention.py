"""Attention written out as products and a softmax runs as one call of oomph.ops.attention.

Inside the chosen modules, q @ k^T returns a LazyTensor. `AttentionScores` follows scaling, masks, additive
biases, the softmax and dropout with p=0; the product with v becomes the fused call. Anything else is computed
as it is written, with a warning that names the line and the call to write there instead.

B batch, H query heads, G key/value heads, T queries, S keys, D and E head sizes; `lead` is [B, H] or [B].
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from oomph.errors import FixWarning, UserError
from oomph.fixes import causal_masks
from oomph.fixes.causal_masks import constant_of, is_causal
from oomph.fixes.journal import Journal, WrappedForward, module_of
from oomph.fixes.lazy_tensor import (
    Args,
    Expression,
    Kwargs,
    LazyTensor,
    RecordedCall,
    function_name,
    lazy_call,
    lazy_tensor,
    modes_paused,
    value_of,
)
from oomph.fixes.modules import modules_with_code
from oomph.fixes.registry import Fix, FixContext, Target
from oomph.ops.common import is_fake, no_compile
from oomph.ops.softmax_attention import attention
from oomph.records import Prediction
from oomph.torch_internals import FakeTensor, current_function_modes, tree_map

# Where attention is ----------------------------------------------------------------------------------


_SOFTMAX = ("aten._softmax", "aten._safe_softmax")
_SMALLEST_SHARE = 0.005  # of the peak, as in planning: a fix that saves less is left out of every set


def _has_own_code(model: nn.Module) -> bool:
    libraries = ("torch.", "transformers.", "oomph.")
    return not all(type(module).__module__.startswith(libraries) for module in model.modules())


def attention_matrices(prediction: Prediction) -> list[str]:
    """Modules that keep softmax results [..., T, S] for backward, where these are a part of the peak.

    A batched product of that shape precedes each, in the same module or its parent. Not those whose
    weights are dropped.
    """
    if not _may_win(prediction):
        return []
    products: dict[str, set[tuple[int, ...]]] = {}
    found: dict[str, None] = {}
    weights: dict[int | None, str] = {}  # id of a softmax result or its cast -> module
    dropped: set[str] = set()
    for made in prediction.allocations:
        if made.stage != "forward activations" or len(made.shape) < 3:
            continue
        op, shape = ".".join(made.op.split(".")[:2]), tuple(made.shape[-2:])
        if op in ("aten.bmm", "aten.baddbmm"):
            products.setdefault(made.module, set()).add(shape)
        elif op in _SOFTMAX and made.saved:
            shapes = products.get(made.module, set()) | products.get(_parent(made.module), set())
            if shape in shapes:
                found[made.module] = None
                weights[made.id] = made.module
        elif made.parent in weights:
            if op == "aten._to_copy":
                weights[made.id] = weights[made.parent]
            elif op == "aten.native_dropout":
                dropped.add(weights[made.parent])
    return [module for module in found if module not in dropped]


def _may_win(prediction: Prediction) -> bool:
    """Whether what a step's softmaxes leave for backward is a part of the peak that can be seen."""
    kept: dict[int, int] = {}
    for made in prediction.allocations:
        if made.saved and made.op in _SOFTMAX and len(made.shape) > 2:
            kept[made.step] = kept.get(made.step, 0) + made.bytes
    return max(kept.values(), default=0) >= _SMALLEST_SHARE * prediction.peak.allocated


def _owner(model: nn.Module, path: str) -> str:
    """The module at or above a path whose class is not torch's."""
    modules = dict(model.named_modules())
    while path and (path not in modules or type(modules[path]).__module__.startswith("torch.")):
        path = _parent(path)
    return path


def _parent(module: str) -> str:
    return module.rpartition(".")[0]


# The mode --------------------------------------------------------------------------------------------

_PRODUCTS = frozenset(("matmul", "bmm", "einsum"))


_FUNCTIONS = _PRODUCTS | causal_masks.FUNCTIONS


class AttentionMode(TorchFunctionMode):
    """Sees the calls into torch that a module's forward makes; those of no interest return first."""

    def __init__(self, module: nn.Module | None) -> None:
        super().__init__()
        self.buffers = frozenset(map(id, module.buffers() if module else ()))  # which may be masks

    def __torch_function__(self, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        if LazyTensor in types:
            return lazy_call(func, args, kwargs or {})
        name = function_name(func)
        if name in _FUNCTIONS and not modes_paused.now():
            return self._handle(name, func, args, kwargs or {})
        return func(*args, **kwargs) if kwargs else func(*args)

    def _handle(self, name: str, func: Any, args: Args, kwargs: Kwargs) -> Any:
        if name in _PRODUCTS:
            product = _query_key_product(name, args, kwargs)
            if product is None:
                return func(*args, **kwargs)
            call = RecordedCall(func, tuple(args), dict(kwargs))
            return lazy_tensor(AttentionScores(*product, self.buffers, call))
        made = (
            _view_or_reshape(func, args, kwargs)
            if name == "view" and _is_fused_result(args[0])
            else func(*args, **kwargs)
        )
        causal_masks.note(name, func, args, kwargs, made, self.buffers)
        return made


@no_compile
def _run_in_mode(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if any(isinstance(active, AttentionMode) for active in current_function_modes()):
        return forward(*args, **kwargs)
    with AttentionMode(module_of(forward)):
        result = forward(*args, **kwargs)
    return _returned(result) if isinstance(result, Tensor) else tree_map(_returned, result)


def _returned(leaf: Any) -> Any:
    """Scores are computed before the module returns them. A fused result that is returned as it is gets the
    memory layout of the program's own product."""
    if isinstance(leaf, LazyTensor) and isinstance(leaf.expression, AttentionScores):
        return value_of(leaf)
    return leaf.contiguous() if _is_fused_result(leaf) else leaf


def _is_fused_result(tensor: Any) -> bool:
    if not isinstance(tensor, Tensor) or isinstance(tensor, LazyTensor):
        return False
    return any(getattr(each, "_oomph_fused", False) for each in (tensor, tensor._base))


def _view_or_reshape(func: Any, args: Args, kwargs: Kwargs) -> Tensor:
    """The program's own product allows any view; the result of a fused kernel may be strided otherwise."""
    try:
        return func(*args, **kwargs)
    except RuntimeError:
        if len(args) > 1 and isinstance(args[1], torch.dtype):
            raise
        return args[0].reshape(*args[1:], **kwargs)


def _program_line() -> str:
    """ "file:line" of the program's own code that is running."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("torch.", "oomph.")):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _einsum_operands(args: Args, kwargs: Kwargs) -> tuple[list[str], str, list[Any]] | None:
    """The subscripts of each operand, those of the result, and the operands; None for unusual equations."""
    if kwargs or len(args) < 2 or not isinstance(args[0], str) or "." in args[0] or "->" not in args[0]:
        return None
    operands = list(args[1]) if isinstance(args[1], list | tuple) else list(args[1:])
    left, out = args[0].replace(" ", "").split("->")
    words = left.split(",")
    if len(words) != len(operands) or any(len(set(word)) != len(word) for word in (*words, out)):
        return None
    sizes: dict[str, int] = {}
    for word, operand in zip(words, operands, strict=True):
        if not isinstance(operand, Tensor | Expression) or len(word) != len(operand.shape):
            return None
        if any(sizes.setdefault(s, size) != size for s, size in zip(word, operand.shape, strict=True)):
            return None
    return (words, out, operands) if set(out) <= sizes.keys() else None


def _query_key_product(name: str, args: Args, kwargs: Kwargs) -> tuple[Tensor, Tensor] | None:
    """q [*lead, T, D] and k [*lead, S, D] of a batched product; views, nothing is copied."""
    found = _einsum_operands(args, kwargs) if name == "einsum" else None
    operands = args if name != "einsum" else () if found is None else found[2]
    # Not a Parameter: a product with one is a layer.
    if len(operands) != 2 or not all(type(each) in (Tensor, FakeTensor) for each in operands):
        return None
    q, k = operands
    if q.dim() != k.dim() or q.dim() not in (3, 4):
        return None
    if found is None:
        k = k.transpose(-2, -1)
    else:
        (of_q, of_k), out, _ = found
        lead, row, column = out[:-2], out[-2], out[-1]
        summed = (set(of_q) & set(of_k)) - set(out)
        if len(summed) != 1 or set(of_q) != {*lead, row, *summed} or set(of_k) != {*lead, column, *summed}:
            return None
        (inner,) = summed
        q, k = _permuted(q, of_q, lead + row + inner), _permuted(k, of_k, lead + column + inner)
    usable = q.is_floating_point() and k.is_floating_point() and q.device == k.device
    if kwargs or not usable or q.shape[-1] != k.shape[-1] or 0 in (*q.shape, *k.shape):
        return None
    same_lead = all(1 in (a, b) or a == b for a, b in zip(q.shape[:-2], k.shape[:-2], strict=True))
    autocast = torch.is_autocast_enabled(q.device.type)
    return (q, k) if same_lead and (q.dtype == k.dtype or autocast) else None


def _permuted(tensor: Tensor, subscripts: str, wanted: str) -> Tensor:
    return tensor if subscripts == wanted else tensor.permute([subscripts.index(each) for each in wanted])


# Scores ----------------------------------------------------------------------------------------------

# exp of this is 0 in every dtype, as long as scores lie within ten thousand of each other.
_MASKED_SCORE = -1e4


class AttentionScores(Expression):
    """scale * q k^T + terms, with `fill` where a mask holds; after the softmax the attention weights."""

    subject = "a matrix of attention scores from fix 'fused_attention'"

    def __init__(self, q: Tensor, k: Tensor, buffers: frozenset[int], call: RecordedCall) -> None:
        self.q, self.k, self.buffers = q, k, buffers
        lead = q.shape[:-2]
        if lead != k.shape[:-2]:
            lead = torch.broadcast_shapes(lead, k.shape[:-2])
        self.shape = torch.Size((*lead, q.shape[-2], k.shape[-2]))
        self.dtype = q.dtype
        self.scale = 1.0
        self.terms: tuple[tuple[Tensor, float], ...] = ()  # added to the scores, with a factor
        self.masks: tuple[Tensor, ...] = ()  # True where the score is `fill`
        self.causal = False  # keys after the query's own position are filled, too
        self.fill: float | None = None
        self.is_weights = False
        self.record(call)
        self.dtype = self._matmul_dtype(q.dtype)

    def _matmul_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype if self.autocast is None or dtype == torch.float64 else self.autocast

    def handle_function(self, name: str, func: Any, args: Args, kwargs: Kwargs) -> Any:
        if not self.has_current_settings():
            return NotImplemented
        if name in _PRODUCTS:
            return self._times_values(name, args, kwargs)
        step = _STEPS.get(name)
        changes = None if step is None else step(self, name, args, kwargs)
        if changes is None:
            return NotImplemented
        return self.then(RecordedCall(func, tuple(args), dict(kwargs)), **changes)

    def handle_inplace(self, name: str, args: Args, kwargs: Kwargs) -> Any:
        """A call in place is recorded out of place; it keeps the dtype."""
        name = name[:-1]
        if name not in ("add", "sub", "mul", "div", "masked_fill"):
            return NotImplemented
        result = self.handle_function(name, getattr(Tensor, name), args, kwargs)
        if result is NotImplemented or result.dtype == self.dtype:
            return result
        return result.then(RecordedCall(Tensor.to, (result, self.dtype)), dtype=self.dtype)

    def before_materialize(self, name: str) -> None:
        is_plain_product = not self._parents  # possibly not attention at all
        only_read = self.is_weights and name not in (*_PRODUCTS, "masked_fill", "dropout")
        if is_plain_product or only_read:
            return
        warnings.warn(
            f"fix 'fused_attention': {_program_line()}: {name} of attention scores is not fused, and the "
            f"matrix {list(self.shape)} is computed; use F.scaled_dot_product_attention or "
            "oomph.ops.attention(q, k, v, causal=..., bias=..., key_mask=..., scale=...) there",
            FixWarning,
            stacklevel=2,
        )

    def fits(self, tensor: Any) -> bool:
        """Whether it broadcasts to the scores."""
        shape = tuple(tensor.shape)
        full = tuple(self.shape)[len(self.shape) - len(shape) :] if len(shape) <= len(self.shape) else ()
        return len(shape) == len(full) and all(a in (1, b) for a, b in zip(shape, full, strict=True))

    def _times_values(self, name: str, args: Args, kwargs: Kwargs) -> Any:
        """softmax(scores) v: the fused call."""
        v, subscripts = self._values(name, args, kwargs)
        if v is None or not self.is_weights or not v.is_floating_point():
            return NotImplemented
        if self.autocast is None and v.dtype != self.dtype:
            return NotImplemented
        lead = self.shape[:-2]
        if v.dim() != len(lead) + 2 or v.shape[-2] != self.shape[-1]:
            return NotImplemented
        if any(have not in (1, want) for have, want in zip(v.shape[:-2], lead, strict=True)):
            return NotImplemented
        self.check_unchanged()
        out = _fused(self, v)
        if subscripts is not None:
            out = _permuted(out, *subscripts)
        out._oomph_fused = True  # type: ignore[attr-defined]
        return out

    def _values(self, name: str, args: Args, kwargs: Kwargs) -> tuple[Any, tuple[str, str] | None]:
        """v [*lead, S, E], and for einsum the subscripts of [*lead, T, E] and of its result."""
        if name != "einsum":
            plain = len(args) == 2 and args[0] is self and isinstance(args[1], Tensor) and not kwargs
            return (args[1] if plain else None), None
        found = _einsum_operands(args, kwargs)
        if found is None or len(found[2]) != 2 or found[2][0] is not self:
            return None, None
        (of_weights, of_v), out, (_, v) = found
        lead, row, summed = of_weights[:-2], of_weights[-2], of_weights[-1]
        own = set(of_v) - set(of_weights)
        if len(own) != 1 or set(of_v) != {*lead, summed, *own} or set(out) != {*lead, row, *own}:
            return None, None
        (column,) = own
        return _permuted(v, of_v, lead + summed + column), (lead + row + column, out)


# Each returns the attributes that change, or None where the scores have to be computed.
Changes = dict[str, Any] | None


def _scale(scores: AttentionScores, name: str, args: Args, kwargs: Kwargs) -> Changes:
    if len(args) != 2 or kwargs or scores.is_weights or (name == "div" and args[0] is not scores):
        return None
    number = _number(args[1] if args[0] is scores else args[0])
    if number is None or number == 0:
        return None
    factor = 1 / number if name == "div" else number
    fill = None if scores.fill is None else scores.fill * factor
    if fill is not None and (factor < 0 or fill > _MASKED_SCORE):
        return None
    terms = tuple((term, own * factor) for term, own in scores.terms)
    return {"scale": scores.scale * factor, "terms": terms, "fill": fill}


def _add(scores: AttentionScores, name: str, args: Args, kwargs: Kwargs) -> Changes:
    if len(args) != 2 or kwargs or scores.is_weights or (name == "sub" and args[0] is not scores):
        return None
    if scores.fill not in (None, -math.inf):  # adding to a finite fill would change it
        return None
    term = args[1] if args[0] is scores else args[0]
    if not isinstance(term, Tensor) or not term.is_floating_point() or not scores.fits(term):
        return None
    dtype = scores.dtype if term.dim() == 0 else torch.promote_types(scores.dtype, term.dtype)
    if name == "add" and is_causal(term, scores.shape, "added", scores.buffers):
        return {"causal": True, "fill": -math.inf, "dtype": dtype}
    return {"terms": (*scores.terms, (term, -1.0 if name == "sub" else 1.0)), "dtype": dtype}


def _masked_fill(scores: AttentionScores, name: str, args: Args, kwargs: Kwargs) -> Changes:
    given = dict(zip(("scores", "mask", "value"), args, strict=False)) | dict(kwargs)
    if given.keys() != {"scores", "mask", "value"} or given["scores"] is not scores:
        return None
    return _fill(scores, given["mask"], given["value"], inverted=False)


def _where(scores: AttentionScores, name: str, args: Args, kwargs: Kwargs) -> Changes:
    """torch.where(condition, scores, value), or the other way round."""
    if len(args) != 3 or kwargs or args[0] is scores or args[1] is args[2]:
        return None
    condition, yes, no = args
    return _fill(scores, condition, no if yes is scores else yes, inverted=yes is scores)


def _fill(scores: AttentionScores, mask: Any, value: Any, *, inverted: bool) -> Changes:
    number = _number(value)
    if scores.is_weights or number is None or number > _MASKED_SCORE or scores.fill not in (None, number):
        return None
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or not scores.fits(mask):
        return None
    added_masks = any(constant_of(term, scores.buffers) is not None for term, _ in scores.terms)
    if added_masks and number != -math.inf:  # a row may have keys that are masked in both ways alone
        return None
    if is_causal(mask, scores.shape, "visible" if inverted else "hidden", scores.buffers):
        return {"causal": True, "fill": number}
    return {"masks": (*scores.masks, ~mask if inverted else mask), "fill": number}


def _softmax(scores: AttentionScores, name: str, args: Args, kwargs: Kwargs) -> Changes:
    names = ("input", "dim", "_stacklevel", "dtype") if len(args) > 3 else ("input", "dim", "dtype")
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    if given.get("dim") not in (-1, len(scores.shape) - 1) or scores.is_weights:
        return None
    dtype = given.get("dtype")
    if dtype is None:  # autocast computes a softmax in fp32
        wide = scores.autocast is not None
        dtype = torch.promote_types(scores.dtype, torch.float32) if wide else scores.dtype
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        return None
    return {"is_weights": True, "dtype": dtype}


def _dropout(scores: AttentionScores, name: str, args: Args, kwargs: Kwargs) -> Changes:
    given = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | dict(kwargs)
    p, training = given.get("p", 0.5), given.get("training", given.get("train", True))
    off = (isinstance(p, int | float) and p == 0) or training is False
    return {} if off and given["input"] is scores else None


_DTYPES = {"float": torch.float32, "half": torch.half, "bfloat16": torch.bfloat16, "double": torch.float64}


def _cast(scores: AttentionScores, name: str, args: Args, kwargs: Kwargs) -> Changes:
    dtype = _DTYPES.get(name)
    for value in (*args[1:], *kwargs.values()):
        if isinstance(value, torch.dtype):
            dtype = value
        elif isinstance(value, Tensor) and value.device == scores.q.device:
            dtype = value.dtype
        elif isinstance(value, torch.device) and value == scores.q.device:
            dtype = dtype or scores.dtype
        else:
            return None
    if args[0] is not scores or dtype is None or not dtype.is_floating_point:
        return None
    return {"dtype": dtype}


_STEPS: dict[str, Callable[[AttentionScores, str, Args, Kwargs], Changes]] = {
    **dict.fromkeys(("mul", "div"), _scale),
    **dict.fromkeys(("add", "sub"), _add),
    "masked_fill": _masked_fill,
    "where": _where,
    "softmax": _softmax,
    "dropout": _dropout,
    "contiguous": lambda scores, *_: {},
    **dict.fromkeys(("to", "type", "type_as", *_DTYPES), _cast),
}


def _number(value: Any) -> float | None:
    """A number, or the one in a tensor whose content is known without waiting for a GPU."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, Tensor) or value.dim():
        return None
    constant = constant_of(value)
    if constant is not None:
        return causal_masks.number(constant)
    known = not (value.requires_grad or is_fake(value) or value.device.type != "cpu")
    return float(value) if known else None


# The fused call --------------------------------------------------------------------------------------


def _fused(scores: AttentionScores, v: Tensor) -> Tensor:
    """softmax(scores) v, [*lead, T, E]."""
    lead, queries, keys = tuple(scores.shape[:-2]), *scores.shape[-2:]
    q, k, v4 = scores.q, scores.k, v
    if not q.dtype == k.dtype == v.dtype and scores.autocast is None:
        wide = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
        q, k, v4 = q.to(wide), k.to(wide), v4.to(wide)
    # One key/value head for all query heads stays one; other broadcasting is expanded.
    heads = 1 if len(lead) == 2 and k.shape[1] == v.shape[1] == 1 else lead[-1]
    q, k, v4 = _expanded(q, lead), _expanded(k, (*lead[:-1], heads)), _expanded(v4, (*lead[:-1], heads))
    if len(lead) == 1:
        q, k, v4 = q[:, None], k[:, None], v4[:, None]
    masks = [_four_dimensional(mask, lead) for mask in scores.masks]
    bias: Tensor | None = None
    dtype = scores._matmul_dtype(q.dtype)
    for term, factor in scores.terms:
        part = _four_dimensional(term, lead)
        if factor != 1:
            part = part.to(torch.promote_types(part.dtype, dtype)) * factor
        bias = part if bias is None else bias + part

    by_key = [mask for mask in masks if mask.shape[1:3] == (1, 1)]
    by_pair = [mask for mask in masks if mask.shape[1:3] != (1, 1)]
    causal, finite = scores.causal, scores.fill is not None and scores.fill != -math.inf
    is_matrix = bool(by_pair) or (bias is not None and bias.shape[2] == queries > 1)
    if is_matrix and not (bias is not None and bias.requires_grad and torch.is_grad_enabled()):
        # The kernels take a bias matrix alone: all masks go into it, as far as it need not grow.
        if causal:
            by_pair.append(_future(queries, keys, q.device))
            causal = False
        if all(
            each.shape[0] > 1 or each.shape[1] == 1 for each in (*by_pair, *([] if bias is None else [bias]))
        ):
            by_pair, by_key = [*by_pair, *by_key], []
    pairs = _any(by_pair)
    if pairs is not None:
        if finite:  # rows without a visible key are replaced below; not every kernel takes rows of -inf
            pairs = pairs & ~pairs.all(-1, keepdim=True)
        empty = torch.zeros(pairs.shape, dtype=dtype, device=q.device) if bias is None else bias
        bias = empty.masked_fill(pairs, -math.inf)
    hidden = _any(by_key)
    key_mask = None if hidden is None else ~hidden[:, 0, 0, :].expand(q.shape[0], keys)
    out = attention(q, k, v4, causal=causal, bias=bias, key_mask=key_mask, scale=scores.scale)
    if finite and masks:
        out = _with_empty_rows(out, v4, scores.causal, masks)
    wanted = scores._matmul_dtype(v.dtype)
    out = out if out.dtype == wanted else out.to(wanted)
    return out if len(lead) == 2 else out.squeeze(1)


def _with_empty_rows(out: Tensor, v: Tensor, causal: bool, masks: Sequence[Tensor]) -> Tensor:
    """With a finite fill, the softmax of a row without a visible key is uniform: the mean of all values."""
    hidden = _any(masks)
    assert hidden is not None
    if causal:
        hidden = hidden | _future(out.shape[2], v.shape[2], out.device)
    mean = v.mean(2, keepdim=True, dtype=torch.promote_types(v.dtype, torch.float32)).to(out.dtype)
    if mean.shape[1] not in (1, out.shape[1]):
        mean = mean.repeat_interleave(out.shape[1] // mean.shape[1], 1)
    return torch.where(hidden.all(-1, keepdim=True), mean, out)


def _expanded(tensor: Tensor, lead: tuple[int, ...]) -> Tensor:
    """Itself where it has these dimensions: a view costs time in forward and in backward."""
    return tensor if tuple(tensor.shape[:-2]) == lead else tensor.expand(*lead, *tensor.shape[-2:])


def _four_dimensional(tensor: Tensor, lead: tuple[int, ...]) -> Tensor:
    """A mask or term as it broadcasts to [B, H, T, S]."""
    full = tensor.reshape((1,) * (len(lead) + 2 - tensor.dim()) + tuple(tensor.shape))
    return full[:, None] if len(lead) == 1 else full


def _future(queries: int, keys: int, device: torch.device) -> Tensor:
    """[1, 1, T, S], True for keys after the query's own position."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).triu(keys - queries + 1)[None, None]


def _any(masks: Sequence[Tensor]) -> Tensor | None:
    total: Tensor | None = None
    for mask in masks:
        total = mask if total is None else total | mask
    return total


class FusedAttention(Fix):
    name = "fused_attention"
    kind = "exact"
    changes = "Attention written out as products and a softmax runs fused, without the matrix of its weights."

    def targets(self, context: FixContext) -> Iterable[Target]:
        if _has_own_code(context.model) and not _is_applied(context.model):
            paths = attention_matrices(context.prediction)
            names = list(dict.fromkeys(_owner(context.model, path) for path in paths))
            if names:  # the prediction with the fix shows whether it is of a form that is fused
                yield Target(tuple(names), {"modules": names})

    def change_model(
        self, model: nn.Module, journal: Journal, *, modules: Sequence[str] | None = None
    ) -> None:
        """`modules`: whose forward computes attention; by default the whole model. Other parts of the forward
        run as they are written."""
        if modules is None and not _has_own_code(model):
            raise UserError(
                f"fix {self.name!r}: the model has no code of its own; name modules=[...], or use the fix "
                "'attn_implementation' for a Hugging Face model"
            )
        for name, module in modules_with_code(model, modules, self.name).items():
            kind = type(module)  # an empty Sequential is what stands for the identity in many models
            of_torch = kind.__module__.startswith("torch.") and not isinstance(module, nn.Sequential)
            if of_torch and not list(module.children()):
                raise UserError(f"fix {self.name!r}: {name!r} is a {kind.__name__}, without code of its own")
            journal.wrap_forward(module, _run_in_mode, name, "attention in its forward is fused")


def _is_applied(model: nn.Module) -> bool:
    """Whether the forward of a module in it runs in the mode already."""
    for each in model.modules():
        forward = vars(each).get("forward")
        while isinstance(forward, WrappedForward):
            if forward.wrapper is _run_in_mode:
                return True
            forward = forward.inner
    return False
