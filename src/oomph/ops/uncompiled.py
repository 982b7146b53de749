"""Functions that torch.compile steps around."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback

P = ParamSpec("P")
R = TypeVar("R")


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """Run `function` as it is where a program is compiled: a graph break, and the same results.

    As torch.compiler.disable, which is applied only where something is being compiled: it loads the compiler,
    which takes seconds, and costs more at every call than the checks of most ops.
    """
    disabled: Callable[P, R] | None = None

    @functools.wraps(function)
    def run(*arguments: P.args, **options: P.kwargs) -> R:
        nonlocal disabled
        # The first is True, a constant, in what the compiler traces. The second is set where it watches a
        # program without tracing this very call: it would begin to trace inside of `function`.
        if not torch.compiler.is_dynamo_compiling() and get_eval_frame_callback() is None:
            return function(*arguments, **options)
        if disabled is None:
            disabled = torch.compiler.disable(function)
        return disabled(*arguments, **options)

    return run
