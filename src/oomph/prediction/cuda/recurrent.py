"""nn.LSTM, nn.GRU and nn.RNN as cuDNN runs them: one op per call, not one per time step.

The composites dissolve into cells above the dispatch mode, so CUDA's path is taken at autograd's key. A call
makes what _cudnn_rnn makes on a GPU (ATen/native/cudnn/RNN.cpp): the results, a workspace while it runs and a
reserve kept for the backward pass, which in turn makes one flat gradient for all weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

from oomph.gpus import GPU
from oomph.prediction.cuda.temporaries import HOST_OUTPUTS, bind

aten = torch.ops.aten
Tensor = torch.Tensor
OnGpu = Callable[[Any], bool]
Fake = Callable[[OpOverload, Sequence[Any], dict[str, Any]], Any]

_CELLS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_FLATTENED = (torch.float64, torch.float32, torch.float16)  # what nn.RNNBase keeps in one buffer
_DROPOUT_STATE = 2048 * 24  # bytes per multiprocessor: a random number generator for each thread


@dataclass(frozen=True)
class _Call:
    cell: str
    rows: int  # steps x batch; of a packed sequence, the live ones only
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
    item: int  # bytes of an element

    @property
    def flops(self) -> float:
        """Of one pass: every weight meets every row."""
        return 2.0 * self.rows * self.weights


def _nothing(*tensors: Tensor | None, **figures: Any) -> None:
    return None


def register(library: Any, on_gpu: OnGpu, gpu: GPU, count_kernel: Callable[..., None] = _nothing) -> None:
    """Add CUDA's path of every recurrent composite to an IMPL library of "aten"."""
    dropout_state: list[Tensor] = []  # made at the first dropout, then kept for good

    def path(cell: str, whole: OpOverload) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            given = bind(whole, args, {})
            input = given["input"] if "input" in given else given["data"]
            if not on_gpu(input):
                return whole.decompose(*args)
            hidden = list(given["hx"]) if cell == "lstm" else [given["hx"]]
            if torch.is_autocast_enabled("cuda"):  # always to half, whatever autocast's own type is
                input, *hidden = (tensor.to(torch.float16) for tensor in (input, *hidden))
            call = _call(cell, given, input, hidden)
            if call.dropout and not dropout_state:
                size = gpu.multiprocessors * _DROPOUT_STATE
                dropout_state.append(input.detach().new_empty(size, dtype=torch.uint8))
            cell_state = hidden[1] if cell == "lstm" else None
            tensors = (input, hidden[0], cell_state, *given["params"])
            output, hy, cy = _CudnnRnn.apply(call, count_kernel, *tensors)
            return (output, hy, cy) if cell == "lstm" else (output, hy)

        return run

    for cell in _CELLS:
        for overload in ("input", "data"):
            kernel = path(cell, getattr(getattr(aten, cell), overload))
            library.impl(f"{cell}.{overload}", kernel, "AutogradCPU")

    def unpack(
        data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
    ) -> tuple[Tensor, Tensor]:
        if not on_gpu(data):
            return aten._pad_packed_sequence.default.decompose(
                data, batch_sizes, batch_first, padding_value, total_length
            )
        return _unpack(data, batch_sizes.tolist(), batch_first, padding_value, total_length)

    library.impl("_pad_packed_sequence", unpack, "AutogradCPU")


def flatten_parameters(on_gpu: OnGpu) -> Callable[[nn.RNNBase], None]:
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


def _call(cell: str, given: dict[str, Any], input: Tensor, hidden: Sequence[Tensor]) -> _Call:
    return _Call(
        cell=cell,
        rows=input.numel() // max(int(input.shape[-1]), 1),
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
        item=input.element_size(),
    )


def _views(flat: Tensor, weights: Sequence[Tensor]) -> Iterator[Tensor]:
    start = 0
    for weight in weights:
        yield flat[start : start + weight.numel()].view(weight.shape)
        start += weight.numel()


def _share_storage(weights: Sequence[Tensor]) -> bool:
    return len({weight.untyped_storage()._cdata for weight in weights}) == 1


