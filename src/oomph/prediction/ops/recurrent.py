"""Recurrent layers and cells.

nn.LSTM, nn.GRU and nn.RNN dissolve into cells above the dispatch mode, so CUDA's path is taken at autograd's
key, as one op per call. A call makes what _cudnn_rnn makes on a GPU (ATen/native/cudnn/RNN.cpp): the results,
a workspace while it runs and a reserve kept for the backward pass, which in turn makes one flat gradient for
all weights. Cells are those of native/RNN.cpp and native/cuda/RNN.cu.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from oomph.gpus import GPU
from oomph.prediction.ops.reductions import reduce
from oomph.prediction.ops.registry import composite, cuda_kernel, host_outputs, op, temporaries
from oomph.prediction.ops.rules import (
    NEXT_RESULT,
    BoundArguments,
    CompositeRule,
    Fake,
    RuleContext,
    Temporary,
    bind,
)
from oomph.torch_internals import OpOverload, disable_dispatch_modes, storage_id
from oomph.units import MiB

aten = torch.ops.aten

# Layers


_FLATTENED = (torch.float64, torch.float32, torch.float16)  # what nn.RNNBase keeps in one buffer
_RECURRENT_OP = "aten._cudnn_rnn"
_DROPOUT_STATE = 2048 * 24  # bytes per multiprocessor: a random number generator for each thread


@dataclass(frozen=True)
class RecurrentCall:
    cell: str
    rows: int  # steps x batch; of a packed sequence, the live ones only
    batch: int
    packed: bool
    inputs: int
    hidden: int  # width of the cell
    result: int  # width of one direction's output: less than `hidden` where an LSTM projects
    layers: int
    directions: int
    dropout: bool
    train: bool
    swapped: bool  # the caller's tensors have the batch first
    weights: int  # elements of all of them
    dtype: torch.dtype

    @property
    def item(self) -> int:
        return self.dtype.itemsize

    @property
    def flops(self) -> float:
        """Of one pass: every weight meets every row."""
        return 2.0 * self.rows * self.weights


def _recurrent(cell: str) -> CompositeRule:
    def run(context: RuleContext, given: BoundArguments) -> Any:
        if not torch.backends.cudnn.enabled:
            return NotImplemented
        input = given["input"] if "input" in given else given["data"]
        hidden = list(given["hx"]) if cell == "lstm" else [given["hx"]]
        if torch.is_autocast_enabled("cuda"):  # always to half, whatever autocast's own type is
            input, *hidden = (tensor.to(torch.float16) for tensor in (input, *hidden))
        call = _recurrent_call(cell, given, input, hidden)
        if call.dropout and not context.held:  # the dropout state, made at the first dropout
            size = context.gpu.multiprocessors * _DROPOUT_STATE
            context.held.append(input.detach().new_empty(size, dtype=torch.uint8))
        cell_state = hidden[1] if cell == "lstm" else None
        tensors = (input, hidden[0], cell_state, *given["params"])
        output, hy, cy = _CudnnRnn.apply(call, context, *tensors)
        return (output, hy, cy) if cell == "lstm" else (output, hy)

    return run


for _layer in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
    op(f"{_layer}.input {_layer}.data", composite=_recurrent(_layer))


def flatten_parameters(on_gpu: Callable[[Any], bool]) -> Callable[[nn.RNNBase], None]:
    """CUDA's nn.RNNBase.flatten_parameters: every weight becomes a view of one buffer."""

    def flatten(module: nn.RNNBase) -> None:
        weights: list[Any] = module._flat_weights
        if len(weights) != len(module._flat_weights_names) or not all(map(on_gpu, weights)):
            return
        first = weights[0]
        if first.dtype not in _FLATTENED or any(weight.dtype != first.dtype for weight in weights):
            return
        with torch.no_grad():
            flat = first.new_zeros(sum(weight.numel() for weight in weights))
            for weight, part in zip(weights, _views(flat, weights), strict=True):
                weight.data = part

    return flatten


def _recurrent_call(
    cell: str, given: BoundArguments, input: Tensor, hidden: Sequence[Tensor]
) -> RecurrentCall:
    return RecurrentCall(
        cell=cell,
        rows=input.numel() // max(int(input.shape[-1]), 1),
        batch=max(int(hidden[0].shape[1]), 1),
        packed="batch_sizes" in given,
        inputs=int(input.shape[-1]),
        hidden=int(hidden[-1].shape[2]),
        result=int(hidden[0].shape[2]),
        layers=int(given["num_layers"]),
        directions=2 if given["bidirectional"] else 1,
        dropout=bool(given["train"]) and given["dropout"] > 0,
        train=bool(given["train"]),
        swapped=bool(given.get("batch_first")),
        weights=sum(weight.numel() for weight in given["params"]),
        dtype=input.dtype,
    )


