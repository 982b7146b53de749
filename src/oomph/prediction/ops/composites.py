"""Composite ops that CUDA decomposes in its own way.

Linear, dropout, batch norm, RMSNorm, softmax, attention, recurrent layers and one_hot dissolve above the
dispatch mode, so CUDA's path is taken at autograd's own key, for tensors of the fake GPU only. All other
tensors take torch's own decomposition.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from oomph.prediction.ops.registry import FACTS, entered
from oomph.prediction.ops.rules import RuleContext, bind, is_program_error, op_name
from oomph.torch_internals import OpOverload

aten = torch.ops.aten
# The compiler's own decompositions are the same on all devices, but for these.
_IN_COMPILER = (aten.scaled_dot_product_attention.default, aten.rms_norm.default)


@contextmanager
def cuda_composites(context: RuleContext) -> Iterator[None]:
    """Register CUDA's paths for the duration."""
    library = torch.library.Library("aten", "IMPL")
    active = [context]  # torch never drops a Python kernel: emptied, it keeps nothing of the trace
    for op in entered("composite"):
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
    path = FACTS[op].composite
    if path is None or not context.on_gpu(args[0]):
        return decompose()
    if context.compiling() and op not in _IN_COMPILER:
        return decompose()
    rule = functools.partial(path, context, bind(op, args, kwargs))
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
