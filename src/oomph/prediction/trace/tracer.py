"""The state of one trace: where things are placed, what the program is doing, who made an allocation."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.weak import WeakIdKeyDictionary

from oomph.gpus import GPU
from oomph.prediction.trace.ledger import Describe, Draft, Ledger
from oomph.prediction.trace.module_stack import ModuleStack
from oomph.prediction.trace.oplog import OpLog
from oomph.prediction.trace.sites import Boundary, find_site, in_loss_function, in_own_code
from oomph.prediction.trace.values import Values
from oomph.prediction.trace.work import WorkMeter
from oomph.records import Kind, Site, Stage

Place = Literal["gpu", "host"]
Phase = Literal["setup", "forward", "backward", "optimizer"]

_ACCUMULATE_GRAD = 2**64 - 1  # the sequence number of every AccumulateGrad node


class Tracer:
    """Shared by the two torch modes of a trace (placement.py, dispatch.py)."""

    def __init__(self, gpu: GPU) -> None:
        self.gpu = gpu
        self.thread = threading.get_ident()  # other threads of the process go on as if there were no trace
        # The fake tensors say "cpu" to torch: on device "cuda" autograd would look for a CUDA driver.
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.ledger = Ledger()
        self.values = Values()
        self.work = WorkMeter(gpu)
        self.optimizer_steps = 0  # so far, of all optimizers
        self.on_optimizer_step: Callable[[], None] | None = None
        self.boundary = Boundary()
        self.modules = ModuleStack(self.ledger.mark)
        self.phase: Phase = "setup"
        self.step = 0
        self.inside = 0  # depth of our own dispatch, in which tensors show their true device
        self.place: Place | None = None  # where the function being called was told to put its result
        self.batch: Any = None
        self.allocator: str | None = None  # as the Workload gives it
        self._loss_after: int | None = (
            None  # after so many model calls, work outside every module is the loss
        )
        self._origin: dict[int, tuple[Site | None, str, bool]] = {}  # autograd sequence number -> forward
        self._newest_node = -1
        self.parameter_sites = WeakIdKeyDictionary()  # parameter -> the line that made it
        self.buffer_sites = WeakIdKeyDictionary()  # buffer -> the line that registered it
        self.log: OpLog | None = None
        # Parameters of a model that existed before the trace, and the fakes that stand for them in it.
        self.twins: dict[int, tuple[torch.nn.Parameter, torch.nn.Parameter]] = {}
        self.parameter_names: dict[int, str] = {}

    # -- where ----------------------------------------------------------------------------------------

    def on_gpu(self, tensor: torch.Tensor) -> bool:
        return isinstance(tensor, FakeTensor) and self.ledger.holds(tensor)

    @contextlib.contextmanager
    def placing(self, place: Place | None) -> Iterator[None]:
        """Put the results of what is called inside on `place`."""
        before, self.place = self.place, place
        try:
            yield
        finally:
            self.place = before

    def autograd_asks(self) -> bool:
        """Whether autograd's own code makes a tensor from nothing: zeros for a gradient that did not come."""
        return self.phase == "backward" and find_site(self.boundary, 2)[1]

    # -- what the program is doing --------------------------------------------------------------------

    @contextlib.contextmanager
    def doing(self, phase: Phase) -> Iterator[None]:
        before, self.phase = self.phase, phase
        self.ledger.mark(phase)
        if phase == "backward":
            for draft in self.ledger.alive():
                if draft.during in ("forward activations", "loss"):
                    draft.saved = True
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

    def treat_so_far_as_setup(self) -> None:
        """The function that ran was only the preparation of the step that it returned."""
        for draft in self.ledger.alive():
            if draft.kind == "activation":
                draft.kind, draft.during = "batch", "batch"

    def in_autograd_thread(self) -> bool:
        """On CUDA, the backward pass and what it recomputes run in a thread of their own."""
        return self.phase == "backward"

    def note_stream(self) -> None:
        """The program takes a stream of its own. What our own ops and fixes do with theirs is modelled."""
        if not in_own_code(2):
            self.ledger.note_first(
                "memory is counted as if all streams were one; the real allocator keeps a pool for each, so "
                "that the peak may be higher",
                find_site(self.boundary, 2)[0],
            )

    # -- who made it ----------------------------------------------------------------------------------

    def remember_origin(self) -> None:
        """Called for each op: if autograd has just made a node for it, remember the line.

        A node is made right before its op is dispatched, so the newest number is the op's own.
        """
        newest = torch._C._autograd._get_sequence_nr() - 1
        if newest != self._newest_node:
            self._newest_node = newest
            site, at_engine = find_site(self.boundary, 2)
            if not at_engine:
                self._origin[newest] = (site, self.modules.path, self._is_loss())

    def _is_loss(self) -> bool:
        if self.modules.inside_loss:
            return True
        if self._loss_after is not None and not self.modules.inside_model:
            return self.modules.completed > self._loss_after
        return in_loss_function(self.boundary, 2)

    def who(self) -> tuple[Site | None, str, Stage]:
        """The line, module and stage that an allocation made now belongs to."""
        site, at_engine = find_site(self.boundary, 2)
        path = self.modules.path
        if self.phase == "backward":
            if at_engine:
                node = torch._C._current_autograd_node()
                origin = self._origin.get(node._sequence_nr()) if node is not None else None
                if origin is not None:
                    site, path = origin[0], origin[1]
            return site, path, "backward"
        if self.phase == "optimizer":
            return site, path, "optimizer step"
        if self.phase == "setup":
            return site, path, "batch"
        return site, path, "loss" if self._is_loss() else "forward activations"

    # -- booking --------------------------------------------------------------------------------------

    def book(self, tensor: torch.Tensor, op: str) -> None:
        """Book a result of `op` as on the GPU, if its storage is new."""
        self.ledger.adopt(tensor, self._describe(op))

    def rebook(self, tensor: torch.Tensor, op: str) -> None:
        """Book a tensor that `op` wrote into again, if its storage was resized."""
        self.ledger.rebook(tensor, self._describe(op))

    def _describe(self, op: str) -> Describe:
        def describe(id: int, size: int, tensor: torch.Tensor) -> Draft:
            site, path, stage = self.who()
            kinds: dict[Stage, Kind] = {
                "batch": "batch",
                "backward": "temporary",
                "optimizer step": "temporary",
            }
            kind = kinds.get(stage, "activation")
            shape, dtype = tuple(tensor.shape), _dtype_name(tensor.dtype)
            return Draft(id, size, shape, dtype, op, path, site, stage, self.step, kind)

        return describe

    def book_workspace(self, size: int, op: str) -> Draft:
        """Book bytes that no tensor shows; the caller releases them, or they stay for good."""
        site, path, stage = self.who()
        draft = Draft(
            len(self.ledger.drafts), size, (size,), "uint8", op, path, site, stage, self.step, "workspace"
        )
        self.ledger.hold(draft)
        return draft

    def count_kernel(self, *tensors: torch.Tensor | None, flops: float = 0.0, kind: str = "kernel") -> None:
        """Count a kernel of CUDA's that no traced op stands for, with the tensors it reads and writes."""
        if self.work.counting:
            given = [tensor for tensor in tensors if tensor is not None]
            self.work.kernel(given, self.phase, flops, kind=kind)

    def label_parameters(self) -> None:
        """Say of the storages of parameters and buffers what they are, whose, and which line made them."""
        names = self.modules.tensor_names()
        for tensor, (owner, kind) in names:
            draft = self.ledger.draft_of(tensor) if isinstance(tensor, FakeTensor) else None
            if draft is not None and draft.kind not in ("parameter", "buffer"):
                draft.kind, draft.module, draft.op = kind, owner, kind
                draft.site = self.parameter_sites.get(tensor) or self.buffer_sites.get(tensor) or draft.site
        for tensor in self.parameter_sites:
            draft = self.ledger.draft_of(tensor)
            if draft is not None and draft.kind not in ("parameter", "buffer"):
                draft.kind, draft.op = "parameter", "parameter"
        self.parameter_names = {id(tensor): owner for tensor, (owner, _) in names}

    def imitate(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake twin of a real tensor, on the host."""
        with torch._C.DisableTorchFunction(), self.fake_mode:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(fake, tensor.requires_grad)
        return fake

    def notice_gradient(self, out: Any) -> None:
        """What an AccumulateGrad node hands on is a gradient."""
        node = torch._C._current_autograd_node()
        if node is not None and node._sequence_nr() == _ACCUMULATE_GRAD and isinstance(out, torch.Tensor):
            draft = self.ledger.draft_of(out)
            if draft is not None:
                draft.kind = "gradient"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
