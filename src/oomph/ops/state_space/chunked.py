"""The scan in plain torch on any device: the states of a few rows and one chunk of tokens at a time.

Legend: K tokens of a chunk, B rows (of a slice of the batch), d channels, n state numbers, R directions.

    a_t = exp(delta_t A)      h_t = a_t h_{t-1} + delta_t x_t B_t      y_t = C_t . h_t + D x_t
    dh_t = C_t g_t + a_{t+1} dh_{t+1}, and with w_t = dh_t * (a_t h_{t-1}):
    ddelta_t = x_t (B_t . dh_t) + A . w_t      dx_t = delta_t (B_t . dh_t) + D g_t
    dA = sum of delta_t w_t        dB_t = sum over d of delta_t x_t dh_t     dC_t = sum over d of g_t h_t

Only products of decays are made, never a quotient: for A <= 0 all are in [0, 1], however long the sequence.

Buffers of K + 1 entries hold the decays and the states of a chunk with what lies beyond one end, so that
"this token's" and "the previous token's" are two views of one buffer, in either direction. Rightward:
    states  [entering, h_0, ... h_K-1]        decays  [a_0, ... a_K-1, 1]
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from oomph.ops.state_space.problem import (
    Gradients,
    Inputs,
    Options,
    Sizes,
    Wanted,
    cast,
    of_way,
    state_dtype,
)
from oomph.units import KiB, MiB

# One buffer of states [K, B, d, n]. Small enough for a CPU's cache to help; on a GPU each operation costs a
# launch, so fewer and larger ones are better.
BUFFER_BYTES = {"cpu": 8 * MiB, "cuda": 32 * MiB}
# Below this size of one token's states [B, d, n], an operation costs more to start than to run.
_SMALL_STEP = 32 * KiB
_LANES = 8


def forward(inputs: Inputs, options: Options) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """y [B, L, d]; if asked for, final states [R, B, d, n] and those that enter chunks [R, B, c, d, n]."""
    sizes, wide = Sizes.of(inputs, options), state_dtype(*inputs)
    x, new = inputs.x_RBLd, inputs.x_RBLd.new_empty
    y_BLd = new(sizes.batch, sizes.length, sizes.d)
    state = (sizes.d, sizes.n)
    final = new(sizes.ways, sizes.batch, *state, dtype=wide) if options.keep_final else None
    kept = new(sizes.ways, sizes.batch, sizes.chunks, *state, dtype=wide) if options.keep_states else None
    rows = _rows(sizes, options, x, wide)
    longest = min(options.chunk, sizes.length)
    decays, states = new(2, longest, min(rows, sizes.batch), *state, dtype=wide)
    for some in _slices(sizes.batch, rows):
        for way in range(sizes.ways):
            A_dn, D_d = inputs.A_Rdn[way].to(wide), cast(of_way(inputs.D_Rd, way), wide)
            h_Bdn = _entering(inputs.initial_RBdn, way, some, sizes, x, wide)
            leftward = options.leftward(way)
            for index, tokens in _chunks(sizes, options, leftward):
                if kept is not None:
                    kept[way, some, index] = h_Bdn
                chunk = _read(inputs, options, way, some, tokens, wide)
                count, batch = chunk.delta_KBd.shape[:2]
                a_KBdn, h_KBdn = decays[:count, :batch], states[:count, :batch]
                _make_decays(chunk, A_dn, a_KBdn)
                _make_writes(chunk, h_KBdn)
                h_Bdn = _scan(a_KBdn, h_KBdn, h_Bdn, leftward).clone()
                y_KBd = torch.mul(h_KBdn, chunk.C_KBn.unsqueeze(2), out=a_KBdn).sum(dim=-1)
                if D_d is not None:
                    y_KBd.addcmul_(D_d, chunk.x_KBd)
                place = y_BLd[some, tokens].transpose(0, 1)
                if way > 0:
                    y_KBd += place
                if inputs.z_BLd is not None and way == sizes.ways - 1:
                    y_KBd *= F.silu(_time_first(inputs.z_BLd, some, tokens, wide))
                place.copy_(y_KBd)
            if final is not None:
                final[way, some] = h_Bdn
    return y_BLd, final, kept


def backward(
    inputs: Inputs, options: Options, kept: Tensor, g_BLd: Tensor, g_final: Tensor | None, wanted: Wanted
) -> Gradients:
    """The gradients that are wanted; kept [R, B, c, d, n] from forward."""
    sizes, wide = Sizes.of(inputs, options), state_dtype(*inputs)
    x, state = inputs.x_RBLd, (sizes.d, sizes.n)
    made = _empty_gradients(inputs, wanted, sizes, wide)
    rows = _rows(sizes, options, x, wide)
    buffers = x.new_empty(3, min(options.chunk, sizes.length) + 1, min(rows, sizes.batch), *state, dtype=wide)
    for some in _slices(sizes.batch, rows):
        for way in range(sizes.ways):
            dh_Bdn = _entering(g_final, way, some, sizes, x, wide)
            leftward = options.leftward(way)
            for index, tokens in _chunks(sizes, options, not leftward):
                chunk = _read(inputs, options, way, some, tokens, wide)
                spare = buffers[:, : chunk.delta_KBd.shape[0] + 1, : chunk.delta_KBd.shape[1]]
                place = _Place(way, some, tokens, leftward)
                h_Bdn = kept[way, some, index]
                dh_Bdn = _chunk_backward(inputs, options, chunk, place, h_Bdn, dh_Bdn, g_BLd, made, spare)
            if made.initial is not None:
                made.initial[way, some] = dh_Bdn
    return Gradients(
        *(
            None if each is None or tensor is None else each.to(tensor.dtype)
            for each, tensor in zip(made, inputs, strict=True)
        )
    )


@dataclass(frozen=True)
class _Chunk:
    raw_KBd: Tensor  # delta and its bias, before the softplus
    delta_KBd: Tensor
    x_KBd: Tensor
    B_KBn: Tensor
    C_KBn: Tensor


@dataclass(frozen=True)
class _Place:
    way: int
    rows: slice
    tokens: slice
    leftward: bool


def _chunk_backward(
    inputs: Inputs,
    options: Options,
    chunk: _Chunk,
    place: _Place,
    h_Bdn: Tensor,
    dh_Bdn: Tensor,
    g_BLd: Tensor,
    made: Gradients,
    spare: Tensor,
) -> Tensor:
    """Add one chunk to the gradients. dh_Bdn comes from the tokens after it; returned for those before."""
    way, some, tokens, leftward = place.way, place.rows, place.tokens, place.leftward
    wide = chunk.x_KBd.dtype
    A_dn, D_d = inputs.A_Rdn[way].to(wide), cast(of_way(inputs.D_Rd, way), wide)
    decays, states, dh_KBdn = spare[0], spare[1], spare[2, :-1]
    a_KBdn, following = _entry_side(decays, leftward), _exit_side(decays, leftward)
    before, h_KBdn = _entry_side(states, leftward), _exit_side(states, leftward)

    first, last = (-1, 0) if leftward else (0, -1)
    decays[last] = 1
    states[first] = h_Bdn
    _make_decays(chunk, A_dn, a_KBdn)
    _make_writes(chunk, h_KBdn)
    _scan(a_KBdn, h_KBdn, h_Bdn, leftward)

    g_KBd = _time_first(g_BLd, some, tokens, wide)
    if inputs.z_BLd is not None:
        z_KBd = _time_first(inputs.z_BLd, some, tokens, wide)
        if made.z is not None:
            y_KBd = torch.mul(h_KBdn, chunk.C_KBn.unsqueeze(2), out=dh_KBdn).sum(dim=-1)
            if D_d is not None:
                y_KBd.addcmul_(D_d, chunk.x_KBd)
            sigma = torch.sigmoid(z_KBd)
            slope = sigma * (1 + z_KBd * (1 - sigma))
            _put(made.z, some, tokens, g_KBd * slope * y_KBd, add=way > 0)
        g_KBd = g_KBd * F.silu(z_KBd)
    if made.C is not None:
        product = torch.mul(h_KBdn, g_KBd.unsqueeze(-1), out=dh_KBdn)  # dh is made there next
        _put(made.C[way], some, tokens, product.sum(dim=2))

    torch.mul(g_KBd.unsqueeze(-1), chunk.C_KBn.unsqueeze(2), out=dh_KBdn)
    _scan(following, dh_KBdn, dh_Bdn, not leftward)
    leaving = a_KBdn[first] * dh_KBdn[first]
    if made.D is not None:
        made.D[way] += (g_KBd * chunk.x_KBd).sum(dim=(0, 1))

    w_KBdn = a_KBdn.mul_(before).mul_(dh_KBdn)
    product = h_KBdn  # free by now
    if made.B is not None:
        torch.mul(dh_KBdn, (chunk.delta_KBd * chunk.x_KBd).unsqueeze(-1), out=product)
        _put(made.B[way], some, tokens, product.sum(dim=2))
    dh_B_KBd = torch.mul(dh_KBdn, chunk.B_KBn.unsqueeze(2), out=product).sum(dim=-1)
    if made.x is not None:
        dx_KBd = chunk.delta_KBd * dh_B_KBd
        if D_d is not None:
            dx_KBd.addcmul_(D_d, g_KBd)
        shared = made.x.shape[0] == 1
        _put(made.x[0 if shared else way], some, tokens, dx_KBd, add=shared and way > 0)
    if made.A is not None:
        made.A[way] += torch.mul(w_KBdn, chunk.delta_KBd.unsqueeze(-1), out=product).sum(dim=(0, 1))
    if made.delta is not None or made.bias is not None:
        ddelta_KBd = w_KBdn.mul_(A_dn).sum(dim=-1).addcmul_(chunk.x_KBd, dh_B_KBd)
        if options.softplus:
            ddelta_KBd *= torch.sigmoid(chunk.raw_KBd)
        if made.delta is not None:
            _put(made.delta[way], some, tokens, ddelta_KBd)
        if made.bias is not None:
            made.bias[way] += ddelta_KBd.sum(dim=(0, 1))
    return leaving


def _scan(decays_KBdn: Tensor, values_KBdn: Tensor, entering_Bdn: Tensor, leftward: bool) -> Tensor:
    """values_t += decays_t * (the value of the token visited before), in place; returns the last visited."""
    count = len(values_KBdn)
    step_bytes = entering_Bdn.numel() * entering_Bdn.element_size()
    if count % _LANES or count == _LANES or step_bytes > _SMALL_STEP:
        state = entering_Bdn
        for t in _visits(count, leftward):
            state = values_KBdn[t].addcmul_(decays_KBdn[t], state)
        return state
    # Small: all lanes of count / _LANES tokens step together, then the lanes' results are linked.
    lanes = values_KBdn.unflatten(0, (_LANES, -1))
    products = decays_KBdn.clone().unflatten(0, (_LANES, -1))
    for before, now in pairwise(_visits(lanes.shape[1], leftward)):
        lanes[:, now].addcmul_(products[:, now], lanes[:, before])
        products[:, now].mul_(products[:, before])
    state = entering_Bdn
    for lane in _visits(_LANES, leftward):
        state = lanes[lane].addcmul_(products[lane], state)[0 if leftward else -1]
    return state


def _visits(count: int, leftward: bool) -> range:
    return range(count - 1, -1, -1) if leftward else range(count)


def _entry_side(buffer: Tensor, leftward: bool) -> Tensor:
    return buffer[1:] if leftward else buffer[:-1]


def _exit_side(buffer: Tensor, leftward: bool) -> Tensor:
    return buffer[:-1] if leftward else buffer[1:]


def _make_decays(chunk: _Chunk, A_dn: Tensor, out_KBdn: Tensor) -> None:
    torch.mul(chunk.delta_KBd.unsqueeze(-1), A_dn, out=out_KBdn).exp_()


def _make_writes(chunk: _Chunk, out_KBdn: Tensor) -> None:
    torch.mul((chunk.delta_KBd * chunk.x_KBd).unsqueeze(-1), chunk.B_KBn.unsqueeze(2), out=out_KBdn)


def _read(
    inputs: Inputs, options: Options, way: int, some: slice, tokens: slice, wide: torch.dtype
) -> _Chunk:
    x_BLd = inputs.x_RBLd[min(way, inputs.x_RBLd.shape[0] - 1)]
    raw_KBd = _time_first(inputs.delta_RBLd[way], some, tokens, wide)
    if inputs.bias_Rd is not None:
        raw_KBd = raw_KBd + inputs.bias_Rd[way].to(wide)
    return _Chunk(
        raw_KBd,
        F.softplus(raw_KBd) if options.softplus else raw_KBd,
        _time_first(x_BLd, some, tokens, wide),
        _time_first(inputs.B_RBLn[way], some, tokens, wide),
        _time_first(inputs.C_RBLn[way], some, tokens, wide),
    )


def _time_first(tensor_BLx: Tensor, some: slice, tokens: slice, wide: torch.dtype) -> Tensor:
    return tensor_BLx[some, tokens].transpose(0, 1).to(wide)


def _put(gradient_BLx: Tensor, some: slice, tokens: slice, part_KBx: Tensor, add: bool = False) -> None:
    place = gradient_BLx[some, tokens].transpose(0, 1)
    if add:
        part_KBx = part_KBx + place
    place.copy_(part_KBx)


def _entering(
    given_RBdn: Tensor | None, way: int, some: slice, sizes: Sizes, like: Tensor, wide: torch.dtype
) -> Tensor:
    if given_RBdn is not None:
        return given_RBdn[way, some].to(wide)
    return like.new_zeros(some.stop - some.start, sizes.d, sizes.n, dtype=wide)


def _empty_gradients(inputs: Inputs, wanted: Wanted, sizes: Sizes, wide: torch.dtype) -> Gradients:
    """Room for what is wanted. What is summed over tokens is summed in the wide dtype, from zero."""

    def room(name: str, tensor: Tensor | None, summed: bool) -> Tensor | None:
        if tensor is None or not getattr(wanted, name):
            return None
        return torch.zeros_like(tensor, dtype=wide) if summed else torch.empty_like(tensor)

    summed = {"A", "D", "bias"}
    return Gradients(
        *(room(name, tensor, name in summed) for name, tensor in zip(Gradients._fields, inputs, strict=True))
    )


def _rows(sizes: Sizes, options: Options, like: Tensor, wide: torch.dtype) -> int:
    """How many rows of the batch are scanned at a time."""
    each = min(options.chunk, sizes.length) * sizes.d * sizes.n * wide.itemsize
    limit = BUFFER_BYTES["cuda" if like.device.type == "cuda" else "cpu"]
    return max(1, limit // max(1, each))


def _slices(size: int, step: int) -> Iterator[slice]:
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))


def _chunks(sizes: Sizes, options: Options, leftward: bool) -> Iterator[tuple[int, slice]]:
    for index in _visits(sizes.chunks, leftward):
        start = index * options.chunk
        yield index, slice(start, min(start + options.chunk, sizes.length))
