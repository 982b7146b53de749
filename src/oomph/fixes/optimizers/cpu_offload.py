"""Optimizer CPU offload: the optimizer's state and step are on the host."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from oomph.errors import UserError
from oomph.fixes.optimizers.conversion import (
    FUSED_KINDS,
    OptimizerFix,
    ReplacingOptimizer,
    hyperparameter,
    kind_of,
    why_not_independent,
)
from oomph.fixes.optimizers.low_bit import LowBitAdam
from oomph.fixes.registry import bytes_option
from oomph.units import MiB
from oomph.workload import Workload

_ALIGNMENT = 64  # bytes
_DEVICE_OPTIONS = ("params", "fused", "foreach", "capturable")  # the host copies have their own


class OptimizerCPUOffload(OptimizerFix):
    name = "optimizer_cpu_offload"
    kind = "exact"
    changes = (
        "The optimizer's state stays in host memory: gradients go there, and updated parameters come back."
    )
    excludes: ClassVar = {
        "optimizer_8bit": "state on the host needs no 8 bits",
        "stochastic_rounding": "its step is a kernel of the GPU",
        "optimizer_in_backward": "backward would wait for the host at every parameter",
        "fused_optimizer": "the step runs on the host, fused where torch has that",
        "no_foreach": "the step runs on the host, one parameter at a time",
    }

    note = "the GPU waits for the step on the host, whose speed is only estimated"

    def change_workload(
        self, workload: Workload, *_: Any, staging: str | int = 64 * MiB, independent: bool = False
    ) -> Workload:
        """`staging`: pinned memory that gradients are copied into, twice this, or twice the largest gradient
        if that is more. `independent`: the user says that an optimizer which is not torch's own updates each
        parameter independently."""
        size = bytes_option(self.name, "staging", staging)
        if size < 1:
            raise UserError(f"fix {self.name!r}: staging={staging!r} is not valid; give a size such as 64MiB")
        return self.converting(workload, staging=size, independent=independent)

    def why_not(self, optimizer: Optimizer, *, independent: bool = False, **options: Any) -> str | None:
        if isinstance(optimizer, CPUOffloadOptimizer | LowBitAdam):
            return f"{kind_of(optimizer)} belongs to another fix and has its own step"
        return why_not_independent(optimizer, independent)

    def convert(self, optimizer: Optimizer, *, staging: int = 0, **options: Any) -> Optimizer:
        return CPUOffloadOptimizer(optimizer, staging, self.name)


class CPUOffloadOptimizer(ReplacingOptimizer):
    """Steps host copies of the parameters with another optimizer.

    Gradients are copied into two pinned staging buffers in turn, so that the copies for some parameters run
    while others are stepped. Nothing is allocated on the GPU.
    """

    def __init__(self, original: Optimizer, staging: int, fix: str) -> None:
        super().__init__(original)
        self.fix, self.staging = fix, staging
        # The same optimizer, except for the parameters that it steps.
        self._inner: Optimizer = object.__new__(type(original))
        self._inner.__dict__.update(original.__dict__)
        self._inner.__dict__.pop("step", None)  # a scheduler's wrapper, which steps the original
        self._inner.state, self._inner.param_groups = defaultdict(dict), []
        self._copies: dict[Tensor, _HostCopy] = {}
        for group in self.param_groups:  # some optimizers create their state at once
            for parameter in group["params"]:
                state = original.state.pop(parameter, None)
                if state:
                    host = self._copy_of(parameter, group).host
                    for key, value in state.items():
                        moved = value.to("cpu") if isinstance(value, Tensor) else value
                        self._inner.state[host][key] = moved
        self._staging_buffers: list[Tensor] = []
        self._stream: torch.cuda.Stream | None = None  # for copies to the host, beside those back

    def update_parameters(self) -> None:
        pending: tuple[list[_HostCopy], Any] | None = None
        for number, bucket in enumerate(self._buckets()):
            copied = self._copy_gradients(bucket, self._staging_buffers[number % 2])
            if pending is not None:
                self._step_on_host(*pending)
            pending = bucket, copied
        if pending is not None:
            self._step_on_host(*pending)

    def _buckets(self) -> Iterator[list[_HostCopy]]:
        """Parameters whose gradients fit into a staging buffer together."""
        copies = [
            self._copy_of(p, group)
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        if not copies:
            return
        size = max(self.staging, *(copy.bytes for copy in copies))
        if not self._staging_buffers or self._staging_buffers[0].numel() < size:
            like = copies[0].parameter
            self._staging_buffers = [_host_memory(like, (size,), torch.uint8) for _ in range(2)]
        bucket: list[_HostCopy] = []
        for copy in copies:
            if bucket and sum(one.bytes for one in bucket) + copy.bytes > size:
                yield bucket
                bucket = []
            bucket.append(copy)
        yield bucket

    def _copy_of(self, parameter: Tensor, group: dict[str, Any]) -> _HostCopy:
        copy = self._copies.get(parameter)
        if copy is None:
            fused = type(self._inner) in FUSED_KINDS
            copy = self._copies[parameter] = _HostCopy(parameter, group, fused)
            self.state[parameter] = self._inner.state[copy.host]  # for checkpoints
        hyperparameter(group, "lr", self.fix)
        copy.group.update((key, group[key]) for key in self.defaults if key not in _DEVICE_OPTIONS)
        return copy

    def _copy_gradients(self, bucket: list[_HostCopy], buffer: Tensor) -> torch.cuda.Event | None:
        """Start to copy the gradients to the host; returns the event that ends the copies."""
        offset, device = 0, bucket[0].parameter.device
        if device.type == "cuda":
            self._stream = self._stream or torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))
        # Without a stream, the copies end at once. torch.cuda.stream(None) would start CUDA.
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            for copy in bucket:
                offset = copy.receive_gradient(buffer, offset)
        return None if self._stream is None else self._stream.record_event()

    def _step_on_host(self, bucket: list[_HostCopy], copied: torch.cuda.Event | None) -> None:
        if copied is not None:
            copied.synchronize()
        self._inner.param_groups = [copy.group for copy in bucket]
        try:
            self._inner.step()
        finally:
            self._inner.param_groups = []
        for copy in bucket:
            copy.send_parameter()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the inner optimizer's state dict; the state stays on the host."""
        copies = [[self._copy_of(p, group) for p in group["params"]] for group in self.param_groups]
        inner = self._inner
        inner.param_groups = [
            {**group, "params": [copy.host for copy in own]}
            for group, own in zip(self.param_groups, copies, strict=True)
        ]
        try:
            inner.load_state_dict(state_dict)
            for group, loaded in zip(self.param_groups, inner.param_groups, strict=True):
                group.update((key, value) for key, value in loaded.items() if key not in _DEVICE_OPTIONS)
        finally:
            inner.param_groups = []
        for own in copies:
            for copy in own:
                self.state[copy.parameter] = inner.state[copy.host]


