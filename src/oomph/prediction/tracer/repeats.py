"""What repeats is not traced again: identical blocks of a model, and calls of a model.

Of a model's identical blocks a few are traced; the others record the same events. The blocks of a decoder
differ in their weights alone. The first three and the last two of a forward pass are traced. Where the
second, the third and the last but one allocate and free the same, so do those between: their results are made
without running them, and lead to an autograd node that records what the backward pass of the last block but
one did. The backward passes of the second and third, which are traced too, must then be like it. (The first
and the last may differ: what comes before and after them does.) In later passes the third is not traced if
the second allocates and frees what it did in the pass before. Where something is not as expected, all blocks
are traced; if some were repeated already, the program runs again in a fresh process.

Without gradients nothing follows the forward pass: there the last block but one is repeated, too.

Evaluation loops and gradient accumulation call a model many times with the same shapes, as does, without
gradients, a module that samples from it. Where as much memory is in use as before the last traced calls, a
further call would allocate and free exactly what those did: only its results are made. Where the program
keeps what each call returns, such as a trajectory, what the call frees again is recorded between its results.
With gradients enabled, the results lead to an autograd node that ends the backward pass, which is repeated as
well: every parameter has a gradient already, into which the passes accumulate.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import math
import random
import textwrap
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import nn

from oomph.prediction.compat.registry import is_unread
from oomph.prediction.isolation import can_restart, finish, restart, restarted_without
from oomph.prediction.tracer.fast_path import FastPath
from oomph.prediction.tracer.recorder import PendingAllocation
from oomph.prediction.tracer.tracer import Tracer
from oomph.prediction.tracer.work import Kernel, KernelsMark
from oomph.records import Event
from oomph.torch_internals import (
    MODULE_HOOKS,
    DisableTorchDispatch,
    FakeTensor,
    disable_torch_function,
    get_sequence_nr,
    is_traceable_wrapper_subclass,
    sequence_nr,
    storage_id,
    storage_use_count,
    tensor_use_count,
    tree_flatten,
    tree_unflatten,
)

_FEWEST = 7  # blocks; with fewer there is little to gain
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
_MODULE_STATE = {"_parameters", "_buffers", "_modules", "training", *MODULE_HOOKS}
_MOST_NODES_BETWEEN = 1  # that checkpointing makes before it calls a block; they take no part in backward

Ref = tuple[str, int]  # an allocation as all blocks name it: ("new", 3), ("forward", 7), ("input", 0)


class _NotRepeatable(Exception):
    """Something may carry state from one call to the next, or does not look the same in all."""


class _Layout(NamedTuple):
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Layout:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)


_SCALAR = _Layout((), (), torch.float32)


class _Made(NamedTuple):
    allocation: PendingAllocation
    parent: Ref | None


class _Freed(NamedTuple):
    ref: Ref


class _Marked(NamedTuple):
    ref: Ref | None
    label: str


@dataclass(slots=True)
class _Segment:
    """The events of one block's forward or backward pass."""

    path: str  # of the block
    steps: list[_Made | _Freed | _Marked]
    alive: set[int]  # of the allocations that it made, at its end
    kernels: KernelsMark
    calls: tuple[int, int]  # of modules inside no other, before and after it: what checkpoints recompute

    def described(self) -> list[Any]:
        return [_description(step, self.path) for step in self.steps]


@dataclass(slots=True)
class _Forward(_Segment):
    output: int = 0  # which of its allocations
    layout: _Layout = _SCALAR
    results: Any = None  # as the block returned them, with _OUTPUT in place of the tensor
    input: int = -1
    first: int = 0  # the id of its first allocation


@dataclass(slots=True)
class _Backward(_Segment):
    gradient: _Layout  # of the output
    result: Ref = ("new", 0)  # the gradient of the input
    result_layout: _Layout = _SCALAR
    gradients: tuple[tuple[int, int, _Layout], ...] = ()  # parameter, which allocation


def _description(step: _Made | _Freed | _Marked, path: str) -> Any:
    if not isinstance(step, _Made):
        return (step.ref, _inside(step.label, path)) if isinstance(step, _Marked) else step
    one = step.allocation
    what = one.bytes, one.shape, one.dtype, one.op, _inside(one.module, path), one.site, one.during
    return *what, one.kind, one.stream, one.differentiable, one.cloned, step.parent


def _inside(text: str, path: str, now: str = "") -> str:
    """A module's path, or a mark with one at its end, with another block's path in place of this one's."""
    before, space, module = text.rpartition(" ")
    if module != path and not module.startswith(path + "."):
        return text
    return f"{before}{space}{now}{module[len(path) :]}"


_OUTPUT = object()


def _nothing() -> None:
    return None


class _Pass:
    """One forward pass over the blocks of a container, and the backward pass that belongs to it."""

    def __init__(self, before: _Pass | None) -> None:
        self.position = 0  # of the block that comes next
        self.situation: Any = None
        self.node = -1  # the number of autograd's, of the output of the block before
        self.sequence = 0  # of the node that autograd would have made next
        self.with_grad = True
        self.output: Callable[[], Any] = _nothing  # of the block before, if there are no gradients
        self.is_traced = False  # all of it
        self.repeated = 0
        self.holds_input = False  # each block, for backward
        self.forward: _Forward | None = None
        self.is_verified = False
        self.backward: _Backward | None = None
        self.use_counts: Any = None
        self.blocks: weakref.WeakSet[_RepeatedBlock] = weakref.WeakSet()
        self.before = before if before is not None and before.repeated and not before.is_traced else None

    def release(self, ref: Ref) -> None:
        """What a traced block has made is gone, such as a cast kept by autocast: that of the others, too."""
        for block in list(self.blocks):
            block.held.pop(ref, None)