def _views(flat: Tensor, weights: Sequence[Tensor]) -> Iterator[Tensor]:
    start = 0
    for weight in weights:
        yield flat[start : start + weight.numel()].view(weight.shape)
        start += weight.numel()


class _CudnnRnn(torch.autograd.Function):
    """The allocations of aten::_cudnn_rnn and its backward, in their order."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        call: RecurrentCall,
        context: RuleContext,
        input: Tensor,
        hx: Tensor,
        cx: Tensor | None,
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        # Weights that autocast casts, or that are not in one buffer, are copied into one of this call's own.
        in_one_buffer = len({storage_id(weight.untyped_storage()) for weight in weights}) == 1
        ready = weights[0].dtype == input.dtype and in_one_buffer
        flat = None if ready else input.new_empty(call.weights)
        x = _steps_first(call, input)
        output = x.new_empty((*x.shape[:-1], call.directions * call.result))
        hy = torch.empty_like(hx)
        cy = torch.empty_like(cx) if cx is not None else None
        with context.workspace(workspace_bytes(call), _RECURRENT_OP):
            reserve = x.new_empty(reserve_bytes(call), dtype=torch.uint8) if call.train else None
        del x
        output = output.transpose(0, 1) if call.swapped else output
        ctx.call, ctx.context = call, context
        context.count_kernel(input, output, *weights, flops=call.flops, kind="recurrent")
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(input, hx, cx, output, reserve, flat, *weights)
        return output, hy, cy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # type: ignore[override]
        def like_inputs() -> Any:
            saved = ctx.saved_tensors
            return None, None, *(t if t is None else torch.empty_like(t) for t in (*saved[:3], *saved[6:]))

        rule = functools.partial(_CudnnRnn.gradients, ctx, *grads)
        return ctx.context.guard.call("gradients", f"aten.{ctx.call.cell}", rule, like_inputs)

    @staticmethod
    def gradients(ctx: Any, *grads: Tensor | None) -> Any:
        call: RecurrentCall = ctx.call
        input, hx, cx, output, _, _, *weights = ctx.saved_tensors
        made = [
            torch.zeros_like(like)
            for like, grad in zip((hx, cx), grads[1:], strict=True)
            if like is not None and grad is None
        ]
        x = _steps_first(call, input)
        dy = _steps_first(call, grads[0] if grads[0] is not None else torch.zeros_like(output))
        dx = torch.empty_like(x)
        dhx = torch.empty_like(hx)
        dcx = torch.empty_like(cx) if cx is not None else None
        with ctx.context.workspace(workspace_bytes(call, backward=True), _RECURRENT_OP):
            ctx.context.count_kernel(input, dx, *weights, flops=call.flops, kind="recurrent")
        del x, dy
        dweights: list[Tensor | None] = [None] * len(weights)
        if any(ctx.needs_input_grad[5:]):
            x = _steps_first(call, input)
            flat = x.new_zeros(call.weights)
            with ctx.context.workspace(workspace_bytes(call, backward=True), _RECURRENT_OP):
                ctx.context.count_kernel(input, output, flat, flops=call.flops, kind="recurrent")
            del x
            # Under autocast the copies' backward makes float32 gradients, one by one.
            parts = zip(_views(flat, weights), weights, strict=True)
            dweights = [part.to(weight.dtype) for part, weight in parts]
        del made
        return None, None, dx.transpose(0, 1) if call.swapped else dx, dhx, dcx, *dweights


def _steps_first(call: RecurrentCall, tensor: Tensor) -> Tensor:
    """As cuDNN reads it: steps first and contiguous, a copy if it was not."""
    return (tensor.transpose(0, 1) if call.swapped else tensor).contiguous()


def reserve_bytes(call: RecurrentCall) -> int:
    """What the forward pass leaves for the backward pass; to the byte as measured, projections included."""
    one = call.rows * call.hidden * call.directions
    layer = one * {"lstm": 5, "gru": 6}.get(call.cell, 1)  # gates and states
    if call.result < call.hidden:
        layer += one + one * call.result // call.hidden  # the state before and after the projection
    between = call.layers - 1  # outputs of the inner layers, and one bit for each that dropout may drop
    masks = one * call.directions * between // 8 if call.dropout else 0
    return (layer * call.layers + one * between) * call.item + masks + 256


class _Cell(NamedTuple):
    """Coefficients of cuDNN's workspaces. Pairs are for one direction and for two."""

    gates: int
    persistent_width: tuple[int, int]  # widest cell that persistent kernels take, forward and backward
    persistent_rows: int  # states that training with persistent kernels takes more for each row
    # States for each sample and layer:
    inference: tuple[int, int]
    persistent_inference: tuple[int, int]
    training: tuple[int, int]
    packed: tuple[int, int]


