"""Functions that torch.compile steps around."""

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """Run `function` as it is where a program is compiled: a graph break, and the same results.

    As torch.compiler.disable, which is applied only once a program has loaded the compiler: loading it takes
    seconds, and most programs never do.
    """
    disabled: Callable[P, R] | None = None

    @functools.wraps(function)
    def run(*arguments: P.args, **options: P.kwargs) -> R:
        nonlocal disabled
        if "torch._dynamo" not in sys.modules:
            return function(*arguments, **options)
        if disabled is None:
            disabled = torch.compiler.disable(function)
        return disabled(*arguments, **options)

    return run
