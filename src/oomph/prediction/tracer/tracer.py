"""The state of one trace: where tensors are placed, which phase runs, who made an allocation."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, Literal, NamedTuple

import torch
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from oomph.gpus import GPU
from oomph.prediction.ops.rules import Estimated, RuleContext, RuleGuard, Search
from oomph.prediction.tracer.attribution import (
    CompiledSite,
    ModuleStack,
    StackBoundary,
    find_site,
    in_loss_function,
)
from oomph.prediction.tracer.batch_sizes import BatchSizes
from oomph.prediction.tracer.fake_cuda import gpus_of_node, show_devices
from oomph.prediction.tracer.growth import GrowthWatch
from oomph.prediction.tracer.holders import HolderSearch
from oomph.prediction.tracer.recorder import (
    AllocationRecorder,
    Describe,
    PendingAllocation,
    PinnedMemory,
    inner_tensors,
)
from oomph.prediction.tracer.streams import current_streams
from oomph.prediction.tracer.values import ValueEstimates, Values
from oomph.prediction.tracer.work import KernelCounter
from oomph.records import CUDNN_SEARCH, BatchTensor, Kind, Progress, Site, Stage
from oomph.torch_internals import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    disable_dispatch_modes,
    disable_torch_function,
    get_sequence_nr,
    running_sequence_nr,
)


class LoggedOp(NamedTuple):
    op: str
    outputs: str
    phase: str  # "setup", "step 2 backward"
    first_event: int  # events[first_event:last_event] happened inside the op
    last_event: int


class OpLog:
    """The ops of a trace, to compare with the log of a real GPU run. `describe` puts an op's result into
    words."""

    def __init__(self, describe: Callable[[Any], str]) -> None:
        self.rows: list[LoggedOp] = []
        self._describe = describe

    def add(self, func: OpOverload, out: Any, phase: str, first_event: int, last_event: int) -> None:
        self.rows.append(LoggedOp(str(func), self._describe(out), phase, first_event, last_event))


# -------------------------------------------------------------------------------------------------- the trace

Place = Literal["gpu", "host"]
Phase = Literal["setup", "forward", "backward", "optimizer"]

_ACCUMULATE_GRAD = 2**64 - 1  # the sequence number of every AccumulateGrad node
_MOST_OPERANDS = 4  # that are looked at: a foreach op has hundreds
_OF_MODEL = ("parameter", "buffer", "weight average")
_MOST_DRAWS = 100_000_000  # random numbers, in one to three seconds
_KIND_OF_STAGE: dict[Stage, Kind] = {
    "batch": "batch",
    "backward": "temporary",
    "optimizer step": "temporary",
}


class CallState(threading.local):
    """What the call into torch that a thread makes now is about."""

    inside_dispatch = 0  # depth of our own dispatch, in which tensors show their true device
    place: Place | None = None  # the device argument of the function being called
    handling = 0  # depth of the function mode's handler, inside which the mode is off
    below_autograd = 0  # depth of Python code that an op runs: of a tensor subclass, of a library's kernel
    redispatched = False  # the op that is dispatched next is for the subclass


class Training:
    """What the program's training loop has done so far, and who is told of it."""

    def __init__(self) -> None:
        self.optimizers = 0  # that the program made
        self.trained: weakref.ref[Any] | None = None  # a script's first optimizer, or its first model
        self.optimizer_steps = 0  # so far, of all optimizers
        self.module_calls_at_update = -1  # that had completed when an optimizer last stepped
        self.on_optimizer_made: Callable[[torch.optim.Optimizer], None] | None = None
        self.on_optimizer_step: Callable[[torch.optim.Optimizer], None] | None = None
        self.on_parameter_update: Callable[[], None] | None = None  # by the program itself
        self.gradients_are_new = False  # a backward pass has run since parameters were last updated
        self.backward_passes = 0
        self._stepped_after: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = (
            weakref.WeakKeyDictionary()
        )
        self.data_loaders: weakref.WeakSet[Any] = weakref.WeakSet()  # that are read: iterators
        # Ids of the parameters written since that update: code that sets first values writes each once.
        self._written: set[int] = set()

    @property
    def ran_backward(self) -> bool:
        return self.backward_passes > 0

    def stepped(self, optimizer: torch.optim.Optimizer, module_calls: int) -> None:
        """A call that follows no backward pass is a part of the step before, as of libraries that update one
        group of parameters after the other. One that follows nothing at all makes the optimizer's state."""
        self.optimizer_steps += 1
        self.module_calls_at_update = module_calls
        passes, before = self.backward_passes, self._stepped_after.get(optimizer)
        self._stepped_after[optimizer] = passes
        if (passes == before and passes) or (not passes and not module_calls):
            return
        if self.on_optimizer_step is not None:
            self.on_optimizer_step(optimizer)

    def parameter_written(self, parameter: int) -> None:
        if not self.gradients_are_new:
            return
        self.gradients_are_new = False
        is_next = not self._written or parameter in self._written
        self._written = {parameter, *(() if is_next else self._written)}
        if is_next and self.on_parameter_update is not None:
            self.on_parameter_update()


