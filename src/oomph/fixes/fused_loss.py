"""The linear head and its cross-entropy in one: neither the logits nor a loss's copies of them ever exist."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from oomph.errors import ArgumentError, UserError
from oomph.fixes.journal import Journal, WrappedForward
from oomph.fixes.logits.record import Later, Meaning, Source
from oomph.fixes.logits.tensor import logits_of
from oomph.fixes.modules import is_plain_linear, is_plain_parameter, module_at, name_of, names_option
from oomph.fixes.registry import Fix, FixContext, Target
from oomph.ops import common
from oomph.ops.common import autocast_enabled
from oomph.ops.cross_entropy.api import PLAIN_LOGITS_BYTES
from oomph.ops.launch import is_fake

_LOG_SOFTMAX = "aten._log_softmax"


class FusedLinearCrossEntropy(Fix):
    name = "fused_linear_cross_entropy"
    kind = "exact"
    changes = "The loss is computed from the head's input in blocks; the logits exist only if they are read."

    def targets(self, context: FixContext) -> Iterable[Target]:
        softmaxes = {
            made.shape[-1]: made
            for made in context.prediction.allocations
            if made.op == _LOG_SOFTMAX and made.bytes > PLAIN_LOGITS_BYTES
        }
        heads = [name for name in _linears(context.model) if _classes(context.model, name) in softmaxes]
        if not heads:
            return
        # Of several layers of that width, those that made logits; and Hugging Face's own where it says so.
        own = _declared_head(context.model)
        ran = {made.module for made in context.prediction.allocations if made.shape[-1:] and made.step}
        chosen = [name for name in heads if name == own] or [name for name in heads if name in ran]
        if chosen:
            yield Target(tuple(chosen), {"heads": chosen})

    def change_model(
        self,
        model: nn.Module,
        journal: Journal,
        *,
        heads: Sequence[str] | None = None,
        memory_budget: str | int | None = None,
    ) -> None:
        """`heads`: names of nn.Linear modules; by default the language model's. `memory_budget`: what a block
        of logits and the like may take ("256MiB"), by default 512 MiB."""
        try:
            common.parse_memory_budget(memory_budget)
        except ArgumentError as error:
            raise UserError(f"fix 'fused_linear_cross_entropy': {error}") from None
        for name in _default_heads(model) if heads is None else names_option(self.name, "heads", heads):
            module = module_at(model, name, self.name)
            _check_head(name, module)
            around = partial(_deferring, memory_budget=memory_budget)
            journal.wrap_forward(module, around, name, "its logits are left to the loss")


def _deferring(
    forward: Callable[..., Any],
    *args: Any,
    memory_budget: str | int | None = None,
    into_grad: bool = False,
    **kwargs: Any,
) -> Any:
    head = _linear_of(forward)
    hidden: Any = args[0] if args else kwargs.get("input")
    if len(args) + len(kwargs) != 1 or not _can_defer(head, hidden):
        return forward(*args, **kwargs)
    source = Source(head, forward, hidden, memory_budget=memory_budget, into_grad=into_grad)
    return logits_of(Later(source, Meaning(hidden, source.dtype)))


def _linear_of(forward: Callable[..., Any]) -> nn.Linear:
    head = forward.__self__  # type: ignore[attr-defined]
    assert isinstance(head, nn.Linear)
    return head


def _can_defer(head: nn.Linear, hidden: Any) -> bool:
    """Whether eager code with plain tensors calls; all else (tracers, transforms) gets the logits at once."""
    if not (type(hidden) in (Tensor, nn.Parameter) or is_fake(hidden)):
        return False
    if hidden.dim() < 1 or hidden.shape[-1] != head.in_features or hidden.numel() == 0:
        return False
    dtypes = {hidden.dtype, head.weight.dtype, *(() if head.bias is None else (head.bias.dtype,))}
    return (
        hidden.is_floating_point()
        and (len(dtypes) == 1 or (autocast_enabled(hidden) and torch.float64 not in dtypes))
        and hidden.device == head.weight.device
        and is_plain_parameter(head.weight)
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and not torch.is_inference_mode_enabled()
        and not hidden.is_inference()
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def defers(module: nn.Module) -> bool:
    """Whether the fix is in this module."""
    forward = vars(module).get("forward")
    return isinstance(forward, WrappedForward) and getattr(forward.around, "func", None) is _deferring


def adding_to_grad(module: nn.Module) -> WrappedForward:
    """The forward of a module that has the fix, with the weight's gradient added to `.grad` where it is."""
    forward = vars(module)["forward"]
    assert isinstance(forward, WrappedForward)
    return WrappedForward(forward.inner, partial(forward.around, into_grad=True))


def _default_heads(model: nn.Module) -> list[str]:
    declared = _declared_head(model)
    if declared is not None:
        return [declared]
    vocabularies = {module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)}
    found = [name for name in _linears(model) if _classes(model, name) in vocabularies]
    if not found:
        raise UserError(
            "fix 'fused_linear_cross_entropy': the model has no linear head as wide as its vocabulary; "
            "name it in heads=[...]"
        )
    return found


def _declared_head(model: nn.Module) -> str | None:
    """What a Hugging Face model says its head is."""
    ask = getattr(model, "get_output_embeddings", None)
    head = ask() if callable(ask) else None
    return name_of(model, head) if isinstance(head, nn.Linear) else None


def _linears(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if is_plain_linear(module)]


def _classes(model: nn.Module, name: str) -> int:
    linear = model.get_submodule(name)
    assert isinstance(linear, nn.Linear)
    return linear.out_features


def _check_head(name: str, module: nn.Module) -> None:
    if "forward" in vars(module):
        raise UserError(
            f"fix 'fused_linear_cross_entropy': the forward of {name!r} is replaced already; undo that first"
        )
    if not is_plain_linear(module):
        raise UserError(
            f"fix 'fused_linear_cross_entropy': {name!r} is a {type(module).__name__}, or its weight is "
            "computed; the head must be a plain nn.Linear"
        )
    if module._backward_hooks or module._backward_pre_hooks:
        raise UserError(
            f"fix 'fused_linear_cross_entropy': {name!r} has backward hooks, which need the gradient of "
            "the logits; remove them"
        )
