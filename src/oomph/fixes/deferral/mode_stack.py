"""Modes that put calls off, and how to be without them while their own work is done."""

from __future__ import annotations

from torch._C import (
    _get_function_stack_at,
    _len_torch_function_stack,
    _pop_torch_function_stack,
    _push_on_torch_function_stack,
)
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack


class DeferringMode(TorchFunctionMode):
    """Gives objects for some calls, which stand for results that are not computed yet."""


def is_in_force(kind: type[TorchFunctionMode]) -> bool:
    return any(isinstance(mode, kind) for mode in _get_current_function_mode_stack())


class as_written:
    """Calls inside are run as they are: nothing is deferred.

    The modes that would are taken off the stack, so that they are not even asked, which can take longer than
    the call; others stay. Not a generator: that costs several times as much.
    """

    __slots__ = ("_taken",)

    def __enter__(self) -> None:
        self._taken: list[TorchFunctionMode] = []  # the lowest that defers and all above it, from the top
        count = _len_torch_function_stack()
        for at in range(count):
            if isinstance(_get_function_stack_at(at), DeferringMode):
                self._taken = [_pop_torch_function_stack() for _ in range(count - at)]
                for mode in reversed(self._taken):
                    if not isinstance(mode, DeferringMode):
                        _push_on_torch_function_stack(mode)
                return

    def __exit__(self, *_: object) -> None:
        for mode in self._taken:
            if not isinstance(mode, DeferringMode):
                _pop_torch_function_stack()
        for mode in reversed(self._taken):
            _push_on_torch_function_stack(mode)