@dataclass(slots=True)
class _TracedBlock:
    """A block whose backward pass is recorded when it comes."""

    of: _Pass
    path: str
    module: nn.Module
    position: int
    made: Sequence[int] = ()  # ids
    alive: frozenset[int] = frozenset()
    input: int = -1
    # when its backward pass begins:
    gradient: int = -1
    left: frozenset[int] = frozenset()  # what is still alive of its forward pass
    layout: _Layout = _SCALAR
    events: int = 0
    kernels: Any = None
    calls: int = 0
    grads: tuple[int | None, ...] = ()


class _RepeatedNode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, block: _RepeatedBlock, forward: _Forward) -> torch.Tensor:
        ctx.block = block
        ctx.set_materialize_grads(False)
        return block.run_forward(forward, input)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:  # type: ignore[override]
        return ctx.block.run_backward(gradient), None, None


class RepeatedBlocks:
    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._fast_path = FastPath(tracer.fake_mode)
        self._passes: dict[int, _Pass] = {}  # by the first block of the container
        self._in_backward: _TracedBlock | None = None
        self._expected: tuple[int, int] | None = None  # events and gradient, where a repeated block ended
        self._may_repeat = tracer.log is None
        fresh = self.make(_Layout((1,), (1,), torch.float32))
        self._use_count_of_owned = _storage_uses(fresh)

    # -- forward --------------------------------------------------------------------------------------

    def call(
        self,
        forward: Callable[..., Any],
        module: nn.Module,
        siblings: Sequence[nn.Module],
        path: str,
        args: Any,
        kwargs: Any,
    ) -> Any:
        """The call of a block of which `siblings`, in their container, are of the same class."""
        possible = self._may_repeat and self._tracer.phase == "forward" and len(siblings) >= _FEWEST
        if not possible or not can_restart():
            return forward(module, *args, **kwargs)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return forward(module, *args, **kwargs)
        if module is siblings[0]:
            self._passes[id(module)] = _Pass(self._passes.get(id(module)))
        one = self._passes.get(id(siblings[0]))
        if one is None or one.is_traced or module is siblings[-1]:
            return forward(module, *args, **kwargs)
        try:
            with disable_torch_function():
                input = self._check_call(one, module, siblings, args, kwargs)
        except Exception as error:
            self.fail_if_strict(error)
            self._give_up(one)
        if one.is_traced:  # not inside of `except`: an error of the program would show both tracebacks
            return forward(module, *args, **kwargs)
        last_traced = 2 if one.with_grad else 1  # blocks, the last among them
        if one.is_verified and one.position < len(siblings) - last_traced and input is not None:
            try:
                with disable_torch_function():
                    return self._repeat(one, module, path, input, args, kwargs)
            except Exception as error:
                self.fail_if_strict(error)
                restart()
        return self._trace(one, forward, module, path, input, args, kwargs)

    def fail_if_strict(self, error: Exception) -> None:
        """In tests, a mistake of ours. For users all blocks are traced then, which changes no prediction."""
        if self._tracer.guard.strict and not isinstance(error, _NotRepeatable):
            finish(error)

    def _give_up(self, one: _Pass) -> None:
        one.is_traced = True
        if one.repeated:
            restart()

    def _check_call(
        self, one: _Pass, module: nn.Module, siblings: Sequence[nn.Module], args: Any, kwargs: Any
    ) -> torch.Tensor | None:
        """The input of the block, of which it computes a gradient; None of the first block."""
        if one.position >= len(siblings) or module is not siblings[one.position]:
            raise _NotRepeatable
        if one.position == 0:
            one.with_grad = torch.is_grad_enabled()
        if one.with_grad != torch.is_grad_enabled():
            raise _NotRepeatable
        if one.position == 0:
            _check_not_shared(siblings)
            return None
        inputs: list[torch.Tensor] = []
        autocast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
        arguments = tuple(self._described_arguments((args, kwargs), inputs, one.output()))
        situation = arguments, _signature(module), autocast, self._tracer.work.counting
        if len(inputs) != 1 or self._tracer.recorder.allocation_of(inputs[0]) is None:
            raise _NotRepeatable
        if one.position == 1:
            one.situation = situation
        elif not _same_situation(one.situation, situation, module):
            raise _NotRepeatable
        if not one.with_grad:
            return inputs[0]
        node = inputs[0].grad_fn
        if node is None or sequence_nr(node) != one.node:
            raise _NotRepeatable
        if inputs[0]._backward_hooks or inputs[0].retains_grad:
            raise _NotRepeatable
        if not 0 <= get_sequence_nr() - one.sequence <= _MOST_NODES_BETWEEN:
            raise _NotRepeatable
        return inputs[0]

    def _described_arguments(self, value: Any, inputs: list[torch.Tensor], output: Any) -> Iterator[Any]:
        """`output`: of the block before, where it computes no gradient."""
        if isinstance(value, torch.Tensor):
            if value is not output and not (isinstance(value, FakeTensor) and value.requires_grad):
                yield "same", id(value), _Layout.of(value), _id(self._tracer.recorder.allocation_of(value))
            elif value.dtype.is_floating_point and value not in self._tracer.values:
                inputs.append(value)
                yield _Layout.of(value)
            else:
                raise _NotRepeatable
        elif isinstance(value, tuple) or type(value) in (list, dict):
            yield type(value), tuple(value) if isinstance(value, dict) else len(value)
            for part in value.values() if isinstance(value, dict) else value:
                yield from self._described_arguments(part, inputs, output)
        elif isinstance(value, _PLAIN):
            yield value
        elif getattr(getattr(type(value), "__dataclass_params__", None), "frozen", False):
            for one in dataclasses.fields(value):
                yield from self._described_arguments(getattr(value, one.name), inputs, output)
        else:
            raise _NotRepeatable

    def _trace(
        self,
        one: _Pass,
        forward: Callable[..., Any],
        module: nn.Module,
        path: str,
        input: torch.Tensor | None,
        args: Any,
        kwargs: Any,
    ) -> Any:
        tracer, recorder = self._tracer, self._tracer.recorder
        first_event, first = len(recorder.events), len(recorder.allocations)
        kernels, calls = tracer.work.mark(), tracer.modules.completed
        state = self._state()
        out = forward(module, *args, **kwargs)
        last_event, last = len(recorder.events), len(recorder.allocations)
        try:
            tensor, results = self._output(out, first)
            traced = _TracedBlock(one, path, module, one.position, range(first, last))
            if input is None:
                self._await_backward(traced, tensor)
                return out
            if state != self._state() or any(map(_keeps_graph, module.modules())):
                raise _NotRepeatable
            traced.input = _id(recorder.allocation_of(input))
            names: dict[int, Ref] = {id: ("new", id - first) for id in range(first, last)}
            names |= self._names_outside(traced)
            steps = _steps(recorder.events[first_event:last_event], recorder.allocations, names)
            found = _Forward(path, steps, _alive(steps), kernels.until_now(), (calls, calls))
            found.output = _id(recorder.allocation_of(tensor)) - first
            found.layout, found.results = results
            found.input, found.first = traced.input, first
            traced.alive = frozenset(first + index for index in found.alive if index != found.output)
            if not one.with_grad and traced.alive:  # something else holds what it made
                raise _NotRepeatable
        except Exception as error:
            self.fail_if_strict(error)
            found = None
        freed = () if found is None else [step.ref[0] for step in found.steps if isinstance(step, _Freed)]
        if found is None or set(freed) - {"new"}:
            self._give_up(one)
            return out
        if one.position == 1:
            one.forward = found
            before, one.before = one.before, None
            if before is not None and before.forward is not None:
                one.is_verified = _same_forward(before.forward, found)
                one.holds_input = before.holds_input
        elif one.position > 1 and one.forward is not None:
            same = _same_forward(one.forward, found)
            one.is_verified = same
            if not same:
                self._give_up(one)
                return out
        self._await_backward(traced, tensor)
        return out

    def _await_backward(self, traced: _TracedBlock, output: Any) -> None:
        if traced.of.with_grad:
            output.grad_fn.register_prehook(functools.partial(self._begin_backward, traced))
        self._advance(traced.of, output)

    def _advance(self, one: _Pass, output: torch.Tensor) -> None:
        one.position += 1
        if one.with_grad:
            assert output.grad_fn is not None
            one.node, one.sequence = sequence_nr(output.grad_fn), get_sequence_nr()
        else:
            one.output = weakref.ref(output)

    def _state(self) -> Any:
        """What a block may advance unseen."""
        with disable_torch_function(), DisableTorchDispatch():
            numbers = bytes(torch.get_rng_state().tolist())  # NumPy may be missing
        return self._tracer.values.draws, self._tracer.reads, random.getstate(), numbers

    def _output(self, out: Any, first: int) -> tuple[torch.Tensor, Any]:
        """The one tensor among a block's results, with its layout and the results around it."""
        tensors: list[torch.Tensor] = []
        results = _without_tensor(out, tensors)
        if len(tensors) != 1 or tensors[0] in self._tracer.values:
            raise _NotRepeatable
        tensor = tensors[0]
        allocation = self._tracer.recorder.allocation_of(tensor)
        if allocation is None or allocation.id < first or tensor.storage_offset():
            raise _NotRepeatable
        if _storage_uses(tensor) != self._use_count_of_owned:  # saved for backward, or a view
            raise _NotRepeatable
        node = tensor.grad_fn
        if torch.is_grad_enabled() and (node is None or sequence_nr(node) != get_sequence_nr() - 1):
            raise _NotRepeatable
        layout = _Layout.of(tensor)
        if self.make(layout).untyped_storage().nbytes() != allocation.bytes:
            raise _NotRepeatable
        return tensor, (layout, results)

    def _names_outside(self, traced: _TracedBlock) -> dict[int, Ref]:
        """Allocations from before that every block has: its input, and the tensors of its modules."""
        recorder = self._tracer.recorder
        names: dict[int, Ref] = {}
        for index, tensor in enumerate(_tensors_of(traced.module)):
            names[_id(recorder.allocation_of(tensor))] = "tensor", index
        names[traced.input] = "input", 0
        names.pop(-1, None)
        return names

    def make(self, layout: _Layout) -> FakeTensor:
        """A fake tensor; the caller records its storage."""
        return self._fast_path.empty(*layout)

    def _repeat(
        self, one: _Pass, module: nn.Module, path: str, input: torch.Tensor, args: Any, kwargs: Any
    ) -> Any:
        forward = one.forward
        assert forward is not None
        if not one.repeated and one.with_grad:
            if one.position > 2:  # by now the program has let go of the inputs of blocks before
                one.holds_input = self._tracer.recorder.is_alive(forward.input)
            for id, storage in self._tracer.recorder.live_storages():
                if id - forward.first in forward.alive:
                    weakref.finalize(storage, one.release, ("forward", id - forward.first)).atexit = False
        block = _RepeatedBlock(self, one, module, path)
        one.blocks.add(block)
        one.repeated += 1
        self._tracer.blocks_repeated = True
        if one.with_grad:
            tensor = _RepeatedNode.apply(input, block, forward)
        else:
            with self._tracer.lock:
                tensor = block.run_forward(forward, input)
        self._advance(one, tensor)
        return _with_tensor(forward.results, tensor)

    # -- backward -------------------------------------------------------------------------------------

    def _begin_backward(self, traced: _TracedBlock, gradients: Sequence[Any]) -> None:
        """Before autograd runs the first node of a block's backward pass."""
        try:
            with disable_torch_function():
                self._open_backward(traced, gradients)
        except Exception as error:
            self.fail_if_strict(error)
            self._give_up(traced.of)

    def _open_backward(self, traced: _TracedBlock, gradients: Sequence[Any]) -> None:
        self.end_backward(gradients)
        recorder = self._tracer.recorder
        allocation = self.allocation_of(gradients)
        if allocation is None or traced.of.is_traced or traced.position == 0:
            if traced.of.repeated and traced.position > 0:
                restart()
            return
        traced.gradient, traced.layout = allocation.id, _Layout.of(gradients[0])
        traced.events, traced.kernels = len(recorder.events), self._tracer.work.mark()
        live = {allocation.id for allocation in recorder.live_allocations()}
        traced.left = traced.alive & live
        traced.calls = self._tracer.modules.completed
        traced.grads = tuple(self.grad(each) for each in traced.module.parameters())
        self._in_backward = traced

    def allocation_of(self, gradients: Sequence[Any]) -> PendingAllocation | None:
        if len(gradients) != 1 or not isinstance(gradients[0], FakeTensor):
            return None
        with disable_torch_function():
            return self._tracer.recorder.allocation_of(gradients[0])

    def grad(self, parameter: torch.Tensor) -> int | None:
        grad = parameter.grad
        return None if grad is None else _id(self._tracer.recorder.allocation_of(grad))

    def expect(self, result: torch.Tensor) -> None:
        """After a repeated block: the gradient that the block before it is to get, with nothing between."""
        self._expected = len(self._tracer.recorder.events), _id(self.allocation_of((result,)))

    def end_backward(self, gradients: Sequence[Any]) -> None:
        """Before the block before: the backward pass that was recorded is at its end."""
        traced, self._in_backward = self._in_backward, None
        allocation = self.allocation_of(gradients)
        if self._expected is not None:
            events, gradient = self._expected
            if len(self._tracer.recorder.events) != events or _id(allocation) != gradient:
                restart()  # the input of a repeated block has another gradient, too
            self._expected = None
        if traced is None:
            return
        one = traced.of
        found = None if allocation is None else self._backward_of(traced, allocation, gradients[0])
        if found is None:
            self._give_up(one)
        elif one.backward is None:
            one.backward = found
        elif not _same_backward(one.backward, found):
            self._give_up(one)

    def _backward_of(
        self, traced: _TracedBlock, result: PendingAllocation, gradient: torch.Tensor
    ) -> _Backward | None:
        recorder = self._tracer.recorder
        events = recorder.events[traced.events :]
        freed_ids = {event.id for event in events if event.action == "free"}
        stay = {  # cuBLAS's workspaces, which the first product of a thread allocates
            event.id
            for event in events
            if event.action == "alloc"
            and event.id not in freed_ids
            and recorder.allocations[event.id].kind == "workspace"
        }
        events = [event for event in events if event.id not in stay]
        indices = {event.id: index for index, event in enumerate(e for e in events if e.action == "alloc")}
        names: dict[int, Ref] = {id: ("new", index) for id, index in indices.items()}
        names |= self._names_outside(traced)
        names |= {id: ("forward", index) for index, id in enumerate(traced.made)}
        names |= {id: ("grad", index) for index, id in enumerate(traced.grads) if id is not None}
        names[traced.gradient] = "gradient", 0
        steps = _steps(events, recorder.allocations, names)
        found = _Backward(
            traced.path,
            steps,
            _alive(steps),
            traced.kernels.until_now(),
            (traced.calls, self._tracer.modules.completed),
            traced.layout,
            names.get(result.id, ("outside", result.id)),
            _Layout.of(gradient),
        )
        made: list[tuple[int, int, _Layout]] = []
        for index, parameter in enumerate(traced.module.parameters()):
            now, before = self.grad(parameter), traced.grads[index]
            if now != before and (before is not None or now not in indices):
                return None
            if now is not None and now != before and parameter.grad is not None:
                made.append((index, indices[now], _Layout.of(parameter.grad)))
        found.gradients = tuple(made)
        layouts = {index: layout for _, index, layout in made}
        if found.result[0] == "new":
            layouts[found.result[1]] = found.result_layout
        freed = [step.ref for step in steps if isinstance(step, _Freed)]
        kept = traced.left - {traced.made[index] for kind, index in freed if kind == "forward"}
        if found.alive != layouts.keys() or kept:  # something else holds what the block made
            return None
        if found.result[0] not in ("new", "gradient"):
            return None
        if any(kind not in ("new", "forward", "input", "gradient") for kind, _ in freed):
            return None
        if any(kind == "forward" and traced.made[index] not in traced.alive for kind, index in freed):
            return None  # its output
        if traced.of.holds_input and ("input", 0) not in freed and not recorder.is_alive(traced.input):
            return None
        sizes = {index: recorder.allocations[id].bytes for id, index in indices.items()}
        if any(self.make(one).untyped_storage().nbytes() != sizes[index] for index, one in layouts.items()):
            return None
        return found


