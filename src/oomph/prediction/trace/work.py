"""Counts what the ops of a step ask of the GPU and of the host: arithmetic, bytes, launches, copies.

Counted is one step only, the last; it is turned into seconds elsewhere (roofline.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch._ops import OpOverload

from oomph.gpus import GPU
from oomph.prediction.cuda.flops import Flops, flops_of
from oomph.prediction.trace import streams
from oomph.prediction.trace.arguments import tensors_in
from oomph.units import MiB

aten = torch.ops.aten
Rate = Literal["half", "tf32", "single", "double"]
Phase = Literal["forward", "backward", "optimizer"]

KERNEL_MARK = "oomph::kernel"  # what a kernel that does nothing on fake tensors tells a trace instead


class Kernel(NamedTuple):
    """One op as the GPU sees it, in program order; or arithmetic on the host, or a wait.

    Waits: "record" notes in an event what its stream has been given so far; "await" lets a stream wait for an
    event; "wait" lets the host wait, for the event if there is one, else for the stream; "wait for all" lets
    it wait for every stream.
    """

    phase: Phase
    engine: bool  # started by autograd's engine, not by Python
    host_ops: int  # ops that the host went through since the kernel before, this one and views included
    host_items: int  # tensors of the lists that they were given, which it goes through one by one
    kind: str  # as Flops have it; "even product", "memory", "strided", "scatter", "kernel", "to host", ...
    rate: Rate
    flops: float
    bytes: int
    launches: int
    tiles: int = 0
    depth: int = 0
    beside: bool = False  # a copy that the host does not wait for
    efficiency: float = 0.0  # of its arithmetic, where the kernel's author has measured it
    stream: int = 0
    event: int = 0


# The first argument says how the result looks, and is not read.
_MADE_LIKE = {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "rand_like"}
_MADE_LIKE |= {"randn_like", "bernoulli_", "random_", "normal_", "uniform_", "exponential_", "zero_", "fill_"}
_MADE_LIKE |= {"copy_", "_foreach_zero_", "_foreach_copy_", "randint_like", "nll_loss_backward"}
# Nothing runs on the GPU.
_FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_", "resize_"}
_FREE |= {"_unsafe_view", "detach", "alias", "lift_fresh", "_reshape_alias", "sym_size", "sym_numel"}
# Of the first argument, only what the result is made of is read.
_GATHERS = {"embedding", "index", "_unsafe_index", "gather", "index_select", "take", "nll_loss_forward"}
# Of the first argument, if it is written in place, only what the last tensor covers is touched.
_SCATTERS = {"index_put_", "_index_put_impl_", "index_add_", "scatter_add_", "scatter_", "index_copy_"}
_SCATTERS |= {"index_put", "index_add", "scatter_add", "scatter", "embedding_dense_backward"}
# Statistics are taken in a first pass over the inputs and applied in a second; gradients of a normalisation's
# own parameters are summed in a pass of their own.
_TWO_PASSES = {
    "native_batch_norm",
    "cudnn_batch_norm",
    "_batch_norm_with_update",
    "native_batch_norm_backward",
    "cudnn_batch_norm_backward",
    "batch_norm_backward",
    "native_layer_norm_backward",
    "native_group_norm",
    "native_group_norm_backward",
}
_COPIES = {"clone", "copy_", "_to_copy"}
# Kernels that an op starts, where it is not one: sorting takes several, and so do gradients of two tensors.
_LAUNCHES = {
    "embedding_dense_backward": 8,
    "index_put": 8,
    "index_put_": 8,
    "_index_put_impl_": 8,
    "sort": 6,
    "topk": 4,
    "nonzero": 4,
    "cumsum": 2,
    "native_layer_norm_backward": 3,
    "native_group_norm_backward": 4,
    "native_batch_norm": 2,
    "native_batch_norm_backward": 2,
    "convolution_backward": 4,
    "slice_backward": 2,
    "select_backward": 2,
    "nll_loss_backward": 2,
    "_scaled_dot_product_flash_attention_backward": 3,
    "_scaled_dot_product_cudnn_attention_backward": 3,
    "_scaled_dot_product_efficient_attention_backward": 3,
}
# The host waits for the result of these: they make tensors whose sizes depend on data.
_WAITS = {"nonzero", "masked_select", "unique_consecutive", "_unique2", "unique_dim"}
# torch's kernels over lists of tensors: elements and tensors that one launch takes at most.
_LIST_ELEMENTS = 320 * 65536
_LIST_TENSORS = 36
HOST_BYTES = MiB  # from here on, the bytes of an op on the host take longer than the op's own overhead


class _Kind(NamedTuple):
    """What there is to know of an op whatever its arguments."""

    free: bool
    first_is_read: bool
    gathers: bool
    scatters: bool
    passes: int
    launches: int
    over_lists: bool
    waits: bool
    elementwise: bool


class WorkMeter:
    """Told of every op by the dispatch mode while `counting`."""

    def __init__(self, gpu: GPU) -> None:
        self.counting = False
        self.kernels: list[Kernel] = []
        self._gpu = gpu
        self._host_ops = 0
        self._host_items = 0
        self._phase = "forward"  # of the op before
        self._streams = streams.now
        self._kinds: dict[OpOverload, _Kind] = {}

    def begin(self, counting: bool) -> None:
        """A step begins: forget the one before."""
        self.counting = counting
        self.kernels.clear()
        self._host_ops = self._host_items = 0
        self._streams = streams.now  # of the trace, which was not there yet when this was made
        self._streams.listener = self._wait_between

    def on_host(self, items: int = 0) -> None:
        """An op that takes the host's time and none of the GPU's: a view, an op on host tensors."""
        self._host_ops += 1
        self._host_items += items

    def op(
        self,
        func: OpOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        given: Sequence[torch.Tensor],
        out: Any,
        phase: str,
    ) -> None:
        """An op on the GPU, after it ran."""
        kind = self._kind(func)
        self._host_ops += 1
        if kind.free:
            return
        results = _results(out)
        launches = kind.launches
        if kind.over_lists:
            written = _written_in_lists(func, args, results)
            self._host_items += len(given)
            elements = sum(tensor.numel() for tensor in written)
            launches = max(-(-len(given) // _LIST_TENSORS), -(-elements // _LIST_ELEMENTS))
        moved = _moved(kind, func, args, given, results)
        counted = flops_of(func, args, kwargs, out)
        if counted is not None and counted.kind == "unaligned product" and _by_fours((*given, *results)):
            counted = counted._replace(kind="even product")
        self._add(phase, counted, moved, launches, _way(kind, given, results))
        if kind.waits:
            self.wait(phase)

    def host_op(
        self, func: OpOverload, args: Sequence[Any], given: Sequence[torch.Tensor], out: Any, phase: str
    ) -> None:
        """An op on host tensors, after it ran: its overhead is told to `on_host`, here it is the bytes'."""
        kind = self._kind(func)
        if kind.free or not self.counting:
            return
        moved = _moved(kind, func, args, given, _results(out))
        if moved >= HOST_BYTES:
            self._append(phase, "host", "single", 0.0, moved, 0)

    def kernel(
        self,
        tensors: Sequence[torch.Tensor],
        phase: str,
        flops: float = 0.0,
        passes: float = 1.0,
        efficiency: float = 0.0,
        kind: str = "kernel",
    ) -> None:
        """A kernel that no op of torch's stands for. `passes`: how often it goes over its tensors."""
        self._host_ops += 1
        moved = int(distinct_bytes(tensors) * passes)
        if flops and tensors:
            rate = self._rate(Flops(flops, tensors[0].dtype, kind))
            self._append(phase, kind, rate, flops, moved, 1, efficiency=efficiency)
        else:
            self._append(phase, kind, "single", 0.0, moved, 1)

    def copy(self, tensor: torch.Tensor, to: Literal["host", "device"], phase: str, beside: bool) -> None:
        """A copy between host and GPU; `beside`: the host goes on while it runs."""
        self._host_ops += 1
        self._append(phase, f"to {to}", "single", 0.0, distinct_bytes((tensor,)), 1, beside=beside)

    def wait(self, phase: str) -> None:
        """The host waits for what it has given to the current stream."""
        self._append(phase, "wait", "single", 0.0, 0, 0)

    def _wait_between(self, kind: str, stream: int, event: int) -> None:
        self._append(self._phase, kind, "single", 0.0, 0, 0, stream=stream, event=event)

    def _kind(self, func: OpOverload) -> _Kind:
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = _kind_of(func)
        return kind

    def _add(self, phase: str, counted: Flops | None, moved: int, launches: int, way: str = "memory") -> None:
        if counted is None:
            self._append(phase, way, "single", 0.0, moved, launches)
        else:
            rate = self._rate(counted)
            self._append(
                phase, counted.kind, rate, counted.flops, moved, launches, counted.tiles, counted.depth
            )

    def _append(
        self,
        phase: str,
        kind: str,
        rate: Rate,
        flops: float,
        moved: int,
        launches: int,
        tiles: int = 0,
        depth: int = 0,
        beside: bool = False,
        efficiency: float = 0.0,
        stream: int | None = None,
        event: int = 0,
    ) -> None:
        if not self.counting:
            return
        self._phase = phase
        # The engine runs without gradients of its own; what a checkpoint recomputes does not.
        engine = phase == "backward" and not torch.is_grad_enabled()
        where: Any = "forward" if phase == "setup" else phase
        host_ops, host_items, self._host_ops, self._host_items = self._host_ops, self._host_items, 0, 0
        self.kernels.append(
            Kernel(
                where,
                engine,
                host_ops,
                host_items,
                kind,
                rate,
                flops,
                moved,
                launches,
                tiles,
                depth,
                beside,
                efficiency,
                self._streams.current.stream_id if stream is None else stream,
                event,
            )
        )

    def _rate(self, counted: Flops) -> Rate:
        dtype = counted.dtype
        if dtype is torch.float64:
            return "double"
        if dtype is torch.bfloat16:
            return "half" if self._gpu.has_bf16 else "single"
        if dtype is not torch.float32:
            return "half"
        if counted.kind.endswith("convolution"):
            allowed = torch.backends.cudnn.allow_tf32
        else:
            allowed = counted.kind.endswith("product") and torch.backends.cuda.matmul.allow_tf32
        return "tf32" if allowed else "single"