_LSTM = _Cell(4, (192, 128), 12, (10, 24), (8, 18), (12, 26), (6, 16))
_GRU = _Cell(3, (192, 128), 14, (5, 14), (4, 10), (6, 14), (3, 10))
_RNN = _Cell(1, (384, 256), 9, (3, 10), (4, 10), (6, 14), (1, 6))
_CELLS = {"lstm": _LSTM, "gru": _GRU, "rnn_tanh": _RNN, "rnn_relu": _RNN}
_GATE_STEPS = 256  # one direction with standard kernels holds the gates of at most these steps


def workspace_bytes(call: RecurrentCall, backward: bool = False) -> int:
    """cuDNN 9.19's choice on an H200: to 0.1 % in 9,283 of 9,289 measured passes; of packed sequences and
    projections to 13 % in all 1,639 (recurrent_h200.csv)."""
    cell = _CELLS[call.cell]
    persistent = _is_persistent(call, cell, backward)
    projects = call.result < call.hidden
    above = (call.layers - 1) * call.result * (1 + call.directions)
    matrices = cell.gates * call.hidden * (call.result + call.inputs + above)
    matrices += call.hidden * call.result * call.layers if projects else 0
    if call.packed:
        states = _packed_states(call, cell)
    else:
        training = _training_states(call, cell, persistent) if call.train else 0
        states = max(_inference_states(call, cell, persistent), training)
    fixed = 8 * call.batch + 256 + 8 * MiB * call.layers * call.directions
    return (states + matrices * call.directions) * call.item + fixed


def _is_persistent(call: RecurrentCall, cell: _Cell, backward: bool) -> bool:
    """Whether the weights stay on the multiprocessors during all steps."""
    if call.packed or call.result < call.hidden or call.dtype not in (torch.float32, torch.float16):
        return False
    aligned = call.hidden % 128 == call.inputs % 128 == call.batch % 8 == 0
    single = call.layers == call.directions == 1 and call.cell != "gru"
    half = call.dtype == torch.float16 and aligned and call.hidden <= 1024 and call.batch <= 128
    return call.hidden <= cell.persistent_width[backward] or (single and half)