def _tensors_of(block: nn.Module) -> Iterator[torch.Tensor]:
    """Parameters, buffers, and what a parameter holds in attributes: a quantized weight, its scales."""
    parameters = tuple(block.parameters())
    yield from (*parameters, *block.buffers())
    for parameter in parameters:
        yield from _tensors_in(vars(parameter))


def _tensors_in(attributes: Mapping[str, Any], depth: int = 3) -> Iterator[torch.Tensor]:
    """In attributes of an object, and in those of the objects there."""
    for value in attributes.values():
        if isinstance(value, FakeTensor):
            yield value
        elif depth and hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module, torch.Tensor)):
            yield from _tensors_in(vars(value), depth - 1)


class _RepeatedBlock:
    """A block that was not run: what its forward pass has left, until its backward pass."""

    def __init__(self, blocks: RepeatedBlocks, of: _Pass, module: nn.Module, path: str) -> None:
        self._blocks, self._of, self._module, self._path = blocks, of, module, path
        self._tracer = blocks._tracer
        self._ids: dict[Ref, int] = {}  # of its forward pass, until the backward pass
        self.held: dict[Ref, torch.UntypedStorage] = {}

    def _tensors(self) -> dict[Ref, int]:
        recorder = self._tracer.recorder
        tensors = enumerate(_tensors_of(self._module))
        return {("tensor", index): _id(recorder.allocation_of(each)) for index, each in tensors}

    def run_forward(self, forward: _Forward, input: torch.Tensor) -> FakeTensor:
        ids = self._tensors()
        ids["input", 0] = _id(self._tracer.recorder.allocation_of(input))
        made = {forward.output: self._blocks.make(forward.layout)}
        self._record(forward, ids, made)
        self._ids = {("forward", index): id for (kind, index), id in ids.items() if kind == "new"}
        self._ids["input", 0] = ids["input", 0]
        self.held = {("forward", index): storage for (_, index), storage in self.held.items()}
        del self.held["forward", forward.output]
        if self._of.holds_input:
            self.held["input", 0] = input.untyped_storage()
        return made[forward.output]

    def run_backward(self, gradient: Any) -> Any:
        with self._tracer.lock, disable_torch_function():
            try:
                return self._run_backward(gradient)
            except Exception as error:
                self._blocks.fail_if_strict(error)
                restart()

    def _run_backward(self, gradient: Any) -> Any:
        blocks, forward = self._blocks, self._of.forward
        blocks.end_backward((gradient,))
        backward, allocation = self._of.backward, blocks.allocation_of((gradient,))
        if forward is None or backward is None or allocation is None:
            restart()
        counts = tensor_use_count(gradient), _storage_uses(gradient)
        self._of.use_counts = self._of.use_counts or counts  # more: the program holds this gradient
        if counts != self._of.use_counts or _Layout.of(gradient) != backward.gradient:
            restart()
        if torch.is_grad_enabled() or not self._ids:  # for second derivatives, or for the second time
            restart()
        parameters = list(self._module.parameters())
        ids = {**self._ids, **self._tensors(), ("gradient", 0): allocation.id}
        grads = {("grad", index): blocks.grad(each) for index, each in enumerate(parameters)}
        ids |= {ref: id for ref, id in grads.items() if id is not None}
        self._ids = {}
        made = {index: blocks.make(layout) for _, index, layout in backward.gradients}
        if backward.result[0] == "new":
            made[backward.result[1]] = blocks.make(backward.result_layout)
        self._record(backward, ids, made, gradient)
        if any(ref[0] == "forward" for ref in self.held):
            restart()
        self.held.clear()
        for index, which, _ in backward.gradients:
            parameters[index].grad = made[which]
        result = gradient if backward.result[0] == "gradient" else made[backward.result[1]]
        blocks.expect(result)
        return result

    def _record(
        self,
        segment: _Segment,
        ids: dict[Ref, int],
        made: Mapping[int, FakeTensor],
        gradient: torch.Tensor | None = None,
    ) -> None:
        """Record the segment's events, with this block's allocations in place of those of the traced one."""
        recorder, modules = self._tracer.recorder, self._tracer.modules
        later = modules.completed - segment.calls[0]
        count = 0
        for step in segment.steps:
            if isinstance(step, _Made):
                old = step.allocation
                new = old.again(len(recorder.allocations), old.step)
                new.module = _inside(old.module, segment.path, self._path)
                new.parent = None if step.parent is None else _named(step.parent, ids)
                new.call = old.call + later if old.call else 0
                ids["new", count] = new.id
                recorder.record_allocation(new)
                if count in segment.alive:
                    tensor = made.get(count)
                    storage = (
                        torch.UntypedStorage(new.bytes, device="meta")
                        if tensor is None
                        else tensor.untyped_storage()
                    )
                    recorder.watch(storage, new)
                    self.held["new", count] = storage
                count += 1
            elif isinstance(step, _Freed):
                if step.ref[0] == "gradient" and gradient is not None:
                    recorder.release(gradient.untyped_storage())
                elif step.ref[0] == "new":
                    recorder.record_free(recorder.allocations[ids[step.ref]])
                else:
                    self.held.pop(step.ref, None)
            else:
                id = -1 if step.ref is None else _named(step.ref, ids)
                recorder.events.append(Event("mark", id, _inside(step.label, segment.path, self._path)))
        segment.kernels.repeat()
        modules.completed += segment.calls[1] - segment.calls[0]


