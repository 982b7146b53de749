"""The scan in plain torch on any device: the states of a few batch rows and one chunk of tokens at a time.

K tokens of a chunk, B batch rows (a slice of the batch), d channels, n state size, R directions.

    a_t = exp(delta_t A)      h_t = a_t h_{t-1} + delta_t x_t B_t      y_t = C_t . h_t + D x_t
    dh_t = C_t g_t + a_{t+1} dh_{t+1}, and with w_t = dh_t * (a_t h_{t-1}):
    ddelta_t = x_t (B_t . dh_t) + A . w_t      dx_t = delta_t (B_t . dh_t) + D g_t
    dA = sum of delta_t w_t        dB_t = sum over d of delta_t x_t dh_t     dC_t = sum over d of g_t h_t

Decays are multiplied, never divided: for A <= 0 all products are in [0, 1], however long the sequence.

Backward's buffers have K + 1 entries: the decays and states of a chunk and the one beyond its end, so that
the current and the previous token are two views of one buffer. In the forward direction:
    states  [initial, h_0, ... h_K-1]        decays  [a_0, ... a_K-1, 1]
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from oomph.ops.state_space.arguments import PerInput, ScanInputs, ScanOptions, ScanSizes, state_dtype
from oomph.units import MiB

# One buffer of states [K, B, d, n]: small enough for a CPU's cache; on a GPU larger, for fewer launches.
_BUFFER_BYTES = {"cpu": 8 * MiB, "cuda": 32 * MiB}
_NAMES = PerInput._fields


@dataclass(frozen=True)
class _Chunk:
    """Where a chunk is, and its inputs with time first, in the dtype of the states."""

    direction: int
    rows: slice
    tokens: slice
    reverse: bool
    raw_delta_KBd: Tensor  # before the softplus
    delta_KBd: Tensor
    x_KBd: Tensor
    B_KBn: Tensor
    C_KBn: Tensor
    A_dn: Tensor
    D_d: Tensor | None

    def compute_decays(self, out_KBdn: Tensor) -> None:
        torch.mul(self.delta_KBd.unsqueeze(-1), self.A_dn, out=out_KBdn).exp_()

    def compute_writes(self, out_KBdn: Tensor) -> None:
        torch.mul((self.delta_KBd * self.x_KBd).unsqueeze(-1), self.B_KBn.unsqueeze(2), out=out_KBdn)

    def compute_y(self, h_KBdn: Tensor, out_KBdn: Tensor) -> Tensor:
        y_KBd = torch.mul(h_KBdn, self.C_KBn.unsqueeze(2), out=out_KBdn).sum(dim=-1)
        return y_KBd if self.D_d is None else y_KBd.addcmul_(self.D_d, self.x_KBd)

    def take(self, tensor_BLx: Tensor) -> Tensor:
        return tensor_BLx[self.rows, self.tokens].transpose(0, 1).to(self.x_KBd.dtype)

    def store(self, out_BLx: Tensor, part_KBx: Tensor, add: bool = False) -> None:
        view = out_BLx[self.rows, self.tokens].transpose(0, 1)
        view.copy_(part_KBx + view if add else part_KBx)


def forward(inputs: ScanInputs, options: ScanOptions) -> tuple[Tensor, Tensor | None]:
    """y [B, L, d]; for backward, the initial states of chunks [R, B, c, d, n]."""
    sizes, dtype = ScanSizes.of(inputs, options), state_dtype(*inputs)
    new, state = inputs.x_RBLd.new_empty, (sizes.d, sizes.n)
    y_BLd = new(sizes.batch, sizes.length, sizes.d)
    saved = None
    if options.save_states:
        saved = new(sizes.directions, sizes.batch, sizes.chunks, *state, dtype=dtype)
    rows_at_a_time = _rows_at_a_time(sizes, options, y_BLd, dtype)
    longest = min(options.chunk, sizes.length)
    decays, states = new(2, longest, min(rows_at_a_time, sizes.batch), *state, dtype=dtype)
    for rows in _slices(sizes.batch, rows_at_a_time):
        for direction in range(sizes.directions):
            h_Bdn = new(rows.stop - rows.start, *state, dtype=dtype).zero_()
            reverse = options.reverse(direction)
            for index, tokens in _chunks(sizes, options, reverse):
                if saved is not None:
                    saved[direction, rows, index] = h_Bdn
                chunk = _read(inputs, options, direction, rows, tokens, dtype)
                count, batch = chunk.delta_KBd.shape[:2]
                a_KBdn, h_KBdn = decays[:count, :batch], states[:count, :batch]
                chunk.compute_decays(a_KBdn)
                chunk.compute_writes(h_KBdn)
                h_Bdn = _scan(a_KBdn, h_KBdn, h_Bdn, reverse).clone()
                y_KBd = chunk.compute_y(h_KBdn, a_KBdn)
                if direction > 0:
                    y_KBd += y_BLd[rows, tokens].transpose(0, 1)
                if inputs.z_BLd is not None and direction == sizes.directions - 1:
                    y_KBd *= F.silu(chunk.take(inputs.z_BLd))
                chunk.store(y_BLd, y_KBd)
    return y_BLd, saved


def backward(
    inputs: ScanInputs, options: ScanOptions, saved: Tensor, g_BLd: Tensor, wanted: PerInput[bool]
) -> PerInput[Tensor | None]:
    """The wanted gradients; saved [R, B, c, d, n] from forward."""
    sizes, dtype = ScanSizes.of(inputs, options), state_dtype(*inputs)
    grads = _empty_gradients(inputs, wanted, dtype)
    rows_at_a_time = _rows_at_a_time(sizes, options, g_BLd, dtype)
    shape = (min(options.chunk, sizes.length) + 1, min(rows_at_a_time, sizes.batch), sizes.d, sizes.n)
    buffers = inputs.x_RBLd.new_empty(3, *shape, dtype=dtype)
    for rows in _slices(sizes.batch, rows_at_a_time):
        for direction in range(sizes.directions):
            dh_Bdn = g_BLd.new_zeros(rows.stop - rows.start, sizes.d, sizes.n, dtype=dtype)
            for index, tokens in _chunks(sizes, options, not options.reverse(direction)):
                chunk = _read(inputs, options, direction, rows, tokens, dtype)
                count, batch = chunk.delta_KBd.shape[:2]
                h_Bdn = saved[direction, rows, index]
                g_KBd, z_KBd = chunk.take(g_BLd), None if inputs.z_BLd is None else chunk.take(inputs.z_BLd)
                dh_Bdn = _chunk_backward(
                    chunk, options, h_Bdn, dh_Bdn, g_KBd, z_KBd, grads, buffers[:, : count + 1, :batch]
                )
    return PerInput(
        *(
            None if grad is None or tensor is None else grad.to(tensor.dtype)
            for grad, tensor in zip(grads, inputs, strict=True)
        )
    )


def _chunk_backward(
    chunk: _Chunk,
    options: ScanOptions,
    h_Bdn: Tensor,
    dh_Bdn: Tensor,
    g_KBd: Tensor,
    z_KBd: Tensor | None,
    grads: PerInput[Tensor | None],
    buffers: Tensor,
) -> Tensor:
    """Add one chunk to the gradients. Takes dh of its final state, returns dh of its initial state."""
    direction, reverse = chunk.direction, chunk.reverse
    decays, states, dh_KBdn = buffers[0], buffers[1], buffers[2, :-1]
    current, following = (slice(1, None), slice(None, -1)) if reverse else (slice(None, -1), slice(1, None))
    first, last = (-1, 0) if reverse else (0, -1)
    a_KBdn, a_next_KBdn = decays[current], decays[following]
    h_before_KBdn, h_KBdn = states[current], states[following]
    decays[last] = 1
    states[first] = h_Bdn
    chunk.compute_decays(a_KBdn)
    chunk.compute_writes(h_KBdn)
    _scan(a_KBdn, h_KBdn, h_Bdn, reverse)

    if z_KBd is not None:
        if grads.z is not None:
            y_KBd = chunk.compute_y(h_KBdn, dh_KBdn)
            sigma = torch.sigmoid(z_KBd)
            slope = sigma * (1 + z_KBd * (1 - sigma))
            chunk.store(grads.z, g_KBd * slope * y_KBd, add=direction > 0)
        g_KBd = g_KBd * F.silu(z_KBd)
    if grads.C is not None:
        product = torch.mul(h_KBdn, g_KBd.unsqueeze(-1), out=dh_KBdn)  # a temporary: dh is computed next
        chunk.store(grads.C[direction], product.sum(dim=2))

    torch.mul(g_KBd.unsqueeze(-1), chunk.C_KBn.unsqueeze(2), out=dh_KBdn)
    _scan(a_next_KBdn, dh_KBdn, dh_Bdn, not reverse)
    dh_initial_Bdn = a_KBdn[first] * dh_KBdn[first]
    if grads.D is not None:
        grads.D[direction] += (g_KBd * chunk.x_KBd).sum(dim=(0, 1))

    w_KBdn = a_KBdn.mul_(h_before_KBdn).mul_(dh_KBdn)
    product = h_KBdn  # reused as a temporary
    if grads.B is not None:
        torch.mul(dh_KBdn, (chunk.delta_KBd * chunk.x_KBd).unsqueeze(-1), out=product)
        chunk.store(grads.B[direction], product.sum(dim=2))
    dh_B_KBd = torch.mul(dh_KBdn, chunk.B_KBn.unsqueeze(2), out=product).sum(dim=-1)
    if grads.x is not None:
        dx_KBd = chunk.delta_KBd * dh_B_KBd
        if chunk.D_d is not None:
            dx_KBd.addcmul_(chunk.D_d, g_KBd)
        shared = grads.x.shape[0] == 1
        chunk.store(grads.x[0 if shared else direction], dx_KBd, add=shared and direction > 0)
    if grads.A is not None:
        grads.A[direction] += torch.mul(w_KBdn, chunk.delta_KBd.unsqueeze(-1), out=product).sum(dim=(0, 1))
    if grads.delta is not None or grads.bias is not None:
        ddelta_KBd = w_KBdn.mul_(chunk.A_dn).sum(dim=-1).addcmul_(chunk.x_KBd, dh_B_KBd)
        if options.softplus:
            ddelta_KBd *= torch.sigmoid(chunk.raw_delta_KBd)
        if grads.delta is not None:
            chunk.store(grads.delta[direction], ddelta_KBd)
        if grads.bias is not None:
            grads.bias[direction] += ddelta_KBd.sum(dim=(0, 1))
    return dh_initial_Bdn


def _scan(decays_KBdn: Tensor, values_KBdn: Tensor, initial_Bdn: Tensor, reverse: bool) -> Tensor:
    """values_t += decays_t * (the value of the token before it in scan order), in place; returns the last."""
    state = initial_Bdn
    for t in _order(len(values_KBdn), reverse):
        state = values_KBdn[t].addcmul_(decays_KBdn[t], state)
    return state


def _order(count: int, reverse: bool) -> range:
    return range(count - 1, -1, -1) if reverse else range(count)


def _read(
    inputs: ScanInputs, options: ScanOptions, direction: int, rows: slice, tokens: slice, dtype: torch.dtype
) -> _Chunk:
    def time_first(tensor_RBLx: Tensor) -> Tensor:
        tensor_BLx = tensor_RBLx[min(direction, tensor_RBLx.shape[0] - 1)]  # x may be shared
        return tensor_BLx[rows, tokens].transpose(0, 1).to(dtype)

    raw_delta_KBd = time_first(inputs.delta_RBLd)
    if inputs.bias_Rd is not None:
        raw_delta_KBd = raw_delta_KBd + inputs.bias_Rd[direction].to(dtype)
    return _Chunk(
        direction,
        rows,
        tokens,
        options.reverse(direction),
        raw_delta_KBd,
        F.softplus(raw_delta_KBd) if options.softplus else raw_delta_KBd,
        time_first(inputs.x_RBLd),
        time_first(inputs.B_RBLn),
        time_first(inputs.C_RBLn),
        inputs.A_Rdn[direction].to(dtype),
        None if inputs.D_Rd is None else inputs.D_Rd[direction].to(dtype),
    )


def _empty_gradients(
    inputs: ScanInputs, wanted: PerInput[bool], dtype: torch.dtype
) -> PerInput[Tensor | None]:
    """Sums over tokens start at zero, in the dtype of the states."""
    grads: dict[str, Tensor | None] = dict.fromkeys(_NAMES)
    for name, tensor, want in zip(_NAMES, inputs, wanted, strict=True):
        if tensor is not None and want:
            is_sum = name in ("A", "D", "bias")
            grads[name] = torch.zeros_like(tensor, dtype=dtype) if is_sum else torch.empty_like(tensor)
    return PerInput(**grads)


def _rows_at_a_time(sizes: ScanSizes, options: ScanOptions, like: Tensor, dtype: torch.dtype) -> int:
    row_bytes = min(options.chunk, sizes.length) * sizes.d * sizes.n * dtype.itemsize
    limit = _BUFFER_BYTES["cuda" if like.device.type == "cuda" else "cpu"]
    return max(1, limit // max(1, row_bytes))


def _slices(size: int, step: int) -> Iterator[slice]:
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))


def _chunks(sizes: ScanSizes, options: ScanOptions, reverse: bool) -> Iterator[tuple[int, slice]]:
    for index in _order(sizes.chunks, reverse):
        start = index * options.chunk
        yield index, slice(start, min(start + options.chunk, sizes.length))
