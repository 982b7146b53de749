"""The three branches through Triton kernels, forward and backward.

Saved for backward: the inputs, the compressed keys and values, the result of each branch, its log-sum-exp
(one fp32 number per token and query head) and the selected blocks. The branches' results are needed for the
gradients of the gates; with them, every softmax's gradient needs no further pass.
"""

from typing import Any

import torch
from torch import Tensor

from oomph.ops.common import refuse_second_derivatives
from oomph.ops.launch import why_not_triton
from oomph.ops.sparse_attention.banded import attend as banded
from oomph.ops.sparse_attention.gathered import attend as gathered
from oomph.ops.sparse_attention.problem import Sizes
from oomph.ops.sparse_attention.selection import select as selection
from oomph.ops.sparse_attention.tensors import DTYPES, SHARED_MEMORY, WIDEST_HEAD, with_contiguous_rows

_WIDEST_GROUP = 64
_MOST_STRIDES = 16  # of a compressed block: a loop over them is unrolled


def why_not_kernels(q: Tensor, k: Tensor, dtype: torch.dtype, sizes: Sizes) -> str | None:
    """Why the kernels cannot run the call; None where they can."""
    objection = why_not_triton(q)
    if objection is not None:
        return objection
    if dtype not in DTYPES:
        return f"no {str(dtype).removeprefix('torch.')} kernel"
    if q.shape[3] > WIDEST_HEAD:
        return f"head sizes above {WIDEST_HEAD}"
    group = q.shape[2] // k.shape[2]
    if group > _WIDEST_GROUP:
        return f"groups of more than {_WIDEST_GROUP} query heads"
    if sizes.units_of_span > _MOST_STRIDES:
        return f"compressed blocks of more than {_MOST_STRIDES} strides"
    shape = f"with head size {q.shape[3]} and groups of {group} in {str(dtype).removeprefix('torch.')}"
    if gathered.shared_bytes(dtype, q.shape[3], group, sizes) > SHARED_MEMORY:
        return f"blocks of {sizes.block} keys {shape} do not fit into shared memory"
    if selection.shared_bytes(dtype, q.shape[3], group, sizes) > SHARED_MEMORY:
        return f"{sizes.units_of_block} compressed keys per block {shape} do not fit into shared memory"
    return None


class SparseAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        ck: Tensor,
        cv: Tensor,
        gate_cmp: Tensor,
        gate_slc: Tensor,
        gate_win: Tensor,
        sizes: Sizes,
        keep: bool,
    ) -> Tensor:
        """`keep`: a backward may come."""
        q, k, v, ck, cv = (with_contiguous_rows(x) for x in (q, k, v, ck, cv))
        gates = (gate_cmp.contiguous(), gate_slc.contiguous(), gate_win.contiguous())
        keep = keep and any(ctx.needs_input_grad)
        compressed, lse_cmp = banded.forward(q, ck, cv, _staircase(sizes), sizes.scale)
        chosen = selection.select(q, ck, lse_cmp, sizes)
        nearby, lse_win = banded.forward(q, k, v, _window(q, sizes), sizes.scale)
        others = gathered.Branches(compressed, nearby, gates)
        call = gathered.Gathered(q, k, v, chosen, sizes, backward=False)
        out, selected, lse_slc = call.forward(others, keep=keep)
        ctx.save_for_backward(
            q, k, v, ck, cv, *gates, compressed, selected, nearby, lse_cmp, lse_slc, lse_win, chosen
        )
        ctx.sizes = sizes
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        refuse_second_derivatives("nsa")
        q, k, v, ck, cv, *saved = ctx.saved_tensors
        gate_cmp, gate_slc, gate_win, compressed, selected, nearby, lse_cmp, lse_slc, lse_win, chosen = saved
        sizes: Sizes = ctx.sizes
        want_q, want_k, want_v, want_ck, want_cv, *want_gates, _, _ = ctx.needs_input_grad
        grad = with_contiguous_rows(grad)
        delta_cmp, delta_slc, delta_win = gathered.row_products(grad, compressed, selected, nearby)
        rows_cmp = banded.Rows(lse_cmp, delta_cmp, _by_head(gate_cmp))
        rows_win = banded.Rows(lse_win, delta_win, _by_head(gate_win))
        rows_slc = gathered.Rows(lse_slc, delta_slc, gate_slc)
        staircase, window = _staircase(sizes), _window(q, sizes)
        dq = dk = dv = dck = dcv = None
        if want_q:
            dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            banded.query_gradient(dq, q, ck, cv, grad, rows_cmp, staircase, sizes.scale, add=False)
            banded.query_gradient(dq, q, k, v, grad, rows_win, window, sizes.scale, add=True)
        if (want_ck or want_cv) and ck.numel():
            dck, dcv = banded.key_gradient(q, ck, cv, grad, rows_cmp, staircase, sizes.scale, split=True)
        if want_k or want_v:
            dk, dv = banded.key_gradient(q, k, v, grad, rows_win, window, sizes.scale, split=False)
        if want_q or want_k or want_v:
            call = gathered.Gathered(q, k, v, chosen, sizes, backward=True)
            if dq is not None:
                call.add_query_gradient(dq, grad, rows_slc)
            if dk is not None and dv is not None:
                call.add_key_gradient(dk, dv, grad, rows_slc)
        gate_gradients = (
            delta_cmp.transpose(1, 2).to(gate_cmp.dtype) if want_gates[0] else None,
            delta_slc.to(gate_slc.dtype) if want_gates[1] else None,
            delta_win.transpose(1, 2).to(gate_win.dtype) if want_gates[2] else None,
        )
        return (
            dq,
            dk if want_k else None,
            dv if want_v else None,
            dck if want_ck else None,
            dcv if want_cv else None,
            *gate_gradients,
            None,
            None,
        )


def _staircase(sizes: Sizes) -> banded.Band:
    return banded.Band(sizes.span, sizes.stride)


def _window(q: Tensor, sizes: Sizes) -> banded.Band:
    # No limit where all tokens are within it: a limit is compiled in, and each length would have its own.
    return banded.Band(window=sizes.window if sizes.window < q.shape[1] else 0)


def _by_head(gate: Tensor) -> Tensor:
    """[B, T, Q] -> [B, Q, T] in float32."""
    by_head = torch.empty(gate.transpose(1, 2).shape, dtype=torch.float32, device=gate.device)
    return by_head.copy_(gate.transpose(1, 2))