class MovedBatches:
    """What the program moves from the host to the GPU outside of modules: its batches."""

    def __init__(self) -> None:
        self.moved: dict[int, tuple[BatchTensor, int]] = {}  # by allocation, with the step
        # By the result of ops on them, before a model was called: parameters may be joined from parts.
        self._parts: dict[int, set[int]] = {}
        self.rows_used: set[int] = set()  # first sizes of what models take, or the loss beside results

    def record_parts(self, result: int, operands: Iterable[PendingAllocation | None]) -> None:
        ids = [one.id for one in operands if one is not None]
        parts = {id for id in ids if id in self.moved}.union(*(self._parts.get(id, ()) for id in ids))
        if parts:
            self._parts[result] = parts

    def forget(self, weight: int) -> None:
        """It was loaded onto the GPU, and is no batch."""
        for id in (weight, *self._parts.pop(weight, ())):
            self.moved.pop(id, None)

    def record_use(self, given: Iterable[Any], in_loss: bool = False) -> None:
        """The arguments of a model, or the operands of an op outside of models."""
        tensors = [each for each in given if isinstance(each, torch.Tensor) and each.dim()]
        if in_loss:
            results = {each.shape[0] for each in tensors if each.requires_grad}
            tensors = [each for each in tensors if not each.requires_grad and each.shape[0] in results]
        self.rows_used.update(each.shape[0] for each in tensors)

    def tensors(self) -> tuple[BatchTensor, ...]:
        """What the program moved to the GPU, without vectors of other lengths than those that a model or the
        loss takes: sizes that a trainer gathers, a noise schedule."""
        moved = dict.fromkeys(one for one, _ in self.moved.values())
        rows = self.rows_used | {one.shape[0] for one in moved if len(one.shape) > 1}
        used = (one for one in moved if len(one.shape) > 1 or one.shape[0] in rows)
        return tuple(used) or tuple(moved)

    def lengths_differ(self) -> bool:
        """Whether tensors of as many samples are longer in one step than in another. What is prepared before
        the loop counts as the first step."""
        in_step: dict[Any, set[tuple[int, ...]]] = {}
        for one, step in self.moved.values():
            if step > 1 and len(one.shape) > 1:
                in_step.setdefault((one.dtype, len(one.shape), one.shape[0], step), set()).add(one.shape)
        in_first: dict[Any, set[tuple[int, ...]]] = {}
        return any(in_first.setdefault(kind[:-1], shapes) != shapes for kind, shapes in in_step.items())


