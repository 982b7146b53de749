"""How an optimizer's state is kept: as float32, as bfloat16, or in blocks of 8-bit codes."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from oomph.fixes.optimizers import blocks

State = dict[str, Any]
_SMALL = 4096  # numbers: smaller tensors keep float32, since 8 bits would save nothing that matters


class Float32:
    name: ClassVar[str] = "float32"

    def make(self, state: State, key: str, parameter: Tensor) -> None:
        state[key] = torch.zeros_like(parameter, dtype=self.dtype, memory_format=torch.preserve_format)

    dtype: ClassVar[torch.dtype] = torch.float32

    def read(self, state: State, key: str, start: int, stop: int, table: Tensor | None) -> Tensor:
        """These numbers as float32, flat: the state itself where it is float32."""
        return flat(state[key])[start:stop].float()

    def write(
        self, state: State, key: str, start: int, stop: int, number: Tensor, table: Tensor | None
    ) -> None:
        """`number` is what `read` gave, changed in place."""


class BFloat16(Float32):
    name = "bfloat16"
    dtype = torch.bfloat16

    def write(
        self, state: State, key: str, start: int, stop: int, number: Tensor, table: Tensor | None
    ) -> None:
        # To the nearest, an average of many steps would stand still: a change of a thousandth is rounded off.
        round_stochastically(number, flat(state[key])[start:stop])


class Blocks8(Float32):
    name = "8bit"

    def make(self, state: State, key: str, parameter: Tensor) -> None:
        if parameter.numel() < _SMALL:
            return super().make(state, key, parameter)
        state[key] = torch.zeros_like(parameter, dtype=torch.uint8, memory_format=torch.preserve_format)
        count = -(-parameter.numel() // blocks.BLOCK)
        # Zero whatever the codes say, and the first codes are written by the first step.
        state[f"{key}_scale"] = torch.zeros(count, dtype=torch.float32, device=parameter.device)
        return None

    def read(self, state: State, key: str, start: int, stop: int, table: Tensor | None) -> Tensor:
        if state[key].dtype is not torch.uint8:
            return super().read(state, key, start, stop, table)
        assert table is not None
        codes, scales = self._part(state, key, start, stop)
        return blocks.decoded(codes, scales, table, signed=_is_signed(key))

    def write(
        self, state: State, key: str, start: int, stop: int, number: Tensor, table: Tensor | None
    ) -> None:
        if state[key].dtype is torch.uint8:
            assert table is not None
            codes, scales = self._part(state, key, start, stop)
            blocks.encode(number, codes, scales, table, signed=_is_signed(key))

    def _part(self, state: State, key: str, start: int, stop: int) -> tuple[Tensor, Tensor]:
        scales = state[f"{key}_scale"][start // blocks.BLOCK : -(-stop // blocks.BLOCK)]
        return flat(state[key])[start:stop], scales


FORMATS: dict[str, Float32] = {kind.name: kind() for kind in (Float32, BFloat16, Blocks8)}


def _is_signed(key: str) -> bool:
    return key != "exp_avg_sq"


def flat(tensor: Tensor) -> Tensor:
    """Its numbers in the order of memory, as a view."""
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def round_stochastically(number: Tensor, out: Tensor) -> None:
    """Write float32 numbers as bfloat16: to one of the two neighbours, on average to the number itself.

    The chance to go up is the part that is cut off. What is not a number stays so.
    """
    drawn = torch.randint(0, 1 << 16, number.shape, dtype=torch.int32, device=number.device)
    drawn.add_(number.view(torch.int32)).bitwise_and_(-(1 << 16))
    out.copy_(torch.where(number.isnan(), number, drawn.view(torch.float32)))
