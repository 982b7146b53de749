"""The autograd function of KDA over Triton kernels, and their launches.

One segment of tokens is processed after the other. Saved for backward: the inputs, and the states at the
starts of segments. Backward recomputes everything else, from the last segment to the first, so that the
memory of a call is that of one segment whatever the length.

Chunks have 32 tokens, so that the products of a chunk run on the tensor core instructions for single warps.
With 64 tokens Triton uses Hopper's instructions for groups of warps, and versions 3.4 to 3.7 compile kernels
like these wrongly (3.6 on an H200: these kernels with 64 tokens, right in the interpreter, gave wrong results
or illegal accesses, depending on the number of warps).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oomph.ops.common import (
    Kernels,
    OpFunction,
    cdiv,
    contiguous_rows,
    interpreted,
    power_of_two,
    refuse_second_derivatives,
)
from oomph.ops.delta_attention.chunked import MemoryCosts
from oomph.units import KiB

_KERNELS = Kernels("oomph.ops.delta_attention.kernels")

CHUNK = 32  # tokens
# With fewer chunk programs per launch, a GPU of 132 multiprocessors is not fully used.
_PROGRAMS = 1024
# By default. Scratch memory is then about a third of the size of the gradients.
_SEGMENTS = 8
# Up to which sum of log-decays over half a chunk exp(-sum) times a key stays well within the dtype's range.
_BOUNDED_LIMIT = {torch.bfloat16: 60.0, torch.float32: 10.0, torch.float16: 6.0}
# Of the nominal bf16 rate: small products of single warps, one after the other. Measured on an H200 with
# dk = dv = 128 and 4,096 to 131,072 tokens.
_EFFICIENCY = 0.046
# Allocators round the sizes of a dozen tensors up.
_ROUNDING = 16 * KiB


@dataclass(frozen=True)
class KDATileSizes:
    """Key and value channels that a program processes at a time (0: none, or all of them)."""

    keys: int
    values: int
    warps: int
    stages: int


_PREPARE_TILE = KDATileSizes(keys=64, values=64, warps=2, stages=1)
_FORWARD_TILE = KDATileSizes(keys=0, values=16, warps=4, stages=3)
_BACKWARD_TILE = KDATileSizes(keys=0, values=16, warps=4, stages=3)
_VALUES_TILE = KDATileSizes(keys=0, values=128, warps=2, stages=1)
_KEYS_TILE = KDATileSizes(keys=32, values=128, warps=2, stages=1)


# Sizes -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KernelSizes:
    batch: int
    tokens: int
    heads: int
    dk: int
    dv: int
    chunks: int  # per batch entry; with packed sequences, an upper bound
    segment: int  # chunks of a segment
    sequences: int
    # Of packed sequences, on the device, so that nothing waits for it: the first token of every chunk, its
    # number of tokens (0 past the last chunk), the first chunk of every sequence and the end of the last.
    tables: tuple[Tensor | None, ...] = (None, None, None)

    @property
    def packed(self) -> bool:
        return self.tables[0] is not None

    @property
    def segments(self) -> int:
        return cdiv(self.chunks, self.segment)

    def segment_chunks(self, index: int) -> range:
        """The chunks that one round of launches processes."""
        return range(index * self.segment, min((index + 1) * self.segment, self.chunks))


def kernel_sizes(q: Tensor, v: Tensor, cu_seqlens: Tensor | None, segment_tokens: int | None) -> KernelSizes:
    """`segment_tokens` of each sequence are processed at a time; None chooses."""
    batch, tokens, heads, dk = q.shape
    tables: tuple[Tensor | None, ...] = (None, None, None)
    sequences, chunks = batch, cdiv(tokens, CHUNK)
    if cu_seqlens is not None:
        sequences = cu_seqlens.numel() - 1
        # The last chunk of a sequence may have as little as one token.
        chunks = (tokens + sequences * (CHUNK - 1)) // CHUNK
        tables = _packed_chunks(cu_seqlens, chunks)
    if segment_tokens is None:
        segment = max(cdiv(chunks, _SEGMENTS), cdiv(_PROGRAMS, batch * heads))
    else:
        segment = max(1, segment_tokens // CHUNK)
    return KernelSizes(batch, tokens, heads, dk, v.shape[-1], chunks, min(segment, chunks), sequences, tables)


def _packed_chunks(cu_seqlens: Tensor, chunks: int) -> tuple[Tensor, ...]:
    counts = (cu_seqlens.diff() + (CHUNK - 1)) // CHUNK
    ends = counts.cumsum(0)
    index = torch.arange(chunks, device=cu_seqlens.device)
    sequence = torch.searchsorted(ends, index, right=True).clamp_(max=counts.numel() - 1)
    start = cu_seqlens[sequence] + (index - (ends - counts)[sequence]) * CHUNK
    rows = (cu_seqlens[sequence + 1] - start).clamp_(0, CHUNK)
    return start.int(), rows.int(), torch.cat([ends.new_zeros(1), ends]).int()


# Memory ----------------------------------------------------------------------------------------------


def kernel_memory_costs(inputs: tuple[Tensor, ...], with_backward: bool) -> MemoryCosts:
    """Of what KDALauncher and autograd.py allocate. inputs: q, k, v, log_alpha, beta."""
    q, k, v, log_alpha, beta = inputs
    heads, keys, values = q.shape[2:] + v.shape[3:]
    rows, item = q.shape[0] * heads, q.dtype.itemsize
    Aqk, decay = CHUNK * CHUNK * item, 3 * keys * 4 + 4
    if with_backward:
        # As in allocate_backward.
        third = v.requires_grad and v.shape == k.shape
        third = third or (log_alpha.requires_grad and log_alpha.dtype == k.dtype)
        in_gradients = q.requires_grad and k.requires_grad and third
        per_row = item * (2 * values + (0 if in_gradients else 3 * keys))
        per_chunk = 2 * Aqk + decay + 2 * keys * values * item
        # Whatever the segments: the parts of beta's gradient, and their sum.
        beta_parts = rows * q.shape[1] * 4 * (2 + _key_slices(keys)) if beta.requires_grad else 0
    else:
        per_row, per_chunk, beta_parts = item * 3 * keys, Aqk + decay, 0
    state = rows * keys * values * torch.float32.itemsize
    # Two states are carried between segments; and a last chunk takes the room of a whole one.
    fixed = 2 * state + beta_parts + rows * per_chunk + _ROUNDING
    return MemoryCosts(rows * (per_row + cdiv(per_chunk, CHUNK)), fixed, state)


# Launches --------------------------------------------------------------------------------------------


class KDALauncher:
    """Launches the kernels of one segment after the other, and holds what they pass to each other.

    kernels.py has the symbols. w, kg, qg and u have a row for every token of a segment, or of the call
    (whole_keys, whole_values) where they are stored in its results. decay [.., 3, dk], of each chunk: the
    factor of the state, and the sums of the log-decays of both halves.
    """

    def __init__(
        self, inputs: Sequence[Tensor], initial_state: Tensor | None, scale: float, sizes: KernelSizes
    ) -> None:
        self.q, self.k, self.v, self.log_alpha, self.beta = self.inputs = tuple(inputs)
        self.initial_state, self.scale, self.sizes = initial_state, scale, sizes
        self.levels = CHUNK.bit_length() - 1

    def forward(self, save: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """o, the final state, and the states between segments (with `save` all, else the last two)."""
        sizes = self.sizes
        o = self.v.new_empty(sizes.batch, sizes.tokens, sizes.heads, sizes.dv)
        final = self._new_states(sizes.sequences)
        if sizes.packed:
            # No kernel stores the state of a sequence without tokens.
            final.zero_() if self.initial_state is None else final.copy_(self.initial_state)
        count = sizes.segments - 1 if save else min(2, sizes.segments - 1)
        segment_states = self._new_states(count, sizes.batch) if count else None
        self._allocate_keys()
        self._allocate_chunks(with_inverse=False)
        # u is stored in o: the recurrence reads a chunk's u before it stores the chunk's o.
        self.u, self.whole_values = o, True
        for index in range(sizes.segments):
            segment = sizes.segment_chunks(index)
            self._prepare_chunks(segment)
            before = final if segment_states is None else segment_states[(index - 1) % count]
            after = final if segment_states is None else segment_states[index % count]
            self._forward_states(segment, before, outputs=(o, after, final))
        return o, final, segment_states

    def backward(
        self,
        segment_states: Tensor | None,
        grad_o: Tensor | None,
        grad_final: Tensor | None,
        needs: tuple[bool, ...],
    ) -> tuple[Tensor | None, ...]:
        """The gradients of the inputs and of the initial state, where needed."""
        sizes = self.sizes
        if grad_o is None:
            grad_o = self.v.new_zeros(sizes.batch, sizes.tokens, sizes.heads, sizes.dv)
        grad_o = grad_o.contiguous()
        grads = [
            torch.empty_like(x, memory_format=torch.contiguous_format) if need else None
            for x, need in zip(self.inputs[:4], needs[:4], strict=True)
        ]
        # Of beta, to be summed over dim 0: from the values, and from each slice of the keys.
        beta_parts = None
        if needs[4]:
            shape = (1 + _key_slices(sizes.dk), *self.beta.shape)
            beta_parts = self.beta.new_empty(shape, dtype=torch.float32)
        grad_initial = self._new_states(sizes.sequences) if needs[5] else None
        if grad_initial is not None and sizes.packed:
            grad_initial.zero_() if grad_final is None else grad_initial.copy_(grad_final)
        if grad_final is not None:
            grad_final = grad_final.contiguous()
        self._allocate_backward(grads)
        grad_v_new = torch.empty_like(self.u)
        # For every chunk of a segment, the state before it and the gradient of the state after it.
        chunk_shape = sizes.batch * sizes.heads, sizes.segment, sizes.dk, sizes.dv
        states, grad_states = self.k.new_empty(2, *chunk_shape).unbind()
        # With one segment no state is carried, and the kernels do not read this argument.
        carried = (self.decay,) * 2
        if sizes.segments > 1:
            carried = self._new_states(2 * sizes.batch).chunk(2)  # type: ignore[assignment]
        for index in reversed(range(sizes.segments)):
            segment = sizes.segment_chunks(index)
            self._prepare_chunks(segment)
            before = segment_states[index - 1] if segment_states is not None and index else self.decay
            self._forward_states(segment, before, chunk_states=states)
            # Two buffers in turn: with packed sequences, one program reads the carried gradient of a sequence
            # where another stores that of the next.
            self._launch_states(
                "backward_states",
                segment,
                (
                    self.w,
                    self.kg,
                    self.qg,
                    self.Aqk,
                    self.decay,
                    grad_o,
                    grad_v_new,
                    grad_states,
                    grad_initial,
                ),
                (carried[index % 2], carried[1 - index % 2], grad_final),
                _BACKWARD_TILE,
                self._cost(segment, state_products=3, value_products=1),
                HAS_FINAL=grad_final is not None,
                HAS_INITIAL=grad_initial is not None,
            )
            if any(needs[:5]):
                self._backward_values(segment, grad_o, grad_v_new, grads[2], beta_parts)
            if any(needs[index] for index in (0, 1, 3, 4)):
                tensors = (grad_o, self.u, grad_v_new, states, grad_states)
                self._backward_keys(segment, tensors, grads, beta_parts)
        grad_beta = None if beta_parts is None else beta_parts.sum(0).to(self.beta.dtype)
        return *grads, grad_beta, grad_initial

    def _allocate_backward(self, grads: Sequence[Tensor | None]) -> None:
        """w, kg and qg are stored in the gradients: the kernels that compute these read none of them."""
        grad_q, grad_k, grad_v, grad_la = grads
        like_k = self.k.dtype, self.k.shape
        third = next((x for x in (grad_v, grad_la) if x is not None and (x.dtype, x.shape) == like_k), None)
        self.u, self.whole_values = self.v.new_empty(self._rows_shape(self.sizes.dv)), False
        self._allocate_chunks(with_inverse=True)
        if grad_q is not None and grad_k is not None and third is not None:
            self.w, self.kg, self.qg, self.whole_keys = third, grad_k, grad_q, True
        else:
            self._allocate_keys()

    def _rows_shape(self, size: int) -> tuple[int, ...]:
        return self.sizes.batch, min(self.sizes.segment * CHUNK, self.sizes.tokens), self.sizes.heads, size

    def _allocate_keys(self) -> None:
        self.w, self.kg, self.qg = self.k.new_empty(3, *self._rows_shape(self.sizes.dk)).unbind()
        self.whole_keys = False

    def _allocate_chunks(self, with_inverse: bool) -> None:
        lead = self.sizes.batch * self.sizes.heads, self.sizes.segment
        self.Aqk = self.k.new_empty(*lead, CHUNK, CHUNK)
        self.Akk_inv = torch.empty_like(self.Aqk) if with_inverse else None
        self.decay = self.k.new_empty(*lead, 3, self.sizes.dk, dtype=torch.float32)
        self.bounded = self.k.new_empty(*lead, dtype=torch.int32)

    def _new_states(self, *lead: int) -> Tensor:
        sizes = self.sizes
        return self.k.new_empty(*lead, sizes.heads, sizes.dk, sizes.dv, dtype=torch.float32)

    def _prepare_chunks(self, segment: range) -> None:
        """What does not depend on the state, for all chunks of the segment."""
        self._launch_chunks(
            "prepare_chunks",
            segment,
            (*self.inputs, self.w, self.kg, self.qg, self.u),
            (self.Aqk, self.Akk_inv, self.decay, self.bounded),
            (self.w.shape[1], self.u.shape[1], *self._strides("01234")),
            _PREPARE_TILE,
            self._cost(segment, key_products=3, value_products=1, inversion=True),
            **self._key_block(_PREPARE_TILE),
            WHOLE_KEYS=self.whole_keys,
            STORE_INVERSE=self.Akk_inv is not None,
            LIMIT=_BOUNDED_LIMIT[self.k.dtype],
        )

    def _forward_states(
        self,
        segment: range,
        before: Tensor,
        *,
        outputs: tuple[Tensor | None, ...] = (None, None, None),
        chunk_states: Tensor | None = None,
    ) -> None:
        """The state recurrence over the segment's chunks, from the state `before` it.

        Forward passes `outputs`: o, the state after the segment, the final state. Backward passes
        `chunk_states`, which gets the state before every chunk, and u becomes v_new.
        """
        o, after, final = outputs
        cost = self._cost(segment, state_products=2 + (o is not None), value_products=int(o is not None))
        self._launch_states(
            "forward_states",
            segment,
            (self.w, self.kg, self.qg, self.u, self.Aqk, self.decay, o, chunk_states, self.initial_state),
            (before, after, final),
            _FORWARD_TILE,
            cost,
            HAS_INITIAL=self.initial_state is not None,
            OUTPUT=o is not None,
        )

    def _backward_values(
        self,
        segment: range,
        grad_o: Tensor,
        grad_v_new: Tensor,
        grad_v: Tensor | None,
        beta_parts: Tensor | None,
    ) -> None:
        """The gradient of v, and what _backward_keys needs: grad_v_new, Aqk and Akk_inv are overwritten."""
        self._launch_chunks(
            "intra_chunk_backward_values",
            segment,
            (self.v, self.beta, grad_o, self.u, grad_v_new, self.Aqk, self.Akk_inv),
            (grad_v, beta_parts),
            (self.u.shape[1], *self._strides("24")),
            _VALUES_TILE,
            self._cost(segment, value_products=3),
            GRAD_V=grad_v is not None,
            GRAD_BETA=beta_parts is not None,
        )

    def _backward_keys(
        self,
        segment: range,
        tensors: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        beta_parts: Tensor | None,
    ) -> None:
        """The gradients of q, k and log_alpha: one launch for bounded chunks, one for the others."""
        sizes = self.sizes
        grad_q, grad_k, _, grad_la = grads
        for bounded in (True, False):
            cost = self._cost(segment, state_products=3, key_products=4)
            self._launch_chunks(
                "intra_chunk_backward_keys",
                segment,
                (self.q, self.k, self.log_alpha, self.beta, *tensors, self.Aqk, self.Akk_inv, self.decay),
                (self.bounded, grad_q, grad_k, grad_la, beta_parts),
                (self.u.shape[1], sizes.batch * sizes.tokens * sizes.heads, *self._strides("0134")),
                _KEYS_TILE,
                cost if bounded else {"passes": 0.0},  # other chunks are rare
                slices=_key_slices(sizes.dk),
                **self._key_block(_KEYS_TILE),
                # Sums of gradients cancel: they keep twice the bits of the result, where possible.
                GRADIENT_PARTS=_parts(self.k.dtype, extra=1),
                GRAD_Q=grad_q is not None,
                GRAD_K=grad_k is not None,
                GRAD_LA=grad_la is not None,
                GRAD_BETA=beta_parts is not None,
                BOUNDED=bounded,
            )

    def _launch_chunks(
        self,
        name: str,
        segment: range,
        inputs: Sequence[Tensor | None],
        results: Sequence[Tensor | None],
        rows_and_strides: Sequence[int],
        tile: KDATileSizes,
        cost: dict[str, float],
        slices: int = 1,
        **constants: Any,
    ) -> None:
        """A program per chunk, head and slice of the key channels."""
        sizes = self.sizes
        _KERNELS.launch(
            name,
            (len(segment) * sizes.batch * sizes.heads * slices,),
            *(*inputs, *results, *sizes.tables[:2], self.scale),
            *(segment.start, len(segment), sizes.tokens, sizes.heads, *rows_and_strides),
            **cost,
            **constants,
            **self._common(tile),
        )

    def _launch_states(
        self,
        name: str,
        segment: range,
        inputs: Sequence[Tensor | None],
        states: Sequence[Tensor | None],
        tile: KDATileSizes,
        cost: dict[str, float],
        **constants: Any,
    ) -> None:
        """A program per sequence, head and slice of the value channels."""
        sizes = self.sizes
        if sizes.dk > 128:  # large states take more warps, and their tiles leave no room for a second stage
            tile = KDATileSizes(tile.keys, tile.values, 8, 1)
        elif self.k.element_size() > 2:
            tile = KDATileSizes(tile.keys, tile.values, tile.warps, 1)
        common = self._common(tile)
        _KERNELS.launch(
            name,
            (sizes.sequences * sizes.heads * cdiv(sizes.dv, common["BLOCK_V"]),),
            *(*inputs, *states, *sizes.tables),
            *(segment.start, len(segment), sizes.chunks, sizes.tokens, sizes.heads),
            *(self.w.shape[1], self.u.shape[1]),
            DK=sizes.dk,
            BLOCK_K=power_of_two(sizes.dk, 16),
            WHOLE_KEYS=self.whole_keys,
            **cost,
            **constants,
            **common,
        )

    def _key_block(self, tile: KDATileSizes) -> dict[str, int]:
        return {
            "DK": self.sizes.dk,
            "BLOCK_K": min(tile.keys, power_of_two(self.sizes.dk, 16)),
            "LEVELS": self.levels,
            "PARTS": _parts(self.log_alpha.dtype),
        }

    def _cost(
        self,
        segment: range,
        state_products: int = 0,
        key_products: int = 0,
        value_products: int = 0,
        inversion: bool = False,
    ) -> dict[str, float]:
        """For predictions of time: matrix products per chunk, and the share of the tensors that is read.

        With a state: chunk x dk x dv. Between tokens: chunk x chunk, over the key or value channels.
        """
        each = state_products * CHUNK * self.sizes.dk * self.sizes.dv
        each += CHUNK * CHUNK * (key_products * self.sizes.dk + value_products * self.sizes.dv)
        each += 2 * self.levels * CHUNK**3 if inversion else 0
        flops = 2.0 * len(segment) * self.sizes.batch * self.sizes.heads * each
        return {"flops": flops, "passes": len(segment) / self.sizes.chunks, "efficiency": _EFFICIENCY}

    def _common(self, tile: KDATileSizes) -> dict[str, Any]:
        return {
            "DV": self.sizes.dv,
            "BLOCK_V": min(tile.values, power_of_two(self.sizes.dv, 16)),
            "CHUNK": CHUNK,
            # Three products of 11-bit parts keep float32's precision; for 16-bit inputs only X is concerned.
            "PRECISION": "tf32x3" if self.k.dtype == torch.float32 else "tf32",
            "PACKED": self.sizes.packed,
            "WHOLE_VALUES": self.whole_values,
            "num_warps": tile.warps,
            "num_stages": tile.stages,
        }

    def _strides(self, indices: str) -> list[int]:
        """Of batch, token and head, of the inputs whose indices (0 for q) are listed."""
        return [stride for index in indices for stride in self.inputs[int(index)].stride()[:3]]


def _key_slices(dk: int) -> int:
    return cdiv(dk, min(_KEYS_TILE.keys, power_of_two(dk, 16)))


def _parts(dtype: torch.dtype, extra: int = 0) -> int:
    """Into how many bfloat16 numbers a value is split where sums must be exact; 0 in the interpreter."""
    if interpreted():
        return 0
    return min(3, {torch.bfloat16: 1, torch.float16: 2}.get(dtype, 3) + extra)


# The autograd function -------------------------------------------------------------------------------


def triton_kda(
    inputs: tuple[Tensor, ...],
    initial_state: Tensor | None,
    scale: float,
    cu_seqlens: Tensor | None = None,
    segment_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(o [B, T, H, dv], final state [B, H, dk, dv] in float32) of arguments that have been checked.

    segment_tokens: how many tokens of each sequence are processed at a time; None chooses. Forward launches
    two kernels per segment, backward six. Scratch memory is allocated once and is that of one segment.
    """
    *first, beta = inputs
    if initial_state is not None:
        initial_state = initial_state.contiguous()
    inputs = (*map(contiguous_rows, first), beta)
    o, final_state = _TritonKDA.apply(*inputs, initial_state, scale, cu_seqlens, segment_tokens)
    return o, final_state


class _TritonKDA(OpFunction):
    op = "kda"

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *inputs, initial_state, scale, cu_seqlens, segment_tokens = arguments
        ctx.set_materialize_grads(False)
        sizes = kernel_sizes(inputs[0], inputs[2], cu_seqlens, segment_tokens)
        launcher = KDALauncher(inputs, initial_state, scale, sizes)
        o, final, segment_states = launcher.forward(save=any(ctx.needs_input_grad))
        ctx.save_for_backward(*inputs, initial_state, segment_states)
        ctx.scale, ctx.sizes = scale, sizes
        return o, final

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives("kda")
        *inputs, initial_state, segment_states = ctx.saved_tensors
        launcher = KDALauncher(inputs, initial_state, ctx.scale, ctx.sizes)
        grad_o, grad_final = grads
        made = launcher.backward(segment_states, grad_o, grad_final, ctx.needs_input_grad[:6])
        return *made, None, None, None