def _without_tensor(value: Any, found: list[torch.Tensor]) -> Any:
    """A block's results with _OUTPUT in place of the tensor, which is added to `found`."""
    if isinstance(value, FakeTensor):
        found.append(value)
        return _OUTPUT
    if type(value) in (tuple, list):
        return type(value)(_without_tensor(part, found) for part in value)
    if not isinstance(value, _PLAIN):
        raise _NotRepeatable
    return value


def _with_tensor(value: Any, tensor: torch.Tensor) -> Any:
    if type(value) in (tuple, list):
        return type(value)(_with_tensor(part, tensor) for part in value)
    return tensor if value is _OUTPUT else value


def _named(ref: Ref, ids: Mapping[Ref, int]) -> int:
    return ref[1] if ref[0] == "outside" else ids[ref]


def _steps(
    events: Sequence[Event], allocations: Sequence[PendingAllocation], names: Mapping[int, Ref]
) -> list[_Made | _Freed | _Marked]:
    found: list[_Made | _Freed | _Marked] = []
    for action, id, label in events:
        ref = names.get(id, ("outside", id))
        if action == "alloc":
            parent = allocations[id].parent
            found.append(
                _Made(allocations[id], None if parent is None else names.get(parent, ("outside", parent)))
            )
        elif action == "free":
            found.append(_Freed(ref))
        else:
            found.append(_Marked(None if id < 0 else ref, label))
    return found