def distinct_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the elements that the tensors have, each tensor once, what an expansion repeats once."""
    seen: set[int] = set()
    total = 0
    for tensor in tensors:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            elements = tensor.numel()
            strides = tensor.stride()
            if 0 in strides:
                for size, stride in zip(tensor.shape, strides, strict=True):
                    if stride == 0 and size:
                        elements //= size
            total += elements * tensor.element_size()
    return total


def _moved(
    kind: _Kind,
    func: OpOverload,
    args: Sequence[Any],
    given: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
) -> int:
    """Bytes that an op reads and writes."""
    if kind.over_lists:
        read = given if kind.first_is_read else given[len(args[0]) :]
        return distinct_bytes(read) + distinct_bytes(_written_in_lists(func, args, results))
    written = distinct_bytes(results)
    first = args[0] if args and isinstance(args[0], torch.Tensor) else None
    if first is None or (kind.first_is_read and not kind.gathers and not kind.scatters):
        return distinct_bytes(given) * kind.passes + written
    if func._opname == "nll_loss_backward":  # told the logits only for their shape
        return written
    others = distinct_bytes(tensor for tensor in given if tensor is not first)
    if kind.gathers:
        return others + written + min(distinct_bytes((first,)), written)
    if kind.scatters:
        if any(result is first for result in results):
            return others + 2 * min(written, others)
        return others + distinct_bytes((first,)) + written
    return others + written


def _by_fours(halves: Iterable[torch.Tensor]) -> bool:
    """Whether rows lie a whole number of 4 bytes apart: the least that is fetched beside the arithmetic."""
    return not any(
        step % 2
        for tensor in halves
        for size, step in zip(tensor.shape, tensor.stride(), strict=True)
        if size > 1 and step != 1
    )


def _results(out: Any) -> list[torch.Tensor]:
    return list(tensors_in(out if isinstance(out, (list, tuple)) else (out,), {}))


def _written_in_lists(
    func: OpOverload, args: Sequence[Any], results: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor]:
    """What an op over lists writes: its results, else the first list, and the states of a fused optimizer."""
    written = results or [tensor for tensor in args[0] if isinstance(tensor, torch.Tensor)]
    if func._opname.startswith("_fused_"):
        return [*written, *(tensor for part in args[2:4] for tensor in part)]
    return written


def _way(kind: _Kind, given: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> str:
    """How an op goes over memory: straight, by strides, or wherever an index points to."""
    if kind.scatters:
        return "scatter"
    if kind.elementwise and results:
        elements = results[0].numel()
        for tensor in given:
            count = tensor.numel()
            if count > 1 and (count != elements or not tensor.is_contiguous()):
                return "strided" if results[0].element_size() >= 4 else "strided half"
    return "memory"


def _kind_of(func: OpOverload) -> _Kind:
    name = func._opname
    over_lists = name.startswith(("_foreach_", "_fused_ada", "_fused_sgd", "_amp_foreach_"))
    return _Kind(
        free=name in _FREE or (func.is_view and not func._schema.is_mutable) or func.namespace == "prim",
        first_is_read=name not in _MADE_LIKE,
        gathers=name in _GATHERS,
        scatters=name in _SCATTERS,
        passes=2 if name in _TWO_PASSES else 1,
        launches=_LAUNCHES.get(name, 1),
        over_lists=over_lists,
        waits=name in _WAITS,
        elementwise=torch.Tag.pointwise in func.tags or name in _COPIES,
    )
