"""A known MLP, tile by tile: every matrix product goes into memory that is already there.

Shapes: N tokens, D features in, O features out, F hidden features, T rows of a tile.

Forward holds two [T, F] buffers and the result. Backward computes gate and up again (never the product with
down), and holds three: g, u and dh, which one elementwise pass turns into dg, du and h. So eleven products
against the nine that keep every [N, F] tensor, and nothing that grows with N beyond the result and dX.
Saved for backward: x and the weights, and on a CPU gate and up of the first tiles (`Plan.kept` rows), which
are then not computed again.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oomph.ops.common import matmul_into, no_autocast, refuse_second_derivatives
from oomph.ops.mlp import elementwise
from oomph.ops.mlp.products import accumulate_product, project, rows, wide
from oomph.ops.mlp.tiles import spans
from oomph.ops.mlp.weights import MLPWeights


@dataclass(frozen=True)
class Plan:
    """How a known MLP is computed: rows of a tile, dtype of the products, kernel of the elementwise part.

    kept: of so many of the first rows, whole tiles, gate and up are kept for backward.
    """

    activation: str
    tile: int
    kept: int
    dtype: torch.dtype
    use_triton: bool


def mlp(weights: MLPWeights, x: Tensor, plan: Plan) -> Tensor:
    """x [..., D] -> [..., O] in plan.dtype, exact, differentiable in x and in every weight and bias."""
    w = weights
    out: Tensor = _TiledMLP.apply(x, w.up, w.down, w.gate, w.up_bias, w.gate_bias, w.down_bias, plan)
    return out


class _TiledMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        x, up, down, gate, up_bias, gate_bias, down_bias, plan = inputs
        ctx.plan = plan
        given = (x, up, down, gate, up_bias, gate_bias, down_bias)
        # Products are told their dtype; autocast must not convert them a second time.
        with no_autocast(x):
            w = _in_dtype(plan.dtype, *given[1:])
            kept = _Kept.room_for(x, w, plan, _Needs(*ctx.needs_input_grad[:-1]))
            out = _forward(x, w, plan, kept)
        ctx.save_for_backward(*given, kept.gate, kept.up)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        refuse_second_derivatives("tiled_mlp")
        # Asked for once: checkpointing computes them again at every request.
        *given, kept_gate, kept_up = ctx.saved_tensors
        x, up, down, gate, up_bias, gate_bias, _ = given
        with no_autocast(x):
            w = _in_dtype(ctx.plan.dtype, up, down, gate, up_bias, gate_bias, None)
            kept = _Kept(kept_gate, kept_up)
            work = _Backward(given, w, ctx.plan, _Needs(*ctx.needs_input_grad[:-1]), kept)
            return (*work.run(grad_out), None)


@dataclass(frozen=True)
class _Weights:
    """The weights in the dtype of the products; down_bias is not needed in backward."""

    up_FD: Tensor
    down_OF: Tensor
    gate_FD: Tensor | None
    up_bias_F: Tensor | None
    gate_bias_F: Tensor | None
    down_bias_O: Tensor | None


@dataclass(frozen=True)
class _Needs:
    """Which gradients are asked for, in the order of the inputs."""

    x: bool
    up: bool
    down: bool
    gate: bool
    up_bias: bool
    gate_bias: bool
    down_bias: bool

    @property
    def hidden_gradient(self) -> bool:
        return self.x or self.up or self.gate or self.up_bias or self.gate_bias


@dataclass(frozen=True)
class _Kept:
    """Gate and up [kept rows, F] of the first tiles; None where nothing is kept, or there is no gate."""

    gate: Tensor | None
    up: Tensor | None

    @classmethod
    def room_for(cls, x: Tensor, w: "_Weights", plan: Plan, needs: _Needs) -> "_Kept":
        if plan.kept == 0 or not (needs.hidden_gradient or needs.down):
            return cls(None, None)
        up = x.new_empty(plan.kept, w.up_FD.shape[0], dtype=plan.dtype)
        return cls(None if w.gate_FD is None else torch.empty_like(up), up)

    def tile(self, start: int, stop: int) -> tuple[Tensor | None, Tensor] | None:
        """Gate and up of a tile, where they are kept."""
        if self.up is None or stop > self.up.shape[0]:
            return None
        return None if self.gate is None else self.gate[start:stop], self.up[start:stop]


def _in_dtype(dtype: torch.dtype, *tensors: Tensor | None) -> _Weights:
    return _Weights(*(None if each is None else each.detach().to(dtype) for each in tensors))  # type: ignore[arg-type]


def _forward(x: Tensor, w: _Weights, plan: Plan, kept: _Kept) -> Tensor:
    x_ND = x.detach().reshape(x.shape[:-1].numel(), x.shape[-1])
    hidden, features_out = w.up_FD.shape[0], w.down_OF.shape[0]
    out_NO = x.new_empty(x_ND.shape[0], features_out, dtype=plan.dtype)
    up_TF = x.new_empty(plan.tile, hidden, dtype=plan.dtype)
    gate_TF = None if w.gate_FD is None else torch.empty_like(up_TF)
    for start, stop in spans(x_ND.shape[0], plan.tile):
        x_TD = rows(x_ND, start, stop, plan.dtype)
        hidden_TF = up_TF[: stop - start]
        gate, up = kept.tile(start, stop) or (_top(gate_TF, stop - start), hidden_TF)
        _gate_and_up(x_TD, w, gate, up)
        elementwise.activate(plan.activation, gate, up, hidden_TF, plan.use_triton)
        project(hidden_TF, w.down_OF, w.down_bias_O, out_NO[start:stop])
    return out_NO.view(*x.shape[:-1], features_out)


def _gate_and_up(x_TD: Tensor, w: _Weights, gate_TF: Tensor | None, up_TF: Tensor) -> None:
    project(x_TD, w.up_FD, w.up_bias_F, up_TF)
    if w.gate_FD is not None and gate_TF is not None:
        project(x_TD, w.gate_FD, w.gate_bias_F, gate_TF)


def _top(buffer: Tensor | None, count: int) -> Tensor | None:
    return None if buffer is None else buffer[:count]


class _Backward:
    """One backward pass: the sums over tiles, and what is done with each tile."""

    def __init__(self, given: list[Tensor], w: _Weights, plan: Plan, needs: _Needs, kept: _Kept) -> None:
        """`given` are the inputs as the caller has them; `w` the weights in the dtype of the products."""
        x, up, down, gate, up_bias, gate_bias, down_bias = given
        self.x, self.w, self.plan, self.needs, self.kept = x, w, plan, needs, kept
        self.dtypes = [None if each is None else each.dtype for each in given[1:]]
        self.tokens = x.shape[:-1].numel()
        # With one tile there is nothing to add up, and the products can be rounded as they are made.
        self.one_tile = self.tokens <= plan.tile
        self.d_up = self._sum_for(up, needs.up)
        self.d_down = self._sum_for(down, needs.down)
        self.d_gate = self._sum_for(gate, needs.gate)
        self.d_up_bias = self._sum_for(up_bias, needs.up_bias, small=True)
        self.d_gate_bias = self._sum_for(gate_bias, needs.gate_bias, small=True)
        self.d_down_bias = self._sum_for(down_bias, needs.down_bias, small=True)

    def run(self, grad_out: Tensor) -> list[Tensor | None]:
        """The gradients of x, up, down, gate and the biases, in their dtypes, None where not needed."""
        x_ND = self.x.detach().reshape(self.tokens, self.x.shape[-1])
        dy_NO = grad_out.reshape(self.tokens, grad_out.shape[-1])
        dx_ND = torch.empty_like(x_ND, memory_format=torch.contiguous_format) if self.needs.x else None
        if self.needs.hidden_gradient or self.needs.down:
            self._tiles(x_ND, dy_NO, dx_ND)
        if self.d_down_bias is not None:
            torch.sum(dy_NO, 0, dtype=self.d_down_bias.dtype, out=self.d_down_bias)
        # Rounded one at a time, after the tile's buffers are gone, so that this is not the peak.
        sums = [self.d_up, self.d_down, self.d_gate, self.d_up_bias, self.d_gate_bias, self.d_down_bias]
        self.d_up = self.d_down = self.d_gate = None
        rounded: list[Tensor | None] = [None if dx_ND is None else dx_ND.view(self.x.shape)]
        for index, dtype in enumerate(self.dtypes):
            total, sums[index] = sums[index], None
            rounded.append(None if total is None or dtype is None else total.to(dtype))
            del total
        return rounded

    def _tiles(self, x_ND: Tensor, dy_NO: Tensor, dx_ND: Tensor | None) -> None:
        w, plan = self.w, self.plan
        up_TF = self.x.new_empty(plan.tile, w.up_FD.shape[0], dtype=plan.dtype)
        gate_TF = None if w.gate_FD is None else torch.empty_like(up_TF)
        grad_TF = torch.empty_like(up_TF) if self.needs.hidden_gradient else None
        for start, stop in spans(self.tokens, plan.tile):
            count, first = stop - start, start == 0
            x_TD = rows(x_ND, start, stop, plan.dtype)
            dy_TO = rows(dy_NO, start, stop, plan.dtype)
            # The results take the places of gate, up and d hidden; what is kept stays, for a second backward.
            d_gate, hidden, d_up = _top(gate_TF, count), up_TF[:count], _top(grad_TF, count)
            found = self.kept.tile(start, stop)
            gate, up = found or (d_gate, hidden)
            if found is None:
                _gate_and_up(x_TD, w, gate, up)
            if d_up is None:  # only down is trained
                elementwise.activate(plan.activation, gate, up, hidden, plan.use_triton)
                self._add(self.d_down, dy_TO, hidden, first)
                continue
            matmul_into(d_up, dy_TO, w.down_OF)
            elementwise.differentiate(
                plan.activation, gate, up, d_up, d_gate=d_gate, hidden=hidden, use_triton=plan.use_triton
            )
            self._add(self.d_down, dy_TO, hidden, first)
            self._add(self.d_up, d_up, x_TD, first)
            self._add_rows(self.d_up_bias, d_up, first)
            if d_gate is not None:
                self._add(self.d_gate, d_gate, x_TD, first)
                self._add_rows(self.d_gate_bias, d_gate, first)
            if dx_ND is not None:
                self._write_dx(dx_ND[start:stop], d_gate, d_up)

    def _write_dx(self, dx_TD: Tensor, d_gate: Tensor | None, d_up: Tensor) -> None:
        # Where x is wider than the products (autocast), they are made in their own dtype first.
        same = dx_TD.dtype == d_up.dtype
        product = dx_TD if same else torch.empty_like(dx_TD, dtype=d_up.dtype)
        matmul_into(product, d_up, self.w.up_FD)
        if d_gate is not None and self.w.gate_FD is not None:
            matmul_into(product, d_gate, self.w.gate_FD, add=True)
        if not same:
            dx_TD.copy_(product)

    def _sum_for(self, weight: Tensor | None, needed: bool, small: bool = False) -> Tensor | None:
        if weight is None or not needed:
            return None
        dtype = weight.dtype if self.one_tile and not small else wide(weight.dtype)
        # empty_like keeps the layout of a transposed weight, so its gradient needs no copy afterwards.
        return torch.empty_like(weight, dtype=dtype)

    @staticmethod
    def _add(total: Tensor | None, left_TM: Tensor, right_TN: Tensor, first: bool) -> None:
        if total is not None:
            accumulate_product(total, left_TM.t(), right_TN, first=first)

    @staticmethod
    def _add_rows(total_F: Tensor | None, rows_TF: Tensor, first: bool) -> None:
        if total_F is None:
            return
        if first:
            torch.sum(rows_TF, 0, dtype=total_F.dtype, out=total_F)
        else:
            total_F.add_(torch.sum(rows_TF, 0, dtype=total_F.dtype))