def _alive(steps: Sequence[_Made | _Freed | _Marked]) -> set[int]:
    made = sum(isinstance(step, _Made) for step in steps)
    freed = {step.ref[1] for step in steps if isinstance(step, _Freed) and step.ref[0] == "new"}
    return set(range(made)) - freed


def _same_forward(first: _Forward, second: _Forward) -> bool:
    return (
        (first.output, first.layout, first.alive, first.results)
        == (second.output, second.layout, second.alive, second.results)
    ) and first.described() == second.described()


def _same_backward(first: _Backward, second: _Backward) -> bool:
    return (
        (first.gradient, first.result, first.result_layout, first.gradients)
        == (second.gradient, second.result, second.result_layout, second.gradients)
    ) and first.described() == second.described()


def _id(allocation: PendingAllocation | None) -> int:
    return -1 if allocation is None else allocation.id


def _storage_uses(tensor: torch.Tensor) -> int:
    with disable_torch_function():
        uses: int = storage_use_count(storage_id(tensor.untyped_storage()))
        return uses


def _keeps_graph(module: nn.Module) -> bool:
    """Whether the module holds something of its call's graph, such as an auxiliary loss."""
    return any(isinstance(each, torch.Tensor) and each.grad_fn is not None for each in vars(module).values())


# -- which blocks are alike ------------------------------------------------------------------------------


