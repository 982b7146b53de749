"""The linear head and its cross-entropy as one op: the logits are computed only if something reads them.

The head returns a LazyTensor. `Logits` follows what training code does with logits on the way to the loss
(views, slices, casts, scaling, soft caps, log-softmax). F.cross_entropy, F.nll_loss and the log-probabilities
that gather takes become linear_cross_entropy.
Whatever is done to the leading dimensions of the logits is done to the hidden state instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oomph.errors import ArgumentError, UserError
from oomph.fixes.journal import Journal, WrappedForward
from oomph.fixes.lazy_tensor import Args, Expression, Kwargs, RecordedCall, autocast_as, lazy_tensor
from oomph.fixes.modules import chosen_modules, is_plain_call, is_plain_linear, name_of
from oomph.fixes.registry import Fix, FixContext, Target
from oomph.ops import common
from oomph.ops.common import autocast_enabled, can_accumulate_into_grad, matmul_dtype
from oomph.ops.cross_entropy import linear_cross_entropy
from oomph.ops.cross_entropy.api import PLAIN_LOGITS_BYTES, REDUCTIONS
from oomph.torch_internals import disable_dispatch_modes, disable_torch_function, parse_to

_LOG_SOFTMAX = "aten._log_softmax"


class FusedLinearCrossEntropy(Fix):
    name = "fused_linear_cross_entropy"
    kind = "exact"
    changes = "The loss is computed from the head's input in blocks; the logits exist only if they are read."

    def targets(self, context: FixContext) -> Iterable[Target]:
        classes = {
            made.shape[-1]
            for made in context.prediction.allocations
            if made.op == _LOG_SOFTMAX and made.bytes > PLAIN_LOGITS_BYTES
        }
        heads = [name for name, linear in _linears(context.model) if linear.out_features in classes]
        if not heads:
            return
        # Of several layers of that width: the one a Hugging Face model declares, or those that ran.
        own = _declared_head(context.model)
        ran = {made.module for made in context.prediction.allocations if made.shape[-1:] and made.step}
        chosen = [name for name in heads if name == own] or [name for name in heads if name in ran]
        if chosen:
            yield Target(tuple(chosen), {} if chosen == _default_heads(context.model) else {"heads": chosen})

    def change_model(
        self,
        model: nn.Module,
        journal: Journal,
        *,
        heads: Sequence[str] | None = None,
        memory_budget: str | int | None = None,
    ) -> None:
        """`heads`: names of nn.Linear modules; by default the language model's. `memory_budget`: for a block
        of logits and its gradients ("256MiB"), by default 512 MiB."""
        try:
            common.parse_memory_budget(memory_budget)
        except ArgumentError as error:
            raise UserError(f"fix {self.name!r}: {error}") from None
        names = _default_heads(model) if heads is None else heads
        if heads is None and not names:
            raise UserError(
                f"fix {self.name!r}: the model has no linear head as wide as its vocabulary; "
                "name it in heads=[...]"
            )
        for name, module in chosen_modules(model, names, self.name, "heads").items():
            _check_head(name, module)
            around = partial(_lazy_head, memory_budget=memory_budget)
            journal.wrap_forward(module, around, name, "returns lazy logits, which the loss does not compute")


# The head --------------------------------------------------------------------------------------------


def _lazy_head(
    forward: Callable[..., Any],
    *args: Any,
    memory_budget: str | int | None = None,
    accumulate_into_grad: bool = False,
    **kwargs: Any,
) -> Any:
    head = forward.__self__  # type: ignore[attr-defined]
    assert isinstance(head, nn.Linear)
    hidden: Any = args[0] if args else kwargs.get("input")
    if len(args) + len(kwargs) != 1 or not _can_be_lazy(head, hidden):
        return forward(*args, **kwargs)
    return lazy_tensor(Logits(head, hidden, memory_budget, accumulate_into_grad))


def _can_be_lazy(head: nn.Linear, hidden: Any) -> bool:
    return (
        is_plain_call(head, hidden)
        and hidden.numel() > 0
        and not torch.is_inference_mode_enabled()
        and not hidden.is_inference()
    )


def is_fused(module: nn.Module) -> bool:
    """Whether the fix is applied to this head."""
    forward = vars(module).get("forward")
    return isinstance(forward, WrappedForward) and getattr(forward.wrapper, "func", None) is _lazy_head


def accumulating_forward(module: nn.Module) -> WrappedForward:
    """The forward of a fused head, with the weight's gradient accumulated into `.grad` by the kernel."""
    forward = vars(module)["forward"]
    assert isinstance(forward, WrappedForward)
    return WrappedForward(forward.inner, partial(forward.wrapper, accumulate_into_grad=True))