class _CudnnRnn(torch.autograd.Function):
    """The allocations of aten::_cudnn_rnn and its backward, in their order."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        call: _Call,
        count_kernel: Callable[..., None],
        input: Tensor,
        hx: Tensor,
        cx: Tensor | None,
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        # Weights that autocast casts, or that are not in one buffer, are copied into one of this call's own.
        ready = weights[0].dtype == input.dtype and _share_storage(weights)
        flat = None if ready else input.new_empty(call.weights)
        x = _steps_first(call, input)
        output = x.new_empty((*x.shape[:-1], call.directions * call.result))
        hy = torch.empty_like(hx)
        cy = torch.empty_like(cx) if cx is not None else None
        workspace = x.new_empty(workspace_bytes(call), dtype=torch.uint8)
        reserve = x.new_empty(reserve_bytes(call), dtype=torch.uint8) if call.train else None
        del workspace, x
        output = output.transpose(0, 1) if call.swapped else output
        ctx.call, ctx.count_kernel = call, count_kernel
        count_kernel(input, output, *weights, flops=call.flops, kind="recurrent")
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(input, hx, cx, output, reserve, flat, *weights)
        return output, hy, cy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # type: ignore[override]
        call: _Call = ctx.call
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
        workspace = x.new_empty(workspace_bytes(call), dtype=torch.uint8)
        del workspace, x, dy
        ctx.count_kernel(input, dx, *weights, flops=call.flops, kind="recurrent")
        dweights: list[Tensor | None] = [None] * len(weights)
        if any(ctx.needs_input_grad[5:]):
            x = _steps_first(call, input)
            flat = x.new_zeros(call.weights)
            workspace = x.new_empty(workspace_bytes(call), dtype=torch.uint8)
            del workspace, x
            ctx.count_kernel(input, output, flat, flops=call.flops, kind="recurrent")
            # Under autocast the copies' backward makes float32 gradients, one by one.
            parts = zip(_views(flat, weights), weights, strict=True)
            dweights = [part.to(weight.dtype) for part, weight in parts]
        del made
        return None, None, dx.transpose(0, 1) if call.swapped else dx, dhx, dcx, *dweights


def _steps_first(call: _Call, tensor: Tensor) -> Tensor:
    """As cuDNN reads it: steps first and contiguous, a copy if it was not."""
    return (tensor.transpose(0, 1) if call.swapped else tensor).contiguous()


def reserve_bytes(call: _Call) -> int:
    """What the forward pass leaves for the backward pass; to the byte as measured, projections included."""
    one = call.rows * call.hidden * call.directions
    layer = one * {"lstm": 5, "gru": 6}.get(call.cell, 1)  # gates and states
    if call.result < call.hidden:
        layer += one + one * call.result // call.hidden  # the state before and after the projection
    between = call.layers - 1  # outputs of the inner layers, and one bit for each that dropout may drop
    masks = one * call.directions * between // 8 if call.dropout else 0
    return (layer * call.layers + one * between) * call.item + masks + 256


def workspace_bytes(call: _Call) -> int:
    """cuDNN's choice, fitted to what an H200 measured for 45 networks: within 15 % of most of them.

    Copies of the input and the weights, one tensor of states per layer and four more, and a part that grows
    as the cell gets narrower. Some single-layer networks, most of them in half precision, run a persistent
    kernel that takes two or three times as much.
    """
    state = call.rows * call.hidden * call.directions
    input = call.rows * call.inputs
    states = 4 + call.layers + 3 * (call.directions - 1)
    narrow = min(32, 4096 // call.hidden) << 20
    if call.packed:  # one network measured: two tensors of states less, and no such part
        states, narrow = states - 2, 0
    return (input + call.weights + states * state) * call.item + narrow


def pack_padded_sequence(
    fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """The live rows of each step, end to end, and their number, which stays on the host as the lengths do."""
    given = bind(func, args, kwargs)
    input, lengths = given["input"], given["lengths"].tolist()
    batch_sizes = [sum(length > step for length in lengths) for step in range(max(lengths))]
    shape = [sum(batch_sizes), *input.shape[2:]]
    data = fake(aten.new_empty.default, (input, shape), {})
    return data, torch.tensor(batch_sizes)


def _unpack(
    data: Tensor, batch_sizes: list[int], batch_first: bool, padding: float, total_length: int
) -> tuple[Tensor, Tensor]:
    """A padded tensor filled run by run, and the lengths, on the host."""
    rest = data.shape[1:]
    padded = data.new_full((max(len(batch_sizes), total_length), batch_sizes[0], *rest), padding)
    first_row = first_step = 0
    for batch, run in itertools.groupby(batch_sizes):
        steps = len(list(run))
        rows = data[first_row : first_row + steps * batch].view(steps, batch, *rest)
        padded[first_step : first_step + steps, :batch] = rows
        first_row, first_step = first_row + steps * batch, first_step + steps
    lengths = [sum(size > sample for size in batch_sizes) for sample in range(batch_sizes[0])]
    with _disable_current_modes():  # a real tensor: the program may read it
        on_host = torch.tensor(lengths)
    return padded.transpose(0, 1) if batch_first else padded, on_host


HOST_OUTPUTS[aten._pack_padded_sequence.default] = lambda args, kwargs: frozenset({1})  # the batch sizes