def _check_not_shared(siblings: Sequence[nn.Module]) -> None:
    seen: set[int] = set()
    for each in siblings:
        own = {id(parameter) for parameter in each.parameters()}
        if own & seen:
            raise _NotRepeatable
        seen |= own


def _signature(module: nn.Module) -> tuple[Any, ...]:
    found: list[Any] = []
    for name, part in module.named_modules():
        if any(getattr(part, hooks, None) for hooks in MODULE_HOOKS):
            raise _NotRepeatable
        tensors = [(key, _described_parameter(one)) for key, one in part._parameters.items()]
        tensors += [(key, None if one is None else _Layout.of(one)) for key, one in part._buffers.items()]
        state = {key: _described(one) for key, one in vars(part).items() if key not in _MODULE_STATE}
        found.append((name, type(part), part.training, tuple(tensors), state))
    return tuple(found)


def _described_parameter(parameter: nn.Parameter | None) -> Any:
    if parameter is None:
        return None
    hooks = parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)
    if any(hooks) or is_traceable_wrapper_subclass(parameter):
        raise _NotRepeatable
    return _Layout.of(parameter), parameter.requires_grad, parameter.grad is None


def _described(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (tuple, list)):
        return tuple(map(_described, value))
    if isinstance(value, functools.partial):
        return _described(value.func), tuple(map(_described, value.args))
    if isinstance(value, MethodType):
        return value.__func__
    if isinstance(value, FunctionType):
        return value.__code__
    return type(value)