class Tracer:
    """Shared by the two torch modes of a trace (placement.py, dispatch.py) and by the hooks."""

    def __init__(self, gpu: GPU) -> None:
        self.gpu = gpu
        self.threads = {threading.get_ident()}  # of the program; others of the process are not traced
        self.pinned = PinnedMemory()
        # The fake tensors say "cpu" to torch: on device "cuda" autograd would look for a CUDA driver.
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.recorder = AllocationRecorder()
        self.boundary = StackBoundary()
        self.guard = RuleGuard(self.note_once)
        self.values = Values()
        self.estimates = ValueEstimates(
            self.values,
            self.note,
            self.note_once,
            self.site,
            lambda: self.recorder.live_bytes,
            lambda: self.modules.inside_model,
        )
        self.work = KernelCounter(gpu)
        self.rule_context = RuleContext(
            gpu,
            self.on_gpu,
            self.guard,
            self.count_kernel,
            self.workspace,
            self.estimates.count_classes,
            self.estimates.has_zeros,
            held=[],
            compiling=lambda: self.compiling,
        )
        self.after_trace: list[Callable[[], object]] = []  # called when torch is as it was before
        self.compiled_as_eager = False  # a part of the program that torch.compile compiles
        self.graph_pool = 0  # the stream whose memory a CUDA graph has; 0: none runs
        self.progress: Progress = lambda text, fraction: None
        self.compiling = False  # the program's compiler runs, on fake tensors of its own (compiled.py)
        self.compile_seconds = 0.0
        self.several_optimizers = False  # of a script, which count their steps by themselves
        self.last_step_is_partial = False  # of a script, stopped within it or ended after the one before
        self.blocks_repeated = False  # of a model, without being traced (repeats.py)
        self.reads = 0  # of values that may be guesses, by the program or for a size
        self.repeat_first_step = False  # the passes of a Workload's second step are those of its first
        self.modules = ModuleStack(self.recorder.mark)
        self.training = Training()
        self.batches = MovedBatches()
        self.phase: Phase = "setup"
        self.step = 0
        self.seeded = False  # the program has set the seed of the host's random generator
        self._draws_left = _MOST_DRAWS
        self.ranks = 1  # of the process group; one of them is traced
        self.has_process_group = False  # the program has made one
        self.call = CallState()
        self.lock = threading.RLock()  # held during an op: neither this nor the fake mode is made for threads
        self.batch: Any = None
        self.batch_sizes: BatchSizes | None = None  # that the batch gets, other than the program's
        self.loader_workers: int | None = None  # most of a DataLoader; None: the program has none
        self.freed_at_last: dict[int, int] = {}  # id of a bucket of DDP, the event before which NCCL frees it
        self.allocator: str | None = None  # as the Workload gives it
        self.log: OpLog | None = None
        self.loads_state = False  # of a model or an optimizer
        self.parameter_sites = WeakIdKeyDictionary()  # parameter -> the line that made it
        self.buffer_sites = WeakIdKeyDictionary()  # buffer -> the line that registered it
        self.parameter_names: dict[int, str] = {}
        # id of a parameter of a model that existed before the trace -> the parameter, and its fake in the
        # trace
        self.fake_parameters: dict[int, tuple[torch.nn.Parameter, torch.nn.Parameter]] = {}
        self._loss_after: int | None = None  # after so many model calls, work outside modules is the loss
        # autograd sequence number -> line, module, stream, of the forward op
        self._origins: dict[int | None, tuple[Site | None, str, int]] = {}
        self._newest_node = -1
        self._host_nodes: set[int | None] = set()  # autograd sequence numbers of ops on the host
        self._running_node: tuple[int | None, int] = (None, 0)  # its number, and its first allocation's id
        # During the op that is dispatched: its caller, and what find_site gives of it once it is known.
        self.caller: FrameType | None = None
        self.line: tuple[Site | None, bool] | None = None
        self.embeddings: dict[tuple[str, int], int] = {}  # module, rows -> rows that indices reach
        self.holders = HolderSearch(
            self.recorder, self.modules, self.boundary, self.guard, lambda: self.step, self.label_parameters
        )
        self.growth = GrowthWatch(self.site)
        self.sizes: Mapping[str, int] = {}  # of the Workload
        self.search_limit = 0  # bytes that cuDNN's search may fill
        self._searched: set[Hashable] = set()  # convolutions

    # -- placement ------------------------------------------------------------------------------------

    def on_gpu(self, tensor: torch.Tensor) -> bool:
        if self.compiling and tensor.device.type == "cuda":
            return True  # of the compiler's own fake tensors
        if isinstance(tensor, FakeTensor):
            return self.recorder.is_on_gpu(tensor)
        if is_lazy(tensor):
            return getattr(tensor, "is_on_traced_gpu", False)
        return any(map(self.recorder.is_on_gpu, inner_tensors(tensor)))

    @contextlib.contextmanager
    def placing(self, place: Place | None) -> Iterator[None]:
        """Put the results of what is called inside on `place`."""
        call = self.call
        before, call.place = call.place, place
        try:
            yield
        finally:
            call.place = before

    def called_by_autograd(self) -> bool:
        """Whether autograd's own code makes a tensor from nothing: zeros for an undefined gradient."""
        return self.phase == "backward" and self._line()[1] and running_sequence_nr() not in self._host_nodes

    def fake_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake of a real tensor, on the host."""
        with disable_torch_function(), self.fake_mode:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(fake, tensor.requires_grad)
        return fake

    # -- phases ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def in_phase(self, phase: Phase, marked: bool = True) -> Iterator[None]:
        before, self.phase = self.phase, phase
        if marked:
            self.recorder.mark(phase)
        if phase == "backward":
            for allocation in self.recorder.live_allocations():
                if allocation.during in ("forward activations", "loss"):
                    allocation.saved = True
        try:
            yield
        finally:
            self.phase = before

    @contextlib.contextmanager
    def loss_after_model(self) -> Iterator[None]:
        """Once the model has been called, what happens outside it is the loss."""
        self._loss_after = self.modules.completed
        try:
            yield
        finally:
            self._loss_after = None

    def set_ranks(self, ranks: int) -> None:
        self.ranks = ranks
        show_devices(gpus_of_node(ranks))

    def mark_live_as_batch(self) -> None:
        """The function that ran was only the set-up of the step that it returned."""
        for allocation in self.recorder.live_allocations():
            if allocation.kind == "activation":
                allocation.kind, allocation.during = "batch", "batch"

    def in_autograd_thread(self) -> bool:
        """On CUDA, the backward pass and what it recomputes run in a thread of their own."""
        return self.phase == "backward"

    def stream(self) -> int:
        """The number of the stream that runs now. A backward op runs on the stream of its forward op."""
        streams = current_streams()
        if self.graph_pool:
            return self.graph_pool
        if not streams.several:
            return 0
        number = streams.number(streams.current)
        in_backward = self.phase == "backward" and number == 0
        origin = self._origins.get(running_sequence_nr()) if in_backward else None
        return number if origin is None else origin[2]

    def synchronize(self) -> None:
        """The host waits for what it has given to the current stream."""
        self.work.synchronize(self.phase)
        self.recorder.synchronize()

    def site(self) -> Site | None:
        """The line that runs now."""
        site = self._line()[0]
        return site.plain() if isinstance(site, CompiledSite) else site

    def note(self, text: str) -> None:
        """Note something about the line that runs now."""
        self.recorder.note(text, self.site())

    def note_once(self, text: str) -> None:
        self.recorder.note_once(text, self.site())

    # -- attribution ----------------------------------------------------------------------------------

    def record_autograd_node(self) -> None:
        """Called for each op: if autograd has just made a node for it, remember the line.

        A node is made right before its op is dispatched, so the newest number is the op's own.
        """
        newest = get_sequence_nr() - 1
        if newest != self._newest_node:
            self._newest_node = newest
            site, at_engine = self._line()
            if not at_engine:
                self._origins[newest] = (site, self.modules.path, self.stream())
            elif (origin := self._origins.get(running_sequence_nr())) is not None:
                self._origins[newest] = origin  # of a graph that backward makes

    def record_host_node(self, tensors: Iterable[Any]) -> None:
        """Called for each op on the host: what its node makes from nothing is on the host, too."""
        if torch.is_grad_enabled() and any(getattr(each, "requires_grad", False) for each in tensors):
            newest = get_sequence_nr() - 1
            if newest != self._newest_node:
                self._newest_node = newest
                self._host_nodes.add(newest)

    def made_by_running_node(self, tensor: torch.Tensor) -> bool:
        """Whether the node that autograd runs now made the tensor."""
        allocation = self.recorder.allocation_of(tensor)
        number, first = self._running_node
        return allocation is not None and number == running_sequence_nr() and allocation.id >= first

    def _is_loss(self) -> bool:
        if self.modules.inside_loss:
            return True
        if self._loss_after is not None and not self.modules.inside_model:
            return self.modules.completed > self._loss_after
        return in_loss_function(self.boundary, self.caller)

    def attribution(self) -> tuple[Site | None, str, Stage]:
        """The line, module and stage that an allocation made now belongs to."""
        unknown: Stage = "batch" if self.phase == "setup" else "forward activations"
        return self.guard.call("source line", "an allocation", self._attribution, lambda: (None, "", unknown))

    def _line(self) -> tuple[Site | None, bool]:
        if self.caller is None:
            return find_site(self.boundary)
        if self.line is None:
            self.line = find_site(self.boundary, self.caller)
        return self.line

    def _attribution(self) -> tuple[Site | None, str, Stage]:
        site, at_engine = self._line()
        path = self.modules.path
        compiled = site if isinstance(site, CompiledSite) else None
        if self.phase == "backward" and (at_engine or compiled):
            number = running_sequence_nr()
            if number != self._running_node[0]:
                self._running_node = number, len(self.recorder.allocations)
            origin = self._origins.get(number)
            if origin is not None:
                site, path = origin[0], origin[1]
        if compiled:
            site = compiled.plain()
            path = ".".join(filter(None, (path, compiled.module)))
        if self.phase == "backward":
            return site, path, "backward"
        if self.phase == "optimizer":
            return site, path, "optimizer step"
        if self.phase == "setup":
            return site, path, "batch"
        if self._averages_weights():
            return site, path, "optimizer step"
        if not torch.is_grad_enabled() and self._evaluates():
            return site, path, "evaluation"
        return (
            site,
            path,
            "loss" if (compiled and compiled.is_loss) or self._is_loss() else "forward activations",
        )

    def _evaluates(self) -> bool:
        """Whether a model that also trains, or an average of weights, ran last, in evaluation mode."""
        if self.modules.evaluating:
            return True
        model = self.modules.in_evaluation_mode
        parameter = None if model is None else next(model.parameters(), None)
        allocation = None if parameter is None else self.recorder.allocation_of(parameter)
        return allocation is not None and allocation.kind == "weight average"

    def _averages_weights(self) -> bool:
        """Between an optimizer step and the next module call, what is computed without gradients belongs to
        the update: weight averages, mostly."""
        return self.modules.completed == self.training.module_calls_at_update and not (
            self.modules.inside_model or torch.is_grad_enabled()
        )

    def mark_gradient(self, out: Any) -> None:
        """The result of an AccumulateGrad node is a gradient."""
        if running_sequence_nr() == _ACCUMULATE_GRAD and isinstance(out, torch.Tensor):
            allocation = self.recorder.allocation_of(out)
            if allocation is not None:
                allocation.kind = "gradient"

    def before_root_call(self, model: torch.nn.Module) -> None:
        """Called before each call of a module that is inside no other."""
        self.holders.before_call()
        self.growth.before_call(id(model), self.recorder.live_bytes)

    def name_modules(self, model: torch.nn.Module) -> None:
        """Give every module of the model its path."""
        rule = functools.partial(self.modules.name, model)
        self.guard.call("module paths", type(model).__name__, rule, lambda: None)

    def label_parameters(self) -> None:
        """Label the allocations of parameters and buffers with their kind, owner and line."""
        with disable_torch_function():
            self.guard.call("labels", "parameters", self._label_parameters, lambda: None)

    def _label_parameters(self) -> None:
        names = self.modules.tensor_names()
        for tensor, (owner, kind) in names:
            for allocation in self.recorder.allocations_of(tensor):
                unnamed = allocation.kind == kind and not allocation.module  # before its model was called
                if unnamed or allocation.kind not in _OF_MODEL:
                    allocation.kind, allocation.module, allocation.op = kind, owner, kind
                    made_by = self.parameter_sites.get(tensor) or self.buffer_sites.get(tensor)
                    allocation.site = made_by or allocation.site
                    self.batches.forget(allocation.id)
        for tensor in self.parameter_sites:
            for allocation in self.recorder.allocations_of(tensor):
                if allocation.kind not in _OF_MODEL:
                    allocation.kind, allocation.op = "parameter", "parameter"
        self.parameter_names = {id(tensor): owner for tensor, (owner, _) in names}

    # -- recording ------------------------------------------------------------------------------------

    def record_result(self, tensor: torch.Tensor, op: str, operands: Sequence[torch.Tensor] = ()) -> None:
        """Record a result of `op` on the GPU, if its storage is new."""
        if not self.modules.completed and not self.modules.inside_model and self.batches.moved:
            number = len(self.recorder.allocations)
            self.batches.record_parts(number, map(self.recorder.allocation_of, operands))
        self.recorder.record_tensor(tensor, self._describe(op, operands[:_MOST_OPERANDS]))

    def is_batch(self, source: torch.Tensor) -> bool:
        """Whether a tensor that the program moves from the host to the GPU is data: dense, and held by no
        module."""
        held = isinstance(source, torch.nn.Parameter) or source in self.buffer_sites
        if source.dtype is torch.uint8 and source.shape == (16,):  # the state of CUDA's random generator
            return False
        held = held or self.loads_state or source.layout is not torch.strided
        return source.dim() > 0 and self.phase == "forward" and not held and not self.modules.inside_model

    def record_move(self, source: torch.Tensor, moved: torch.Tensor) -> None:
        allocation = self.recorder.allocation_of(moved)
        if allocation is not None and source.numel() and self.is_batch(source):
            one = BatchTensor("", tuple(source.shape), str(source.dtype).removeprefix("torch."))
            self.batches.moved[allocation.id] = one, self.step

    def record_in_place(self, tensor: torch.Tensor, op: str) -> None:
        """Record a tensor that `op` wrote into again, if its storage was resized."""
        self.recorder.record_tensor_resize(tensor, self._describe(op))
        allocation = self.recorder.allocation_of(tensor) if self.phase == "forward" else None
        if allocation is None:
            return
        if allocation.cloned and allocation.during != "optimizer step" and self._averages_weights():
            allocation.kind = "weight average"
        trained = allocation.kind == "parameter" or (tensor.is_leaf and tensor.grad is not None)
        if trained:
            self.training.parameter_written(id(allocation))

    def draw_on_host(self, like: torch.Tensor, draw: Callable[[torch.Tensor], object]) -> None:
        """Advance the host's random generator as initialising a parameter does, if the program set its seed:
        then the order of its data, which follows, is that of the real run. After _MOST_DRAWS numbers nothing
        more is drawn, and the order differs."""
        if not self.seeded:
            return
        self._draws_left -= like.numel()
        if self._draws_left >= 0:
            with disable_dispatch_modes(), disable_torch_function():
                real = torch.empty(like.shape, dtype=like.dtype)
                self.guard.call("random numbers", "a parameter", lambda: draw(real), lambda: None)

    def record_embedding(self, weight: torch.Tensor, indices: torch.Tensor) -> None:
        """Rows that the program looks up; all where the indices are not known."""
        found = self.values.of(indices)
        known = found.known and found.values.numel() > 0
        used = int(found.values.max()) + 1 if known else weight.shape[0]
        key = (self.modules.path, weight.shape[0])
        self.embeddings[key] = max(used, self.embeddings.get(key, 0))

    def _describe(self, op: str, operands: Sequence[torch.Tensor] = ()) -> Describe:
        def describe(id: int, size: int, tensor: torch.Tensor) -> PendingAllocation:
            site, path, stage = self.attribution()
            line = self._line()[0]
            sources = [one for one in map(self.recorder.allocation_of, operands) if one is not None]
            kind = _KIND_OF_STAGE.get(stage, "activation")
            if not sources and self.phase == "forward" and stage != "loss" and not self.modules.inside_model:
                stage, kind = "batch", "activation"  # moved to the GPU or filled there: data, kept or not
            return PendingAllocation(
                id,
                size,
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                op=line.op if isinstance(line, CompiledSite) else op,
                module=path,
                site=site,
                during=stage,
                step=self.step,
                kind=kind,
                stream=self.stream(),
                cloned=op == "aten.clone",
                parent=max(sources, key=lambda one: one.bytes).id if sources else None,
                call=self.modules.completed,
                differentiable=torch.is_grad_enabled() and any(one.requires_grad for one in operands),
            )

        return describe

    def record_workspace(self, size: int, op: str) -> PendingAllocation:
        """Record bytes that no tensor shows; the caller frees them, or they stay for good."""
        site, path, stage = self.attribution()
        id = len(self.recorder.allocations)
        most = size.most if isinstance(size, Estimated) else None
        size, stream = int(size), self.stream()
        allocation = PendingAllocation(
            id,
            size,
            (size,),
            "uint8",
            op,
            path,
            site,
            stage,
            self.step,
            "workspace",
            stream=stream,
            most=most,
        )
        self.recorder.record_allocation(allocation)
        return allocation

    @contextlib.contextmanager
    def workspace(self, size: int, op: str) -> Iterator[None]:
        allocation = self.record_workspace(size, op)
        yield
        self.recorder.record_free(allocation)

    def record_search(self, search: Search) -> None:
        """Record the workspace of a thread's first call of a convolution: cuDNN tries its algorithms."""
        key = search.convolution, self.in_autograd_thread()
        if key in self._searched:
            return
        self._searched.add(key)
        free = self.search_limit - self.recorder.live_bytes
        size = max((size for size in search.workspaces if size <= free), default=0)
        self.recorder.record_free(self.record_workspace(size, CUDNN_SEARCH))

    def count_kernel(self, *tensors: torch.Tensor | None, flops: float = 0.0, kind: str = "kernel") -> None:
        """Count a CUDA kernel that no traced op stands for, with the tensors it reads and writes."""
        if self.work.counting:
            given = [tensor for tensor in tensors if tensor is not None]
            self.work.kernel(given, self.phase, flops, kind=kind)
