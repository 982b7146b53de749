"""The arguments of selective_scan, checked, and the one form in which both implementations take them.

R directions (1 or 2), B batch, L tokens, d channels, n state size per channel.
"""

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from oomph.errors import ArgumentError
from oomph.ops import common

DIRECTIONS = ("forward", "backward", "both")
IMPLS = ("auto", "reference", "chunked", "triton")


class ScanInputs(NamedTuple):
    """The tensors with a leading dimension of directions. Also their gradients, and whether these are wanted.

    x [R, B, L, d] ([1, B, L, d] where both directions share it), delta [R, B, L, d], A [R, d, n], B and C
    [R, B, L, n], D and bias [R, d]; z [B, L, d] gates the sum of the directions. D, z and bias may be None.
    """

    x: Any
    delta: Any
    A: Any
    B: Any
    C: Any
    D: Any
    z: Any
    bias: Any


@dataclass(frozen=True)
class ScanOptions:
    reverse_first: bool  # direction 0 runs from the last token to the first; direction 1 always does
    softplus: bool
    chunk: int  # tokens between two states that are saved for backward
    save_states: bool  # a backward may follow

    def reverse(self, direction: int) -> bool:
        return direction == 1 or self.reverse_first


@dataclass(frozen=True)
class ScanSizes:
    directions: int
    batch: int
    length: int
    d: int
    n: int
    chunks: int

    @staticmethod
    def of(inputs: ScanInputs, options: ScanOptions) -> "ScanSizes":
        directions, batch, length, d = inputs.delta.shape
        return ScanSizes(directions, batch, length, d, inputs.A.shape[2], -(-length // options.chunk))


@dataclass(frozen=True, eq=False)
class ScanArguments:
    """A call of selective_scan as given."""

    x: Tensor
    delta: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    z: Tensor | None
    delta_bias: Tensor | None
    delta_softplus: bool
    direction: str
    chunk_size: int | None
    impl: str

    @property
    def tensors(self) -> dict[str, Tensor | None]:
        return {field.name: getattr(self, field.name) for field in fields(self)[:8]}

    @property
    def state_dtype(self) -> torch.dtype:
        return state_dtype(*self.tensors.values())

    def inputs(self) -> ScanInputs:
        """With a leading dimension of directions; z has none."""
        both = self.direction == "both"
        named = self.tensors | {"x": self.x if self.x.dim() == 4 else self.x.unsqueeze(0)}
        given = {
            name: each if both or each is None or name in ("x", "z") else each.unsqueeze(0)
            for name, each in named.items()
        }
        return ScanInputs(*given.values())

    def check(self) -> None:
        """Values are not checked, because that would synchronise."""
        common.check_one_of("impl", self.impl, IMPLS)
        common.check_one_of("direction", self.direction, DIRECTIONS)
        common.check_flags(delta_softplus=self.delta_softplus)
        common.check_whole_if_given(chunk_size=self.chunk_size)
        tensors = self.tensors
        common.check_floating(**{name: tensors[name] for name in ("x", "delta", "A", "B", "C")})  # type: ignore[arg-type]
        common.check_floating_if_given(**tensors)
        common.check_same_device(**tensors)
        self._check_shapes()

    def _check_shapes(self) -> None:
        x, A, direction = self.x, self.A, self.direction
        pair = [2] if direction == "both" else []
        if x.dim() != 3 and not (pair and x.dim() == 4 and x.shape[0] == 2):
            valid = "[B, L, d], or [2, B, L, d] with one x per direction" if pair else "[B, L, d]"
            raise ArgumentError(f"x has shape {list(x.shape)}; valid for direction={direction!r}: {valid}")
        if A.dim() != 2 + len(pair) or A.shape[-1] == 0:
            raise ArgumentError(
                f"A has shape {list(A.shape)}; valid for direction={direction!r}: "
                f"[{'2, ' if pair else ''}d, n] with n >= 1"
            )
        batch, length, d = x.shape[-3:]
        n = A.shape[-1]
        expected = {
            "delta": [*pair, batch, length, d],
            "A": [*pair, d, n],
            "B": [*pair, batch, length, n],
            "C": [*pair, batch, length, n],
            "D": [*pair, d],
            "z": [batch, length, d],
            "delta_bias": [*pair, d],
        }
        for name, shape in expected.items():
            tensor = self.tensors[name]
            if tensor is not None and list(tensor.shape) != shape:
                raise ArgumentError(
                    f"{name} has shape {list(tensor.shape)}; valid for x {list(x.shape)}, n={n} and "
                    f"direction={direction!r}: {shape}"
                )


def state_dtype(*tensors: Tensor | None) -> torch.dtype:
    """float64 if any input is; else float32."""
    is_double = any(each is not None and each.dtype == torch.float64 for each in tensors)
    return torch.float64 if is_double else torch.float32