def _same_situation(first: Any, second: Any, module: nn.Module) -> bool:
    """Integers of a block, such as its own index, may differ where its code only hands them on."""
    (*others, signature, autocast, counting), (*own, own_signature, own_autocast, own_counting) = (
        first,
        second,
    )
    if others != own or (autocast, counting) != (own_autocast, own_counting):
        return False
    if len(signature) != len(own_signature):
        return False
    for (*parts, state), (*own_parts, own_state) in zip(signature, own_signature, strict=True):
        if parts != own_parts or state.keys() != own_state.keys():
            return False
        kind = parts[1]
        for key, value in state.items():
            if value != own_state[key] and not (type(value) is int and _only_passed_on(kind, key)):
                return False
    return True


@functools.lru_cache(maxsize=1024)
def _only_passed_on(kind: type, name: str) -> bool:
    """Whether the class's methods use `self.name` only as an argument of calls."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):
        return False
    passed_on: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            passed_on |= {id(each) for each in (*node.args, *(keyword.value for keyword in node.keywords))}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and function.name not in ("__init__", "extra_repr"):
            for node in ast.walk(function):
                if isinstance(node, ast.Attribute) and node.attr == name and id(node) not in passed_on:
                    return False
    return True


# ------------------------------------------------------------------------------------------- calls of a model

_SHORT_CUT = "repeated calls"
_SMALL_GROWTH = 1 << 18  # bytes since the last traced call, such as the tokens of a generation
_TRACED_TIMES = 3  # until then the allocator finds blocks for all requests among those of the calls before


@dataclass(frozen=True, slots=True)
class _TensorLike:
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    id: int  # of its allocation
    bytes: int  # of its storage, of which it may be a part


@dataclass(slots=True)
class _TracedCall:
    module: weakref.ref[nn.Module]
    live_bytes: int  # before the call
    growth: int  # by which they may differ before the next one; 0: the call keeps more than its results
    left: int  # by the call before and its caller: results that they keep
    times: int  # it was traced one after the other
    step: int  # the last in which it was traced: every step has its peak
    results: list[Any]  # _TensorLike for a tensor
    structure: Any
    forward: list[Kernel]
    backward: list[Kernel]
    events: list[Event]  # of what it makes, if what it keeps is its results and no gradients are computed


class _EndOfBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, module: nn.Module, *results: _TensorLike) -> Any:
        ctx.module = module
        return tuple(map(_make, results))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        for parameter in ctx.module.parameters():
            if parameter.requires_grad and parameter.grad is None:  # dropped since the call
                parameter.grad = torch.empty_like(parameter)
        return (None,) * (len(gradients) + 2)


def _make(like: _TensorLike) -> torch.Tensor:
    return torch.empty_strided(like.shape, like.stride, dtype=like.dtype, device="cuda")


class RepeatedCalls:
    """Of the modules that are inside no other, or that one calls in a loop."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._traced: dict[Any, _TracedCall] = {}
        self._possible = not restarted_without(_SHORT_CUT)
        self._repeated: dict[Any, int] = {}  # bytes alive before the last call, if that was repeated
        self._pending: list[_TracedCall] = []  # called since the last backward pass, and repeated in it
        self._new: list[_TracedCall] = []  # traced since the last backward pass
        self.graph_is_read = False  # by autograd.grad, or a second pass: calls need graphs of their own

    def call(self, forward: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        tracer = self._tracer
        given = tree_flatten((args, kwargs))
        tracer.batches.record_use(given[0])
        live = tracer.recorder.live_bytes
        try:
            key = self._key(module, *given) if self._possible else None
        except _NotRepeatable:
            key = None
        if tracer.phase == "backward":  # what a checkpoint recomputes is a part of that pass
            key = None
        if key is None:  # not inside of `except`: an error of the program would show both tracebacks
            return forward(module, *args, **kwargs)
        known = self._traced.get(key)
        same = known is not None and abs(known.live_bytes - live) <= known.growth
        often = known is not None and known.times >= _TRACED_TIMES and known.step == tracer.step
        kept = known is not None and len(known.events) > 0
        before = self._repeated.pop(key, None)
        if known is not None and before is not None and live - before < known.left - _SMALL_GROWTH:
            if can_restart():  # the module itself keeps results
                restart(_SHORT_CUT)
            kept = False
        if known is not None and (same or kept) and often and known.module() is module:
            if not same:
                self._repeated[key] = live
            return self._repeat(known, module, () if same else known.events)
        first, kernels = len(tracer.recorder.allocations), len(tracer.work.kernels)
        first_event = len(tracer.recorder.events)
        out = forward(module, *args, **kwargs)
        try:
            leaves, structure = tree_flatten(out)
            results = self._results(leaves, first, module.training)
            if any(each._forward_hooks or _keeps_graph(each) for each in module.modules()):
                raise _NotRepeatable
        except _NotRepeatable:
            self._traced.pop(key, None)
        else:
            likes = [each for each in results if isinstance(each, _TensorLike)]
            keeps_results = tracer.recorder.live_bytes <= live + sum(like.bytes for like in likes)
            whole = all(math.prod(like.shape) * like.dtype.itemsize == like.bytes for like in likes)
            events: list[Event] = []
            if keeps_results and whole and not torch.is_grad_enabled():
                events = self._events(first_event, first, {like.id for like in likes})
            same = same or (kept and known is not None and self._same(known.events, events))
            times = known.times + 1 if known is not None and same else 1
            growth = _SMALL_GROWTH if keeps_results else 0
            self._traced[key] = _TracedCall(
                weakref.ref(module),
                live,
                growth,
                live - known.live_bytes if known is not None else 0,
                times,
                tracer.step,
                results,
                structure,
                tracer.work.kernels[kernels:],
                [],
                events,
            )
            if torch.is_grad_enabled():
                self._new.append(self._traced[key])
        return out

    def _events(self, first_event: int, first: int, results: set[int]) -> list[Event]:
        """Of results and of what was freed again."""
        events = [event for event in self._tracer.recorder.events[first_event:] if event.id >= first]
        shown = results | {event.id for event in events if event.action == "free"}
        return [event for event in events if event.id in shown]

    def _same(self, first: list[Event], second: list[Event]) -> bool:
        made = self._tracer.recorder.allocations
        return [(each.action, made[each.id].bytes) for each in first] == [
            (each.action, made[each.id].bytes) for each in second
        ]

    def _key(self, module: nn.Module, leaves: Sequence[Any], structure: Any) -> Any:
        with_grad = torch.is_grad_enabled()
        if with_grad:
            trained = [each for each in module.parameters() if each.requires_grad]
            if self.graph_is_read or not trained or any(each.grad is None for each in trained):
                raise _NotRepeatable
        autocast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
        described = tuple(self._describe(leaf) for leaf in leaves)
        counting = self._tracer.work.counting  # kernels are needed from a call that counted them
        training = tuple(each.training for each in module.modules())
        return id(module), training, with_grad, autocast, counting, described, str(structure)

    def _describe(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            if leaf.requires_grad and torch.is_grad_enabled():
                raise _NotRepeatable  # a gradient flows through
            value = self._tracer.values.known(leaf) if leaf.dtype in (torch.bool, torch.int64) else None
            is_mask = value is not None and value.numel() > 0 and int(value.max()) <= 1
            without_padding = bool(value.all()) if is_mask and value is not None else None
            return _Layout.of(leaf), leaf.device, without_padding
        if not isinstance(leaf, _PLAIN):
            raise _NotRepeatable
        return leaf

    def _results(self, leaves: list[Any], first: int, training: bool) -> list[Any]:
        """What the leaves are like."""
        found: list[Any] = []
        storages: set[int] = set()
        for leaf in leaves:
            if isinstance(leaf, FakeTensor):
                allocation = self._tracer.recorder.allocation_of(leaf)
                if allocation is None or allocation.id < first or allocation.id in storages:
                    raise _NotRepeatable  # of the host, of an earlier call, or two views of one tensor
                storages.add(allocation.id)
                layout = _Layout.of(leaf)
                found.append(_TensorLike(*layout, leaf.requires_grad, allocation.id, allocation.bytes))
            elif isinstance(leaf, _PLAIN):
                found.append(leaf)
            elif training and is_unread(leaf):
                found.append(None)
            else:
                raise _NotRepeatable
        return found

    def _repeat(self, known: _TracedCall, module: nn.Module, events: Sequence[Event]) -> Any:
        likes = {like.id: like for like in known.results if isinstance(like, _TensorLike)}
        made: dict[int, torch.Tensor] = {}  # by the id of the allocation that it is like
        if with_grad := [like for like in likes.values() if like.requires_grad]:
            leaf = next(each for each in module.parameters() if each.requires_grad)
            linked = _EndOfBackward.apply(leaf, module, *with_grad)
            made |= {like.id: tensor for like, tensor in zip(with_grad, linked, strict=True)}
            self._pending.append(known)
        new_ids: dict[int, int] = {}
        for event in events:
            if event.id not in likes:
                self._tracer.recorder.record_again([event], self._tracer.step, new_ids)
            elif event.id not in made:
                made[event.id] = _make(likes[event.id])
        made |= {id: _make(like) for id, like in likes.items() if id not in made}
        leaves = [made[like.id] if isinstance(like, _TensorLike) else like for like in known.results]
        if self._tracer.work.counting:
            self._tracer.work.kernels += known.forward
        return tree_unflatten(leaves, known.structure)

    def after_backward(self, kernels: int) -> None:
        """`kernels`: how many had been counted before it."""
        work = self._tracer.work
        if self._pending and work.counting:
            # These include the kernels of the loss, which runs outside of the model.
            work.kernels[kernels:] = self._pending[-1].backward
        for each in self._new:
            each.backward = work.kernels[kernels:]
        self._new.clear()
        self._pending.clear()
