"""Which implementation an op runs, and why: decided in one function per op, and open to questions.

oomph.ops.explain(oomph.ops.attention, q, k, v, causal=True)
# Choice(impl='cudnn', reason='...', settings={})
"""

import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from torch import Tensor

from oomph.errors import ArgumentError

_LOG = logging.getLogger("oomph.ops")
_announced: set[tuple[str, str, str]] = set()
ASKED_FOR = "asked for"

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Choice:
    """What will run (`impl`), the reason in one sentence, and the sizes that were picked with it."""

    impl: str
    reason: str
    settings: Mapping[str, Any] = field(default_factory=dict)


def explained_by(choose: Callable[..., Choice]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Mark an op with the function that decides for it.

    `choose` gets all of the op's arguments by name, defaults filled in, so that these stand in the op alone.
    """

    def mark(op: Callable[P, R]) -> Callable[P, R]:
        op.choose = choose  # type: ignore[attr-defined]
        return op

    return mark


def explain(op: Callable[..., Any], *arguments: Any, **options: Any) -> Choice:
    """What `op(*arguments, **options)` would run, and why. Nothing is computed."""
    choose = getattr(op, "choose", None)
    if choose is None:
        raise ArgumentError(
            f"{getattr(op, '__name__', op)!r} makes no choice to explain; give an op of oomph.ops"
        )
    call = inspect.signature(op).bind(
        *arguments, **options
    )  # a TypeError where the op itself would raise one
    call.apply_defaults()
    choice = choose(**call.arguments)
    assert isinstance(choice, Choice)
    return choice


def kernels_or_plain(
    impl: str, tensor: Tensor, obstacle: str | None, *, kernels: str, plain: str = ""
) -> Choice:
    """The usual choice: what was asked for; else kernels on CUDA unless something is in the way; else torch.

    kernels, plain: why they are chosen.
    """
    if impl == "triton" and obstacle:
        raise ArgumentError(f"impl='triton' cannot run: {obstacle}; choose 'auto' or 'chunked'")
    if impl != "auto":
        return Choice(impl, ASKED_FOR)
    if tensor.device.type != "cuda":
        where = f"the tensors are on {tensor.device.type}"
        return Choice("chunked", f"{where}: {plain}" if plain else where)
    if obstacle:
        return Choice("chunked", obstacle)
    return Choice("triton", kernels)


def announce(op: str, choice: Choice) -> Choice:
    """Log a choice (logger "oomph.ops", level INFO) the first time it is made for that reason."""
    key = (op, choice.impl, choice.reason)
    if _LOG.isEnabledFor(logging.INFO) and key not in _announced:
        _announced.add(key)
        _LOG.info("%s: %s (%s)", op, choice.impl, choice.reason)
    return choice