class _HostCopy:
    """A parameter's copy on the host, with a parameter group of its own."""

    def __init__(self, parameter: Tensor, group: dict[str, Any], fused: bool) -> None:
        self.parameter = parameter
        self.host = _host_memory(parameter, parameter.shape, parameter.dtype, parameter.stride())
        self.bytes = -(-parameter.numel() * parameter.element_size() // _ALIGNMENT) * _ALIGNMENT
        self.group = {**group, "params": [self.host]}
        options = {"foreach": False, "capturable": False, "fused": fused and not group.get("differentiable")}
        self.group.update((key, value) for key, value in options.items() if key in group)
        self._version = -1  # of the parameter when the copy was last equal to it

    def receive_gradient(self, buffer: Tensor, offset: int) -> int:
        """Copy the gradient into the buffer; returns the next free offset."""
        p, gradient = self.parameter, self.parameter.grad
        assert gradient is not None
        if p._version != self._version:  # the first time, or the program has written to the parameter
            self.host.copy_(p, non_blocking=True)
        flat = buffer[offset : offset + p.numel() * p.element_size()].view(p.dtype)
        staged = flat.as_strided(p.shape, p.stride())
        staged.copy_(gradient, non_blocking=True)
        self.host.grad = staged
        return offset + self.bytes

    def send_parameter(self) -> None:
        """Copy the updated parameter back, on the current stream."""
        self.host.grad = None
        self.parameter.copy_(self.host, non_blocking=True)
        self._version = self.parameter._version


def _host_memory(like: Tensor, shape: Any, dtype: torch.dtype, stride: Any = None) -> Tensor:
    """Host memory, pinned for copies with a GPU. `like.new_empty` makes a fake tensor in a prediction."""
    pinned = like.device.type == "cuda"
    made = like.new_empty((math.prod(shape),), dtype=dtype, device="cpu", pin_memory=pinned)
    return made.as_strided(tuple(shape), stride) if stride is not None else made