def _default_heads(model: nn.Module) -> list[str]:
    declared = _declared_head(model)
    if declared is not None:
        return [declared]
    vocabularies = {module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)}
    return [name for name, linear in _linears(model) if linear.out_features in vocabularies]


def _declared_head(model: nn.Module) -> str | None:
    """The head of a Hugging Face model."""
    get = getattr(model, "get_output_embeddings", None)
    head = get() if callable(get) else None
    return name_of(model, head) if isinstance(head, nn.Linear) else None


def _linears(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    return [(name, module) for name, module in model.named_modules() if is_plain_linear(module)]  # type: ignore[misc]


def _check_head(name: str, module: nn.Module) -> None:
    fix = "fix 'fused_linear_cross_entropy'"
    if "forward" in vars(module):
        raise UserError(f"{fix}: the forward of {name!r} is replaced already; undo that first")
    if not is_plain_linear(module):
        kind = type(module).__name__
        raise UserError(
            f"{fix}: {name!r} is a {kind}, or its weight is computed; the head must be a plain nn.Linear"
        )
    if module._backward_hooks or module._backward_pre_hooks:
        raise UserError(
            f"{fix}: {name!r} has backward hooks, which need the gradient of the logits; remove them"
        )


# Logits ----------------------------------------------------------------------------------------------


class Logits(Expression):
    """Logits of a head as a function of the hidden state [..., D].

    logits = factor * hidden @ weight.T, or post * tanh(factor * ...) with `capped`; their log-softmax with
    `normalized`. The classes are the last dimension, or with `classes_second` the one after the first.
    """

    subject = "a tensor of logits from fix 'fused_linear_cross_entropy'"

    def __init__(
        self, head: nn.Linear, hidden: Tensor, memory_budget: str | int | None, accumulate_into_grad: bool
    ) -> None:
        self.hidden, self.weight, self.bias = hidden, head.weight, head.bias
        self.memory_budget, self.accumulate_into_grad = memory_budget, accumulate_into_grad
        self.factor, self.capped, self.post = 1.0, False, 1.0
        self.normalized = self.classes_second = False
        self.dtype = matmul_dtype(hidden)
        self.record(RecordedCall(F.linear, (hidden, head.weight, head.bias)))
        self.head_autocast, self.recording = self.autocast, self.grad_enabled

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        lead, classes = tuple(self.hidden.shape[:-1]), self.weight.shape[0]
        return torch.Size((lead[0], classes, *lead[1:]) if self.classes_second else (*lead, classes))

    @property
    def classes_dim(self) -> int:
        return 1 if self.classes_second else self.hidden.dim() - 1

    def handle_function(self, name: str, func: Any, args: Args, kwargs: Kwargs) -> Any:
        options = dict(kwargs)
        if "input" in options:
            args = (options.pop("input"), *args)
        first, *rest = args
        if first is not self or any(isinstance(value, Expression) for value in (*rest, *options.values())):
            return NotImplemented
        if name in ("cross_entropy", "nll_loss"):
            self.check_unchanged()
            loss = _loss(self, *rest, **options) if self.normalized == (name == "nll_loss") else None
            return NotImplemented if loss is None else loss
        if name == "gather" and self.normalized:
            self.check_unchanged()
            found = _gathered(self, *rest, **options)
            return NotImplemented if found is None else found
        name = "mT" if func == Tensor.mT.__get__ else name  # type: ignore[attr-defined]
        if name not in _STEPS and name not in _RESHAPES and name not in _PERMUTATIONS:
            return NotImplemented
        recording = self.recording and torch.is_grad_enabled()
        with torch.set_grad_enabled(recording):
            if name in _STEPS:
                changes = _STEPS[name](self, *rest, **options)
            else:
                changes = (_reshaped if name in _RESHAPES else _permuted)(self, func, rest, options)
            if changes is None:
                return NotImplemented
            return self.then(RecordedCall(func, (self, *rest), options), recording=recording, **changes)


# Each returns the attributes that change, or None where the logits have to be computed.
Changes = dict[str, Any] | None


def _cast(logits: Logits, dtype: torch.dtype) -> Changes:
    """The loss is computed in fp32 at least, so widening bf16 to fp32 is free; other casts change numbers."""
    if dtype == logits.dtype:
        return {}
    widened = dtype == torch.float32 and logits.dtype in (torch.bfloat16, torch.float16)
    return {"dtype": dtype} if widened and not logits.normalized else None


def _to(logits: Logits, *args: Any, **kwargs: Any) -> Changes:
    device = logits.hidden.device
    if any(isinstance(value, Tensor) for value in (*args, *kwargs.values())) or kwargs.get("copy"):
        return None
    try:
        where, dtype, _, memory_format = parse_to(
            *args, **{key: value for key, value in kwargs.items() if key != "copy"}
        )
    except (TypeError, RuntimeError):
        return None
    moves = where is not None and (where.type != device.type or where.index not in (None, device.index))
    return None if moves or memory_format is not None else _cast(logits, dtype or logits.dtype)


_RESHAPES = frozenset(("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"))
_PERMUTATIONS = frozenset(("permute", "transpose", "swapaxes", "movedim", "mT"))


def _reshaped(logits: Logits, func: Any, args: Args, kwargs: Kwargs) -> Changes:
    """A reshape that leaves the last dimension whole is one of the hidden state."""
    shape = _shape_of(logits, func, logits.shape, args, kwargs)
    if shape is None or logits.classes_second or len(shape) < 1 or shape[-1] != logits.shape[-1]:
        return None
    return {"hidden": logits.hidden.reshape(*shape[:-1], logits.hidden.shape[-1])}


def _permuted(logits: Logits, func: Any, args: Args, kwargs: Kwargs) -> Changes:
    n, classes = len(logits.shape), logits.classes_dim
    sizes = _shape_of(logits, func, range(2, n + 2), args, kwargs)  # all different: shows where each went
    order = [size - 2 for size in sizes or ()]
    if not order or order.index(classes) not in (1, n - 1):
        return None
    leading = [dim - (dim > classes) for dim in order if dim != classes]
    second = order.index(classes) == 1 and n > 2
    return {"hidden": logits.hidden.permute(*leading, n - 1), "classes_second": second}


def _shape_of(logits: Logits, func: Any, shape: Any, args: Args, kwargs: Kwargs) -> torch.Size | None:
    """The shape of the result for a tensor of this shape; None for errors, which torch reports."""
    try:
        with disable_torch_function(), disable_dispatch_modes():
            return func(torch.empty(tuple(shape), device="meta"), *args, **kwargs).shape
    except (RuntimeError, TypeError, IndexError):
        return None


def _getitem(logits: Logits, index: Any) -> Changes:
    """An index that leaves the classes whole."""
    parts = list(index) if isinstance(index, tuple) else [index]
    taken = [_dimensions_indexed(part) for part in parts]
    ellipses = sum(part is ... for part in parts)
    if logits.classes_second or None in taken or ellipses > 1:
        return None
    used, n, last = sum(one for one in taken if one is not None), len(logits.shape), parts[-1]
    reaches_classes = used == n or (ellipses > 0 and last is not ... and taken[-1] != 0)
    whole = isinstance(last, slice) and last == slice(None)
    if used > n or (reaches_classes and not whole) or (last is None and (ellipses or used == n)):
        return None
    return {"hidden": logits.hidden[index]}


def _dimensions_indexed(part: Any) -> int | None:
    if part is None or part is ...:
        return 0
    if isinstance(part, slice) or type(part) is int:
        return 1
    if isinstance(part, Tensor) and part.dtype in (torch.int64, torch.bool):
        return part.dim() if part.dtype == torch.bool else 1
    return None


def _scale(logits: Logits, number: float) -> Changes:
    if logits.normalized:
        return None
    return {"post": logits.post * number} if logits.capped else {"factor": logits.factor * number}


def _mul(logits: Logits, other: Any) -> Changes:
    return _scale(logits, float(other)) if type(other) in (int, float) else None


def _div(logits: Logits, other: Any, **named: Any) -> Changes:
    if type(other) not in (int, float) or other == 0 or named.get("rounding_mode") is not None:
        return None
    return _scale(logits, 1.0 / other)


def _log_softmax(logits: Logits, dim: Any = None, *more: Any, dtype: Any = None, **_: Any) -> Changes:
    """F.log_softmax has `_stacklevel` before dtype; torch.log_softmax has not."""
    n, dtype = len(logits.shape), more[-1] if more and isinstance(more[-1], torch.dtype) else dtype
    if logits.normalized or type(dim) is not int or not -n <= dim < n or dim % n != logits.classes_dim:
        return None
    if dtype is None and logits.dtype.itemsize == 2 and autocast_enabled(logits.hidden):
        dtype = torch.float32
    changes = {} if dtype is None else _cast(logits, dtype)
    return None if changes is None else {**changes, "normalized": True}


_STEPS: dict[str, Callable[..., Changes]] = {
    "float": lambda logits: _cast(logits, torch.float32),
    "bfloat16": lambda logits: _cast(logits, torch.bfloat16),
    "half": lambda logits: _cast(logits, torch.float16),
    "to": _to,
    "contiguous": lambda logits: {},
    "__getitem__": _getitem,
    "mul": _mul,
    "div": _div,
    "tanh": lambda logits: None if logits.capped or logits.normalized else {"capped": True},
    "log_softmax": _log_softmax,
}


# Losses ----------------------------------------------------------------------------------------------

_NO_INDEX = -(2**31)  # an ignore_index that programs do not use
_EXACT = 1e-12  # a soft cap divides and multiplies: 1 / 30 * 30 need not be 1


def _loss(
    logits: Logits,
    target: Any,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """As F.cross_entropy, or F.nll_loss of a log-softmax; None where the logits are needed, and for errors,
    which torch reports."""
    if size_average is not None or reduce is not None:
        return None
    hidden, factor = logits.hidden, logits.factor
    bias: Tensor | None = logits.bias
    if not isinstance(target, Tensor) or target.dtype != torch.int64 or target.shape != hidden.shape[:-1]:
        return None
    if target.device != hidden.device or not _takes_class_weight(logits, weight):
        return None
    if reduction not in REDUCTIONS or type(ignore_index) is not int or not 0.0 <= label_smoothing <= 1.0:
        return None
    cap = logits.post if logits.capped else None
    if cap is not None:
        if not (cap > 0 and math.isfinite(cap)):
            return None
        factor *= cap
    with torch.set_grad_enabled(logits.recording and torch.is_grad_enabled()):
        if abs(factor - 1.0) > _EXACT:
            # Scale the hidden state, which is narrower than the logits and rounded as often.
            hidden, bias = hidden * factor, None if bias is None else bias * factor
        with autocast_as(logits.device, logits.head_autocast):
            loss = linear_cross_entropy(
                hidden,
                logits.weight,
                target,
                bias=bias,
                reduction=reduction,
                ignore_index=ignore_index,
                label_smoothing=float(label_smoothing),
                softcap=cap,
                class_weight=weight,
                accumulate_into_grad=logits.accumulate_into_grad and can_accumulate_into_grad(logits.weight),
                memory_budget=logits.memory_budget,
            )
        assert isinstance(loss, Tensor)
        if reduction == "mean":
            # torch's mean over no targets is NaN, and its gradient 0.
            loss = torch.where((target != ignore_index).any(), loss, torch.nan)
        return loss.to(_loss_dtype(logits))


def _gathered(
    logits: Logits, dim: Any = None, index: Any = None, *, sparse_grad: bool = False, out: Any = None
) -> Tensor | None:
    """`log_softmax(...).gather(...)` with one class of each token: its negative cross-entropy. Indices out of
    range, -100 too, give NaN."""
    n, classes = len(logits.shape), logits.classes_dim
    if type(dim) is not int or not -n <= dim < n or dim % n != classes or sparse_grad or out is not None:
        return None
    if not isinstance(index, Tensor) or index.dim() != n or index.shape[classes] != 1:
        return None
    loss = _loss(logits, index.squeeze(classes), ignore_index=_NO_INDEX, reduction="none")
    return None if loss is None else -loss.unsqueeze(classes).to(logits.dtype)


def _takes_class_weight(logits: Logits, class_weight: Tensor | None) -> bool:
    return class_weight is None or (
        class_weight.shape == (logits.weight.shape[0],)
        and class_weight.device == logits.hidden.device
        and class_weight.dtype == _loss_dtype(logits)
        and not class_weight.requires_grad
    )


def _loss_dtype(logits: Logits) -> torch.dtype:
    """The logits' dtype; under autocast, torch computes losses in fp32."""
    if autocast_enabled(logits.hidden) and logits.dtype != torch.float64:
        return torch.float32
    return logits.dtype
