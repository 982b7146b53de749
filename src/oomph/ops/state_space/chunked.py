"""The scan in plain torch on any device: the states of a few batch rows and one chunk of tokens at a time.

K tokens of a chunk, B batch rows (a slice of the batch), d channels, n state size, R directions.

Backward runs each chunk again, from the state saved at its start, and takes its gradients from autograd. The
gate is applied to each direction by itself, which is the same: y is the sum of the directions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from oomph.ops.common import state_dtype
from oomph.units import MiB


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
class Scan:
    """Sizes and options of one call."""

    directions: int
    batch: int
    length: int
    d: int
    n: int
    reverse_first: bool  # direction 0 runs from the last token to the first; direction 1 always does
    softplus: bool
    chunk: int  # tokens between two states that are saved for backward
    save_states: bool  # a backward may follow

    @property
    def chunks(self) -> int:
        return -(-self.length // self.chunk)

    def reverse(self, direction: int) -> bool:
        return direction == 1 or self.reverse_first

    def new_states(self, like: Tensor, dtype: torch.dtype) -> Tensor | None:
        """[R, B, c, d, n]: where the states at the starts of chunks are saved, if a backward may follow."""
        shape = (self.directions, self.batch, self.chunks, self.d, self.n)
        return like.new_empty(shape, dtype=dtype) if self.save_states else None


# One buffer of states [K, B, d, n]: small enough for a CPU's cache; on a GPU larger, for fewer launches.
_BUFFER_BYTES = {"cpu": 8 * MiB, "cuda": 32 * MiB}


def forward(inputs: ScanInputs, scan: Scan) -> tuple[Tensor, Tensor | None]:
    """y [B, L, d]; for backward, the initial states of chunks [R, B, c, d, n]."""
    dtype = state_dtype(*inputs)
    y_BLd = inputs.x.new_zeros(scan.batch, scan.length, scan.d)
    saved = scan.new_states(y_BLd, dtype)
    for direction, rows in _row_slices(scan, y_BLd, dtype):
        h_Bdn = y_BLd.new_zeros(rows.stop - rows.start, scan.d, scan.n, dtype=dtype)
        for index, tokens in _chunks(scan, scan.reverse(direction)):
            if saved is not None:
                saved[direction, rows, index] = h_Bdn
            parts = [None if x is None else x.to(dtype) for x in _parts(inputs, direction, rows, tokens)]
            y_BKd, h_Bdn = _scan_chunk(h_Bdn, parts, scan, scan.reverse(direction))
            y_BLd[rows, tokens] += y_BKd
    return y_BLd, saved


def backward(inputs: ScanInputs, scan: Scan, saved: Tensor, g_BLd: Tensor, wanted: ScanInputs) -> ScanInputs:
    """The wanted gradients; saved [R, B, c, d, n] from forward."""
    dtype = state_dtype(*inputs)
    # Sums over tokens are in the dtype of the states.
    grads = ScanInputs(
        *(
            torch.zeros_like(x, dtype=dtype if name in ("A", "D", "bias") else x.dtype)
            if x is not None and want
            else None
            for name, x, want in zip(ScanInputs._fields, inputs, wanted, strict=True)
        )
    )
    for direction, rows in _row_slices(scan, g_BLd, dtype):
        dh_Bdn = g_BLd.new_zeros(rows.stop - rows.start, scan.d, scan.n, dtype=dtype)
        for index, tokens in _chunks(scan, not scan.reverse(direction)):
            places = _parts(grads, direction, rows, tokens)
            parts = _parts(inputs, direction, rows, tokens)
            leaves = [
                None if x is None else x.detach().to(dtype).requires_grad_(place is not None)
                for x, place in zip(parts, places, strict=True)
            ]
            h_Bdn = saved[direction, rows, index].detach().requires_grad_()
            with torch.enable_grad():
                results = _scan_chunk(h_Bdn, leaves, scan, scan.reverse(direction))
            asked = [h_Bdn, *(leaf for leaf in leaves if leaf is not None and leaf.requires_grad)]
            dh_Bdn, *found = torch.autograd.grad(results, asked, (g_BLd[rows, tokens].to(dtype), dh_Bdn))
            for place, grad in zip([each for each in places if each is not None], found, strict=True):
                place += grad
    return ScanInputs(
        *(
            None if grad is None or x is None else grad.to(x.dtype)
            for grad, x in zip(grads, inputs, strict=True)
        )
    )


def _scan_chunk(h_Bdn: Tensor, parts: Sequence[Any], scan: Scan, reverse: bool) -> tuple[Tensor, Tensor]:
    """y [B, K, d] of one direction, and the state after the chunk; differentiable. `parts`: as ScanInputs."""
    x_BKd, delta_BKd, A_dn, B_BKn, C_BKn, D_d, z_BKd, bias_d = parts

    def time_first(tensor_BKx: Tensor) -> Tensor:
        tensor_KBx = tensor_BKx.transpose(0, 1)
        return tensor_KBx.flip(0) if reverse else tensor_KBx.contiguous()

    delta_BKd = delta_BKd if bias_d is None else delta_BKd + bias_d
    delta_KBd = time_first(F.softplus(delta_BKd) if scan.softplus else delta_BKd)
    x_KBd, B_KBn, C_KBn = map(time_first, (x_BKd, B_BKn, C_BKn))
    writes_KBdn = (delta_KBd * x_KBd).unsqueeze(-1) * B_KBn.unsqueeze(2)
    h_KBdn, last_Bdn = _Recurrence.apply((delta_KBd.unsqueeze(-1) * A_dn).exp_(), writes_KBdn, h_Bdn)
    y_KBd = (h_KBdn * C_KBn.unsqueeze(2)).sum(-1)
    y_KBd = y_KBd if D_d is None else y_KBd + D_d * x_KBd
    y_BKd = (y_KBd.flip(0) if reverse else y_KBd).transpose(0, 1)
    return y_BKd if z_BKd is None else y_BKd * F.silu(z_BKd), last_Bdn


class _Recurrence(torch.autograd.Function):
    """(all h, the last) of h_t = a_t h_{t-1} + w_t over the first dimension, from a state before it.

    Decays are multiplied, never divided: for A <= 0 all products are in [0, 1], however long the sequence.
    """

    @staticmethod
    def forward(ctx: Any, a_KBdn: Tensor, w_KBdn: Tensor, before_Bdn: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        h_KBdn, h = w_KBdn, before_Bdn  # in place
        for t in range(len(a_KBdn)):
            h = h_KBdn[t].addcmul_(a_KBdn[t], h)
        ctx.mark_dirty(h_KBdn)
        ctx.save_for_backward(a_KBdn, h_KBdn, before_Bdn)
        return h_KBdn, h.clone()

    @staticmethod
    def backward(ctx: Any, dh_KBdn: Tensor, dlast_Bdn: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        a_KBdn, h_KBdn, before_Bdn = ctx.saved_tensors
        # In place: h is used once, in a product, and nothing else holds that product's gradient.
        dh_KBdn[-1] += dlast_Bdn
        for t in range(len(a_KBdn) - 1, 0, -1):
            dh_KBdn[t - 1].addcmul_(a_KBdn[t], dh_KBdn[t])
        da_KBdn = torch.empty_like(a_KBdn)
        torch.mul(dh_KBdn[0], before_Bdn, out=da_KBdn[0])
        torch.mul(dh_KBdn[1:], h_KBdn[:-1], out=da_KBdn[1:])
        return da_KBdn, dh_KBdn, a_KBdn[0] * dh_KBdn[0]


def _parts(tensors: Any, direction: int, rows: slice, tokens: slice) -> list[Tensor | None]:
    """Views of one chunk, of the inputs or of their gradients; None where there is none."""
    x, delta, A, B, C, D, z, bias = tensors
    return [
        None if x is None else x[min(direction, x.shape[0] - 1), rows, tokens],  # x may be shared
        None if delta is None else delta[direction, rows, tokens],
        None if A is None else A[direction],
        None if B is None else B[direction, rows, tokens],
        None if C is None else C[direction, rows, tokens],
        None if D is None else D[direction],
        None if z is None else z[rows, tokens],
        None if bias is None else bias[direction],
    ]


def _row_slices(scan: Scan, like: Tensor, dtype: torch.dtype) -> Iterator[tuple[int, slice]]:
    """Directions and slices of the batch."""
    row_bytes = min(scan.chunk, scan.length) * scan.d * scan.n * dtype.itemsize
    limit = _BUFFER_BYTES["cuda" if like.device.type == "cuda" else "cpu"]
    step = max(1, limit // max(1, row_bytes))
    for start in range(0, scan.batch, step):
        for direction in range(scan.directions):
            yield direction, slice(start, min(start + step, scan.batch))


def _chunks(scan: Scan, reverse: bool) -> Iterator[tuple[int, slice]]:
    order = range(scan.chunks)
    for index in reversed(order) if reverse else order:
        start = index * scan.chunk
        yield index, slice(start, min(start + scan.chunk, scan.length))
