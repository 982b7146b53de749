"""Runs each aten op on fake tensors and records what it would allocate on the GPU.

Ops that do not touch the fake GPU are host ops. They run for real where they are small, so that host code
works as always: data loaders, seeds and `.item()` on the host give what they give outside a trace.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any

import torch

from oomph.errors import UnknownOp, place
from oomph.prediction.ops.composites import run_composite
from oomph.prediction.ops.matmul import CublasWorkspaces
from oomph.prediction.ops.registry import (
    FACTS,
    OpFacts,
    check_dtypes,
    lacks_deterministic_kernel,
    temporaries_of,
)
from oomph.prediction.ops.rules import (
    HALF,
    NEXT_RESULT,
    Estimated,
    Search,
    Temporary,
    bind,
    is_program_error,
    op_name,
    program_error,
)
from oomph.prediction.patches import Patches
from oomph.prediction.tracer.attribution import find_site
from oomph.prediction.tracer.fast_path import FastPath, broadcasts_into, described_call
from oomph.prediction.tracer.gradient_reuse import GradientReuse
from oomph.prediction.tracer.placement import PlacementMode, without_cuda
from oomph.prediction.tracer.process_groups import take_values_of_ranks
from oomph.prediction.tracer.sparse import SparseTensors
from oomph.prediction.tracer.streams import DEVICE
from oomph.prediction.tracer.tracer import Tracer
from oomph.prediction.tracer.values import OpCall, results_like_first_argument
from oomph.prediction.tracer.work import MODE_COST, tensors_in
from oomph.torch_internals import (
    FAKE_MODE_KEY,
    NO_KERNEL,
    DynamicOutputShapeException,
    FakeTensor,
    OpOverload,
    TorchDispatchMode,
    UnsupportedOperatorException,
    current_autograd_node,
    disable_torch_function,
    get_dispatch_mode,
    is_composite,
    is_dtensor,
    python_kernels,
    tree_map_only,
)

aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_CPU = torch.device("cpu")

_FAKE = (FakeTensor,)
_INT64 = {"dtype": torch.int64}
_FEW_TENSORS = 4  # an op on more of them goes through a list

# Above this, a host tensor that the program asks for is fake. Below it, host data is real.
REAL_BYTES = 4 << 20
_SMALL_INPUT_BYTES = 4 << 10  # two real inputs smaller than this cannot make a result that matters


class WrongDevice(RuntimeError):
    """What CUDA raises when an op mixes devices; keeps the stray tensor."""

    def __init__(self, message: str, tensor: torch.Tensor) -> None:
        super().__init__(message)
        self.tensor = tensor


# In a traceback it is what the program would have met on a GPU.
WrongDevice.__name__ = WrongDevice.__qualname__ = "RuntimeError"
WrongDevice.__module__ = "builtins"


class DispatchMode(TorchDispatchMode):
    """Sits below autograd and autocast: sees exactly the aten ops that a GPU would run."""

    def __init__(self, tracer: Tracer, placement: PlacementMode) -> None:
        super().__init__()
        self.tracer = tracer
        self.placement = placement
        self.workspaces = CublasWorkspaces(tracer)
        self.fast_path = FastPath(tracer.fake_mode)
        self._small_host_calls: set[Any] = set()  # with small results
        self.gradient_reuse = GradientReuse(tracer)
        self._sparse = SparseTensors(tracer, self._run)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Dynamo compiles under this mode."""
        return True

    def _dispatch(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is _DEVICE:  # autograd asks this of fake tensors all the time
            return _CPU
        tracer = self.tracer
        if tracer.call.redispatched:
            tracer.call.redispatched = False
            return NotImplemented
        if get_dispatch_mode(FAKE_MODE_KEY) is not None:  # DTensor asks for the shape of a whole result
            return func(*args, **{name: without_cuda(value) for name, value in (kwargs or {}).items()})
        if types != _FAKE and any(not issubclass(kind, FakeTensor) for kind in types):
            return self._run_subclass(func, types, args, dict(kwargs or {}))
        if python_kernels and func.name() in python_kernels:
            return self._run_python_kernel(func, args, kwargs or {})
        if tracer.call.below_autograd and is_composite(func):
            with self:
                return run_composite(tracer.rule_context, func, args, kwargs or {})
        if not types and not kwargs and tracer.call.place is None and _is_small_host_op(args):
            tracer.work.count_host_op()
            tracer.record_host_node(args)
            return func(*args)
        frame = sys._getframe().f_back  # of the op, which is a function in Python; of none in a thread of C++
        if tracer.work.counting and _is_redispatched_by_python(frame):
            tracer.work.count_hooks(MODE_COST)
        given = dict(kwargs) if kwargs else {}
        with tracer.lock, disable_torch_function():
            tracer.call.inside_dispatch += 1
            outer = tracer.caller, tracer.line
            tracer.caller, tracer.line = frame, None
            try:
                device = given.get("device")
                if device is not None and device.type == "cuda":  # a decomposition of torch's asked for it
                    given["device"] = _CPU
                    with tracer.placing("gpu"):
                        return self._run(func, args, given)
                if (
                    device is not None
                    and device.type == "meta"
                    and args
                    and isinstance(args[0], torch.Tensor)
                ):
                    return func(_without_memory(args[0]), *args[1:], **given)
                return self._run(func, args, given)
            finally:
                tracer.caller, tracer.line = outer
                tracer.call.inside_dispatch -= 1

    def _run_subclass(
        self, func: OpOverload, types: Sequence[type], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Have a tensor subclass run the op on its inner tensors, which come back as ops of their own."""
        device = kwargs.get("device")
        if device is not None and device.type == "cpu" and self.tracer.call.place != "host":
            # Not the program's: autograd's formulas ask for the device of a tensor, to torch the host.
            kwargs["device"] = DEVICE if any(map(self.tracer.on_gpu, tensors_in(args, {}))) else device
        if any(map(is_dtensor, types)):  # is dispatched in C++
            with self._below_autograd():
                try:
                    self.tracer.call.redispatched = True
                    return func(*args, **kwargs)
                finally:
                    self.tracer.call.redispatched = False
        with self.placement.for_program(), self._below_autograd():
            for kind in types:
                if not issubclass(kind, FakeTensor):
                    result = kind.__torch_dispatch__(func, types, args, kwargs)  # type: ignore[attr-defined]
                    if result is not NotImplemented:
                        return result
        names = ", ".join(kind.__name__ for kind in types)
        raise program_error(TypeError(f"no implementation of {op_name(func)} for {names}"))

    def _run_python_kernel(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a library's kernel for CUDA that is written in Python: what it allocates is recorded.

        It may launch what cannot run on fake tensors; then the op's fake kernel takes its place.
        """

        def kernel() -> Any:
            with self.placement.for_program(), self._below_autograd():
                return python_kernels[func.name()](*args, **kwargs)

        def without() -> Any:
            del python_kernels[func.name()]
            with self:
                return func(*args, **kwargs)

        return self.tracer.guard.call("temporaries", func, kernel, without)

    @contextlib.contextmanager
    def _below_autograd(self) -> Iterator[None]:
        """Dispatch again from inside of an op. Composite ops arrive whole here."""
        call = self.tracer.call
        call.below_autograd += 1
        try:
            with self:
                yield
        finally:
            call.below_autograd -= 1

    def _run(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        tracer = self.tracer
        facts = FACTS[func]
        if facts.is_view and isinstance(args[0], FakeTensor) and args[0].layout is torch.strided:
            # Nothing is allocated.
            tracer.guard.call("source line", func, tracer.record_autograd_node, _nothing)
            tracer.work.count_host_op()
            out = self._fake(func, args, kwargs)
            if not args[0].dtype.is_floating_point or args[0] in tracer.values:
                self._propagate_values(func, args, kwargs, args[:1], out)
            if tracer.phase == "backward":
                tracer.guard.call("gradient label", func, partial(tracer.mark_gradient, out), _nothing)
            return out
        if facts.is_kernel:
            return self._count_kernel(*args)
        tensors = list(tensors_in(args, kwargs))
        layout = next((each.layout for each in tensors if each.layout is not torch.strided), None)
        if func is aten._embedding_bag_backward.default and args[9]:
            return self._sparse.embedding_bag_backward(*args)
        if layout is not None or facts.makes_sparse:
            if tracer.call.place != "gpu" and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
                return func(*args, **kwargs)
            return self._sparse.run(func, args, kwargs)
        gpu = [tensor for tensor in tensors if tracer.on_gpu(tensor)]
        if func is aten._efficientzerotensor.default or (
            len(gpu) < len(tensors) and "device" not in kwargs and any(map(_is_meta, tensors))
        ):
            return func(*args, **kwargs)  # without memory on any device
        if not gpu and tracer.call.place != "gpu" and not (not tensors and tracer.called_by_autograd()):
            return self._run_host_op(func, args, kwargs, tensors)
        if gpu and len(gpu) < len(tensors) and not facts.takes_two_devices:
            self._check_devices(func, tensors)
        if facts.reads:
            tracer.synchronize()
            return self._read(func, args, kwargs)
        if func is aten.copy_.default and not isinstance(args[0], FakeTensor):
            self._count_copy(func, args, kwargs, tensors)
            return self._copy_into_real(args[0], args[1])
        if len(gpu) < len(tensors) and any(map(_is_host_subclass, tensors)):
            args, kwargs = tree_map_only(torch.Tensor, _without_subclass, (args, kwargs))
            tensors = list(tensors_in(args, kwargs))
        if func is aten.masked_scatter_backward.default:
            return self._masked_scatter_backward(*args)
        if func is aten.masked_select.default:
            func, args = aten.index.Tensor, self._indexed_by_mask(*args)
        if facts.takes_masks and any(map(_is_mask, args[1])):
            return self._run_with_masks(func, args, kwargs)
        return self._run_gpu_op(func, args, kwargs, tensors, gpu)

    def _read(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What the host reads of tensors whose values may not be known."""
        estimates, fallback = self.tracer.estimates, bool
        self.tracer.reads += 1
        rule: Any = partial(estimates.equality, func, args, kwargs)
        if func is aten._local_scalar_dense.default:
            rule = partial(estimates.scalar, args[0])
            fallback = torch.ones((), dtype=args[0].dtype).item  # type: ignore[assignment]
        return self.tracer.guard.call("value", func, rule, fallback)

    # -- masks ----------------------------------------------------------------------------------------

    def _indexed_by_mask(self, tensor: torch.Tensor, mask: torch.Tensor) -> Sequence[Any]:
        """masked_select as CUDA does it (native/cuda/IndexKernel.cpp): both are expanded, then indexed."""
        shape = list(torch.broadcast_shapes(tensor.shape, mask.shape) or (1,))
        expanded = [self._fake(aten.expand.default, (each, shape), {}) for each in (tensor, mask)]
        self._propagate_values(aten.expand.default, (mask, shape), {}, [mask], expanded[1])
        return expanded[0], [expanded[1]]

    def _masked_scatter_backward(
        self, grad: torch.Tensor, mask: torch.Tensor, sizes: Sequence[int]
    ) -> torch.Tensor:
        """The gradient of the source: what the mask selects, and zeros for the rest (native/
        TensorAdvancedIndexing.cpp). The mask selects no more elements than the source has."""
        args = self._indexed_by_mask(grad, mask)
        elements = math.prod(sizes)
        self.tracer.estimates.state_selected(args[1][0], elements, at_most=True)
        selected = self._run_with_masks(aten.index.Tensor, args, {})
        if selected.numel() < elements:
            rest = elements - selected.numel()
            zeros = self._run(aten.new_zeros.default, (selected, [rest]), {})
            selected = self._run(aten.cat.default, ([selected, zeros], 0), {})
        return self._run(aten.view.default, (selected, sizes), {})

    def _run_with_masks(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Index or assign by masks. CUDA makes index lists of them with nonzero (native/IndexingUtils.h).

        An assignment that sorts frees the lists once they are one linear index (native/cuda/Indexing.cu).
        """
        call = bind(func, args, kwargs)
        assigns = FACTS[func].assigns_by_index
        if assigns and self._is_masked_fill(call):
            tensors = list(tensors_in(args, kwargs))
            return self._run_gpu_op(func, args, kwargs, tensors, tensors)
        sorts = assigns and (call["accumulate"] or torch.are_deterministic_algorithms_enabled())
        if assigns:
            self._state_selected(call)
        indices: list[Any] = []
        for index in args[1]:
            if not _is_mask(index):
                indices.append(index)
                continue
            self._check_mask(args[0], index, len(indices))
            found = self._run_gpu_op(aten.nonzero.default, (index,), {}, [index], [index])
            if found.shape[1:] != (index.dim(),):  # the rule for nonzero failed
                found = self._fake(aten.new_empty.default, (index, [index.numel(), index.dim()]), _INT64)
            columns = self._run(aten.unbind.int, (found, 1), {})
            if sorts:
                self._record_temporaries(op_name(func), [found.shape[0] * 8] * 3)
                columns = [self._fake(aten.empty_like.default, (column,), {}) for column in columns]
            indices += columns
            del found, columns
        plain = (args[0], indices, *args[2:])
        tensors = list(tensors_in(args if assigns else plain, kwargs))
        if assigns:  # the values may be fewer than the mask is assumed to select
            return self._run_gpu_op(func, args, kwargs, tensors, tensors, plain)
        return self._run_gpu_op(func, plain, kwargs, tensors, tensors)

    def _gradient_of_assigned(self, out: torch.Tensor) -> torch.Tensor:
        """The gradient of the values in x[indices] = values, which are as many as there are indices.

        Where both numbers are guesses they may differ; autograd wants as many gradients as values.
        """
        node = current_autograd_node()
        if node is None or not node.name().startswith("IndexPutBackward"):
            return out
        made_values, number = node.next_functions[1]
        if made_values is None:
            return out
        shape = made_values._input_metadata[number].shape
        if broadcasts_into(shape, out.shape):
            return out
        return self._fake(aten.new_empty.default, (out, list(shape)), {})

    def _is_masked_fill(self, call: Mapping[str, Any]) -> bool:
        """A number of the host, assigned by one mask, is filled in (native/TensorAdvancedIndexing.cpp). So is
        the zero in its place in the gradient."""
        values, node = call["values"], current_autograd_node()
        number = values.numel() == 1 and not self.tracer.on_gpu(values)
        if node is not None and node.name().startswith("IndexPutBackward"):
            number = values.dim() == 0 and node.next_functions[1][0] is None
        given = [index for index in call["indices"] if index is not None]
        return number and not call["accumulate"] and len(given) == 1

    def _state_selected(self, call: Mapping[str, Any]) -> None:
        """x[mask] = values: the mask selects as many elements as there are values."""
        target, values = call["self"], call["values"]
        if len(call["indices"]) != 1 or values.dim() != 1 + target.dim() - call["indices"][0].dim():
            return
        if values.shape[0] > 1:
            self.tracer.estimates.state_selected(call["indices"][0], values.shape[0])

    def _check_mask(self, tensor: torch.Tensor, mask: torch.Tensor, first: int) -> None:
        shape = tensor.shape[first : first + mask.dim()]
        if shape != mask.shape:
            raise program_error(
                IndexError(
                    f"The shape of the mask {list(mask.shape)} at index {first} does not match the shape of "
                    f"the indexed tensor {list(tensor.shape)}"
                )
            )

    # -- ops on the GPU -------------------------------------------------------------------------------

    def _run_gpu_op(
        self,
        func: OpOverload,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        tensors: Sequence[torch.Tensor],
        gpu: Sequence[torch.Tensor],
        expanded: Sequence[Any] | None = None,
    ) -> Any:
        """`expanded`: the arguments as the rule for temporaries sees them, with index lists for masks."""
        tracer, guard = self.tracer, self.tracer.guard
        facts = FACTS[func]
        if facts.same_dtype:
            guard.call("dtype check", func, partial(check_dtypes, facts, args, kwargs), _nothing)
        first_event = len(tracer.recorder.events)
        guard.call("source line", func, tracer.record_autograd_node, _nothing)
        if facts.results is not None:
            rule = partial(facts.results, self._fake, func, args, kwargs)
            out = guard.call("results", func, rule, partial(self._general_results, func, args, kwargs))
        elif (
            facts.reuses_first
            and tracer.phase == "backward"
            and self.gradient_reuse.writes_into_first(facts, args)
            and tracer.called_by_autograd()
        ):
            out = args[0]
        else:
            out = self._fake(func, args, kwargs)
        if func is aten.index.Tensor and tracer.phase == "backward" and tracer.estimates.sizes_assumed:
            out = guard.call("results", func, partial(self._gradient_of_assigned, out), lambda: out)
        self._propagate_values(func, args, kwargs, tensors, out)
        if func.namespace == "c10d":
            guard.call("values", func, partial(take_values_of_ranks, tracer.values, func, args), _nothing)
        tracer.estimates.note_effects(func, args)
        is_move = func is aten._to_copy.default and not gpu
        if not is_move and tracer.phase == "forward" and not tracer.modules.inside_model:
            tracer.batches.record_use(tensors, in_loss=True)
        if func is aten._pack_padded_sequence.default and tracer.batch_sizes is not None:
            lengths = tracer.values.known(args[1])
            if lengths is not None:
                tracer.batch_sizes.check_lengths(args[0], lengths, args[2])
        if facts.looks_up is not None and tracer.phase == "forward":
            guard.call("index check", func, partial(self._check_index, facts, args), _nothing)
        if func is aten.embedding.default:
            guard.call("rows", func, partial(tracer.record_embedding, args[0], args[1]), _nothing)
        if tracer.call.place != "host":
            self._record_results(facts, expanded or args, kwargs, tensors, out)
            if is_move:
                tracer.record_move(args[0], out)
            if facts.nondeterministic is not None:
                self._check_deterministic(facts, args, kwargs)
        if tracer.work.counting and not self._count_copy(func, args, kwargs, gpu):
            rule = partial(tracer.work.op, func, args, kwargs, tensors, out, tracer.phase)
            guard.call("flops", func, rule, partial(tracer.work.kernel, tensors, tracer.phase, kind="memory"))
        if tracer.phase == "backward":
            guard.call("gradient label", func, partial(tracer.mark_gradient, out), _nothing)
        if tracer.log is not None:
            phase = f"step {tracer.step} {tracer.phase}" if tracer.step else "setup"
            tracer.log.add(func, out, phase, first_event, len(tracer.recorder.events))
        return out

    def _propagate_values(
        self,
        func: OpOverload,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        tensors: Sequence[torch.Tensor],
        out: Any,
    ) -> None:
        values, call = self.tracer.values, OpCall(func, args, kwargs)
        follow_floats = self.tracer.phase in ("setup", "forward")
        rule = partial(values.propagate, call, tensors, out, follow_floats)
        if self.tracer.phase == "optimizer":
            rule = partial(values.update, call, tensors, out)
        self.tracer.guard.call("values", func, rule, partial(values.invalidate, call))

    def _record_results(
        self,
        facts: OpFacts,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        given: Sequence[torch.Tensor],
        out: Any,
    ) -> None:
        """Record the op's results, the workspaces it is the first to need, and its temporaries."""
        tracer, guard = self.tracer, self.tracer.guard
        func, name = facts.func, facts.name
        results = out if isinstance(out, (list, tuple)) else (out,)
        if out is None and tracer.phase == "forward":  # a foreach op that wrote into its first list
            results = tuple(args[:1])
        if (host_outputs := facts.host_outputs) is not None:
            on_host = guard.call(
                "host results", func, lambda: host_outputs(bind(func, args, kwargs)), frozenset
            )
            results = [result for index, result in enumerate(results) if index not in on_host]
        if facts.allocation_order is not None:
            results = [results[index] for index in facts.allocation_order]
        sizes: list[Temporary] = []
        if facts.temporaries is not None:
            rule = partial(temporaries_of, func, args, kwargs, tracer.gpu)
            sizes = guard.call("temporaries", func, rule, list)

        def record(tensor: torch.Tensor) -> None:
            if any(tensor is known for known in given):  # written in place, wherever it is
                tracer.record_in_place(tensor, name)
            else:
                tracer.record_result(tensor, name, given)

        made = list(tensors_in(results, {}))
        first = max(0, len(made) - sizes.count(NEXT_RESULT))
        for tensor in made[:first]:
            record(tensor)
        if facts.uses_cublas is not None:
            guard.call("workspace", func, partial(self.workspaces.allocate, facts, args), _nothing)
        self._record_temporaries(name, sizes, map(record, made[first:]))

    def _record_temporaries(
        self, name: str, sizes: Sequence[Temporary], results: Iterator[None] | None = None
    ) -> None:
        """`results`: records a result of the op with each step."""
        live = []
        for size in sizes:
            if size is None:  # NEXT_RESULT
                next(results or iter(()), None)
            elif isinstance(size, Search):
                self.tracer.record_search(size)
            elif size > 0 or isinstance(size, Estimated):
                live.append(self.tracer.record_workspace(size, name))
            else:
                freed = next((allocation for allocation in live if allocation.bytes == -size), None)
                if freed is not None:
                    live.remove(freed)
                    self.tracer.recorder.record_free(freed)
        for allocation in reversed(live):  # as C++ destroys local variables
            self.tracer.recorder.record_free(allocation)

    def _check_deterministic(self, facts: OpFacts, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        func, rule = facts.func, partial(lacks_deterministic_kernel, facts, args, kwargs)
        if self.tracer.guard.call("determinism check", func, rule, bool):
            site = self.tracer.attribution()[0]
            where = "" if site is None else f" of {place(site.file, site.line)}"
            raise program_error(RuntimeError(f"{func.overloadpacket.__name__}{where}{NO_KERNEL}"))

    def _check_index(self, facts: OpFacts, args: Sequence[Any]) -> None:
        """Raise where CUDA's kernels assert: for an index that is known, and beyond the table."""
        assert facts.looks_up is not None
        table = args[0]
        for dim, index in facts.looks_up(*args):
            if index is None or index.dtype not in (torch.int64, torch.int32) or not index.numel():
                continue
            found = self.tracer.values.of(index)
            if found.known and found.values.numel() and int(found.values.max()) >= table.shape[dim]:
                raise program_error(
                    IndexError(
                        f"index {int(found.values.max())} is out of range for dimension {dim} of size "
                        f"{table.shape[dim]} ({facts.name} of a tensor of shape {list(table.shape)})"
                    )
                )

    def _check_devices(self, func: OpOverload, tensors: list[torch.Tensor]) -> None:
        """Raise as CUDA does when an op mixes devices. Host scalars are allowed, as on CUDA.

        A scalar that is expanded is allowed, too: the zeros of a tangent that autograd found undefined.
        """
        for index, tensor in enumerate(tensors):
            if any(tensor.stride()) and not self.tracer.on_gpu(tensor):
                error = WrongDevice(
                    "Expected all tensors to be on the same device, but found at least two devices, "
                    f"cuda:0 and {tensor.device}! ({op_name(func)}: tensor argument "
                    f"{index + 1}, of shape {list(tensor.shape)}, is on {tensor.device})",
                    tensor,
                )
                raise program_error(error)

    # -- work -----------------------------------------------------------------------------------------

    def _count_copy(
        self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], gpu: Sequence[torch.Tensor]
    ) -> bool:
        """Count the op if it is a copy between host and GPU."""
        if func is aten.copy_.default:
            target, source = args[:2]
            to_gpu, from_gpu = self.tracer.on_gpu(target), self.tracer.on_gpu(source)
            non_blocking = bool(args[2]) if len(args) > 2 else bool(kwargs.get("non_blocking"))
        elif func is aten._to_copy.default:
            source, from_gpu = args[0], bool(gpu)
            to_gpu = self.tracer.call.place == "gpu" or (self.tracer.call.place is None and from_gpu)
            non_blocking = bool(kwargs.get("non_blocking"))
        else:
            return False
        if to_gpu == from_gpu:
            return False
        self.tracer.work.copy(source, "device" if to_gpu else "host", self.tracer.phase, non_blocking)
        return True

    def _count_kernel(
        self, tensors: Sequence[torch.Tensor], name: str, flops: float, passes: float, efficiency: float
    ) -> None:
        if self.tracer.work.counting:
            self.tracer.work.kernel(tensors, self.tracer.phase, flops, passes, efficiency)

    # -- fake kernels ---------------------------------------------------------------------------------

    def _fake(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The op on fake tensors. What torch's own fake kernels raise is the program's mistake."""
        # Where the fast path itself fails, the general way decides.
        for run in (self.fast_path.run, self.fast_path.run_general):
            try:
                return run(func, args, kwargs)
            except DynamicOutputShapeException:
                break
            except Exception as error:
                if isinstance(error, NotImplementedError) and FACTS[func].half_on_cuda_only:
                    return self._faked_in_float32(func, args, kwargs)
                if is_program_error(error):
                    raise
                failure = error
        else:
            raise self._refusal(func, failure, tensors_in(args, kwargs))
        self.tracer.reads += 1
        rule = partial(self.tracer.estimates.data_dependent_result, self._fake, func, args, kwargs)
        general = partial(results_like_first_argument, self._fake, func, args)
        return self.tracer.guard.call("results", func, rule, general)

    def _refusal(self, func: OpOverload, failure: Exception, tensors: Iterable[torch.Tensor]) -> Exception:
        """What torch's fake kernel raised: the program's mistake, or an op that only CUDA's kernels know."""
        unknown = isinstance(failure, UnsupportedOperatorException)
        if not unknown and not str(failure).startswith("Could not run '"):
            return program_error(failure)
        if any(map(self.tracer.on_gpu, tensors)):
            return UnknownOp(op_name(func), find_site(self.tracer.boundary)[0])
        # The rest of the text is the list of all kernels.
        return program_error(NotImplementedError(str(failure).partition(" This could be")[0]))

    def _faked_in_float32(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Torch fakes these ops by the CPU's kernels, which lack the types of half precision."""
        half = next(tensors_in(args, kwargs)).dtype

        def cast(to: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dtype not in (torch.float32, *HALF):
                return tensor
            return self._fake(aten._to_copy.default, (tensor,), {"dtype": to})

        args, kwargs = tree_map_only(torch.Tensor, partial(cast, torch.float32), (args, kwargs))
        return tree_map_only(torch.Tensor, partial(cast, half), self._fake(func, args, kwargs))

    def _general_results(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """In place of a CUDA kernel's rule: the CPU's results, or else results like the first tensor."""
        try:
            return self.tracer.fake_mode.__torch_dispatch__(func, (), args, kwargs)
        except (DynamicOutputShapeException, NotImplementedError, TypeError):  # torch cannot fake the op
            return results_like_first_argument(self._fake, func, args)
        except Exception as error:
            raise program_error(error)  # noqa: B904 (the same exception)

    # -- ops on the host ------------------------------------------------------------------------------

    def _run_host_op(
        self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]
    ) -> Any:
        work = self.tracer.work
        self.tracer.record_host_node(tensors)
        if not work.counting:
            return self._host_result(func, args, kwargs, tensors)
        work.count_host_op(len(tensors) if len(tensors) > _FEW_TENSORS else 0)
        out = self._host_result(func, args, kwargs, tensors)
        work.host_op(func, args, tensors, out, self.tracer.phase)
        return out

    def _host_result(
        self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]
    ) -> Any:
        """Fake, and not counted, where it is large or made of fake tensors; else real."""
        if any(isinstance(tensor, FakeTensor) for tensor in tensors):
            if FACTS[func].reads:
                return self._read(func, args, kwargs)
            if func is aten.copy_.default and not isinstance(args[0], FakeTensor):
                return self._copy_into_real(args[0], args[1])
            if FACTS[func].initialises:
                self.tracer.draw_on_host(args[0], lambda real: func(real, *args[1:], **kwargs))
            out = self._fake(func, *tree_map_only(torch.Tensor, _without_graph, (args, kwargs)))
            self._propagate_values(func, args, kwargs, tensors, out)
            return out
        if _may_be_large(func, kwargs, tensors):
            call = described_call(func, args, kwargs)
            if call in self._small_host_calls:
                return func(*args, **kwargs)
            try:
                fake = self._fake(func, args, kwargs)
            except Exception:  # real data may serve where fake data does not
                return func(*args, **kwargs)
            results = fake if isinstance(fake, (list, tuple)) else (fake,)
            if any(_bytes_of(result) > REAL_BYTES for result in tensors_in(results, {})):
                self._propagate_values(func, args, kwargs, tensors, fake)
                return fake
            if call is not None:
                self._small_host_calls.add(call)
        return func(*args, **kwargs)

    def _copy_into_real(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """A copy of a fake tensor into real memory, which is not counted. Representative values arrive."""
        is_lazy = not isinstance(source, FakeTensor)  # both are, and empty
        return target.copy_(source if is_lazy else self.tracer.values.whole(source))


# Set after the class is made: TorchDispatchMode wraps the method of a class body to keep the compiler out, at
# a price for every op. There is no compiler to keep out of a trace.
DispatchMode.__torch_dispatch__ = DispatchMode._dispatch  # type: ignore[method-assign,assignment]


def install_python_kernels(patches: Patches) -> None:
    """Keep the kernels for CUDA that libraries register in Python: torch calls them for real CUDA only."""
    register = torch.library.Library.impl

    @functools.wraps(register)
    def impl(library: Any, op_name: Any, fn: Any, dispatch_key: str = "", **options: Any) -> Any:
        if dispatch_key == "CUDA" and isinstance(op_name, str) and not options.get("with_keyset"):
            python_kernels[f"{library.ns}::{op_name.split('::')[-1]}"] = fn
        return register(library, op_name, fn, dispatch_key, **options)

    patches.set(torch.library.Library, "impl", impl)


def _is_redispatched_by_python(op: FrameType | None) -> bool:
    """Whether the op comes from a mode or tensor subclass of the program's, whose handler called it."""
    caller = None if op is None else op.f_back
    return caller is not None and caller.f_code.co_name == "__torch_dispatch__"


def _nothing() -> None:
    return None


def _is_small_host_op(args: Sequence[Any]) -> bool:
    """Whether it is an op on small tensors with data, such as the numbers that a data loader draws."""
    if not args or type(args[0]) is not torch.Tensor:
        return False
    return all(
        not isinstance(arg, (list, tuple))
        and (not isinstance(arg, torch.Tensor) or arg.numel() * arg.element_size() <= _SMALL_INPUT_BYTES)
        for arg in args
    )


def _may_be_large(func: OpOverload, kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]) -> bool:
    if (
        func.namespace == "profiler"
        or func._schema.is_mutable
        or func.is_view
        or func is aten._local_scalar_dense.default
    ):
        return False
    asked = kwargs.get("device")
    if any(tensor.is_meta for tensor in tensors) or (asked is not None and asked.type == "meta"):
        return False
    return not tensors or max(map(_bytes_of, tensors)) > _SMALL_INPUT_BYTES


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _is_host_subclass(tensor: torch.Tensor) -> bool:
    """Of a class such as torchvision's Image, which fake kernels do not take."""
    return not isinstance(tensor, FakeTensor) and type(tensor) not in (torch.Tensor, torch.nn.Parameter)


def _without_subclass(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(torch.Tensor) if _is_host_subclass(tensor) else tensor


def _without_graph(tensor: torch.Tensor) -> torch.Tensor:
    """Fake kernels do not take real tensors that are results in a graph, below autograd."""
    return tensor if isinstance(tensor, FakeTensor) or tensor.is_leaf else tensor.detach()


def _is_meta(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, FakeTensor) and tensor.is_meta


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) and index.dim() > 0


def _bytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