def _inference_states(call: RecurrentCall, cell: _Cell, persistent: bool) -> int:
    """Elements of gates, states and inputs that the forward pass without autograd takes."""
    one_direction = call.directions == 1
    if persistent:
        states, samples = (
            5 * cell.gates + 1 if one_direction else 6 * cell.gates + 6,
            cell.persistent_inference,
        )
    else:
        states, samples = cell.gates + 1 if one_direction else 2 * cell.gates + 6, cell.inference
    per_sample = samples[call.directions - 1] * call.layers
    if one_direction and not persistent:
        per_sample -= cell.gates * max(call.rows // call.batch - _GATE_STEPS, 0)
    if one_direction and call.dropout and cell.gates > 1:
        states += 1
    per_row = states * call.hidden + call.inputs
    per_row += call.result * call.directions if call.result < call.hidden else 0
    return call.rows * per_row + per_sample * call.hidden * call.batch


def _training_states(call: RecurrentCall, cell: _Cell, persistent: bool) -> int:
    """Elements that the backward pass takes; the forward pass before it reserves as many."""
    widest = call.directions**2 * max(call.hidden, call.inputs)
    states = 3 * call.directions + (cell.persistent_rows if persistent else 0)
    per_sample = cell.training[call.directions - 1] * call.layers
    if call.directions == 1 and not persistent:
        per_sample -= call.layers
        if call.layers > 1:  # layers run at the same time, each a block of steps behind the one below it
            steps = call.rows // call.batch
            block = next(
                (size for most, size in ((2, 32), (8, 16), (16, 8), (64, 4)) if call.batch <= most), 2
            )
            block = max(block, 8) if steps >= 128 else block
            per_sample -= max(steps - block * call.layers - max(block, 8), 0)
    elif call.layers > 1:
        states += call.directions
    per_row = states * call.hidden + 2 * call.inputs + widest
    return call.rows * per_row + per_sample * call.hidden * call.batch


def _packed_states(call: RecurrentCall, cell: _Cell) -> int:
    """Elements for sequences of several lengths: `rows` are the live ones."""
    widest = max(call.hidden, call.inputs)
    if call.directions == 1:
        states = cell.gates + (call.dropout and call.layers > 1)
        other = call.hidden + widest
    else:
        states = 2 * cell.gates + 4
        other = 4 * (call.hidden + widest) if call.layers > 1 else 2 * (call.hidden + call.inputs + widest)
    per_row = max(states * call.hidden, other if call.train else 0)
    return call.rows * per_row + cell.packed[call.directions - 1] * call.layers * call.hidden * call.batch


# Sequences of several lengths

op("_pack_padded_sequence.default", takes_two_devices=True)  # lengths are on the host


@cuda_kernel(aten._pack_padded_sequence.default)
def _pack_padded_sequence(
    fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """The live rows of each step, end to end, and their number, which stays on the host as the lengths do."""
    given = bind(func, args, kwargs)
    input, lengths = given["input"], given["lengths"].tolist()
    batch_sizes = [sum(length > step for length in lengths) for step in range(max(lengths))]
    shape = [sum(batch_sizes), *input.shape[2:]]
    data = fake(aten.new_empty.default, (input, shape), {})
    return data, torch.tensor(batch_sizes)


@composite(aten._pad_packed_sequence.default)
def _pad_packed_sequence(context: RuleContext, given: BoundArguments) -> tuple[Tensor, Tensor]:
    """A padded tensor filled run by run, and the lengths, on the host."""
    data, batch_sizes = given["data"], given["batch_sizes"].tolist()
    rest = data.shape[1:]
    padded = data.new_full(
        (max(len(batch_sizes), given["total_length"]), batch_sizes[0], *rest), given["padding_value"]
    )
    first_row = first_step = 0
    for batch, run in itertools.groupby(batch_sizes):
        steps = len(list(run))
        rows = data[first_row : first_row + steps * batch].view(steps, batch, *rest)
        padded[first_step : first_step + steps, :batch] = rows
        first_row, first_step = first_row + steps * batch, first_step + steps
    lengths = [sum(size > sample for size in batch_sizes) for sample in range(batch_sizes[0])]
    with disable_dispatch_modes():  # a real tensor: the program may read it
        on_host = torch.tensor(lengths)
    return padded.transpose(0, 1) if given["batch_first"] else padded, on_host


@host_outputs(aten._pack_padded_sequence.default)
def _batch_sizes(call: BoundArguments) -> frozenset[int]:
    return frozenset({1})


# Cells


@cuda_kernel(aten._thnn_fused_lstm_cell.default, aten._thnn_fused_gru_cell.default)
def _cell(fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """native/cuda/RNN.cu: the new states, and what the backward pass needs of the gates. Torch's own fake
    kernels are missing, or ask for biases."""
    state = args[2]
    rows, width = state.shape
    sizes = (1, 1, 4) if func is aten._thnn_fused_lstm_cell.default else (1, 5)
    return tuple(fake(aten.new_empty.default, (state, [rows, size * width]), {}) for size in sizes)


@cuda_kernel(aten._thnn_fused_gru_cell_backward.default)
def _gru_cell_gradients(fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Of both products, the old state and both biases."""
    call = bind(func, args, kwargs)
    rows, width = call["grad_hy"].shape
    shapes = [[rows, 3 * width]] * 2 + [[rows, width]] + [[3 * width]] * 2 * call["has_bias"]
    made = [fake(aten.new_empty.default, (call["workspace"], shape), {}) for shape in shapes]
    return *made, *[None] * (5 - len(made))


@temporaries(aten._thnn_fused_lstm_cell_backward_impl.default, aten._thnn_fused_gru_cell_backward.default)
def _bias_gradients(call: BoundArguments, gpu: GPU) -> list[Temporary]:
    """Sums over the rows, after all else."""
    if not call["has_bias"]:
        return []
    workspace, is_lstm = call["workspace"], "cy" in call
    columns = workspace.shape[1] if is_lstm else workspace.shape[1] // 5 * 3
    gates = torch.empty(len(workspace), columns, dtype=workspace.dtype, device="meta")
    return [*[NEXT_RESULT] * (3 if is_lstm else 5), *reduce(gates, (0,), gpu)]


def _fused_cell(kernel: OpOverload) -> CompositeRule:
    """RNN.cpp: one kernel applies the gates. Autograd keeps both products and what the kernel computed."""

    def rule(context: RuleContext, call: BoundArguments) -> Any:
        input, given, weights = call["input"], call["hx"], (call["w_ih"], call["w_hh"])
        states = [given] if isinstance(given, torch.Tensor) else given
        if any(state.shape != (len(input), weights[1].size(1)) for state in states):
            return NotImplemented  # torch says what is wrong
        if input.size(1) != weights[0].size(1):
            return NotImplemented
        products = [
            torch.matmul(x, weight.t()) for x, weight in zip((input, states[0]), weights, strict=True)
        ]
        *made, _ = kernel(*products, states[-1], call["b_ih"], call["b_hh"])
        return made[0] if given is states[-1] else tuple(made)

    return rule


op("lstm_cell.default", composite=_fused_cell(aten._thnn_fused_lstm_cell.default))
op("gru_cell.default", composite=_fused_cell(aten._thnn_fused_gru_cell.default))
