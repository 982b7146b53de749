"""An optimizer whose state and step are the host's: gradients go there, parameters come back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from oomph.fixes.optimizers.conversion import number_in, takes_over_hooks, takes_the_place_of

_ALIGNED = 64  # bytes
_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
_OF_DEVICE = ("params", "fused", "foreach", "capturable")  # settings that the host has its own for


class OnHost(Optimizer):
    """Steps copies of the parameters in host memory by another optimizer, of which this one has the groups.

    Gradients are copied out into two pieces of pinned memory in turn, so that the copies for some parameters
    run while others are stepped. Nothing is allocated on the GPU.
    """

    def __init__(self, inner: Optimizer, staging: int, fix: str) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        takes_the_place_of(inner)
        takes_over_hooks(self, inner)
        self.fix, self.staging = fix, staging
        # The same optimizer, but for the parameters that it steps.
        self._inner: Optimizer = object.__new__(type(inner))
        self._inner.__dict__.update(inner.__dict__)
        self._inner.__dict__.pop("step", None)  # a scheduler's, which steps the other
        self._inner.state, self._inner.param_groups = defaultdict(dict), []
        self._copies: dict[Tensor, _Copy] = {}
        for group in self.param_groups:  # some optimizers make their state at once
            for parameter in group["params"]:
                given = inner.state.pop(parameter, None)
                if given:
                    self._copy_of(parameter, group).host_state(self._inner, given)
        self._stages: list[Tensor] = []
        self._stream: torch.cuda.Stream | None = None  # of copies out, beside those back

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        on_its_way: tuple[list[_Copy], Any] | None = None
        for number, bucket in enumerate(self._buckets()):
            copied_out = self._copy_out(bucket, self._stages[number % 2])
            if on_its_way is not None:
                self._step_on_host(*on_its_way)
            on_its_way = bucket, copied_out
        if on_its_way is not None:
            self._step_on_host(*on_its_way)
        return loss

    def _buckets(self) -> Iterator[list[_Copy]]:
        """Parameters whose gradients fit into a stage together."""
        copies = [
            self._copy_of(p, group)
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        if not copies:
            return
        largest = max(self.staging, *(copy.bytes for copy in copies))
        if not self._stages or self._stages[0].numel() < largest:
            like = copies[0].parameter
            self._stages = [_host(like, (largest,), torch.uint8) for _ in range(2)]
        bucket: list[_Copy] = []
        for copy in copies:
            if bucket and sum(one.bytes for one in bucket) + copy.bytes > largest:
                yield bucket
                bucket = []
            bucket.append(copy)
        yield bucket

    def _copy_of(self, parameter: Tensor, group: dict[str, Any]) -> _Copy:
        copy = self._copies.get(parameter)
        if copy is None:
            copy = self._copies[parameter] = _Copy(parameter, group, fused=type(self._inner) in _FUSED)
            self.state[parameter] = self._inner.state[copy.host]  # for checkpoints
        number_in(group, "lr", self.fix)
        copy.own.update((key, group[key]) for key in self.defaults if key not in _OF_DEVICE)
        return copy

    def _copy_out(self, bucket: list[_Copy], stage: Tensor) -> Any:
        """Start the copies of the gradients; gives the event that ends them."""
        at = 0
        device = bucket[0].parameter.device
        if device.type != "cuda":
            for copy in bucket:
                at = copy.receive(stage, at)
            return None
        stream = self._stream = self._stream or torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for copy in bucket:
                at = copy.receive(stage, at)
            return stream.record_event()

    def _step_on_host(self, bucket: list[_Copy], copied_out: Any) -> None:
        if copied_out is not None:
            copied_out.synchronize()
        self._inner.param_groups = [copy.own for copy in bucket]
        try:
            self._inner.step()
        finally:
            self._inner.param_groups = []
        for copy in bucket:
            copy.send()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the other optimizer's own; what it loads stays on the host."""
        copies = [[self._copy_of(p, group) for p in group["params"]] for group in self.param_groups]
        inner = self._inner
        inner.param_groups = [
            {**group, "params": [copy.host for copy in own]}
            for group, own in zip(self.param_groups, copies, strict=True)
        ]
        try:
            inner.load_state_dict(state_dict)
            for group, loaded in zip(self.param_groups, inner.param_groups, strict=True):
                group.update((key, value) for key, value in loaded.items() if key not in _OF_DEVICE)
        finally:
            inner.param_groups = []
        for own in copies:
            for copy in own:
                self.state[copy.parameter] = inner.state[copy.host]


class _Copy:
    """A parameter's copy on the host, with a group of its own."""

    def __init__(self, parameter: Tensor, group: dict[str, Any], fused: bool) -> None:
        self.parameter = parameter
        self.host = _host(parameter, parameter.shape, parameter.dtype, parameter.stride())
        self.bytes = -(-parameter.numel() * parameter.element_size() // _ALIGNED) * _ALIGNED
        self.own = {**group, "params": [self.host]}
        if "foreach" in group:
            self.own["foreach"] = False
        if "capturable" in group:
            self.own["capturable"] = False
        if "fused" in group:
            self.own["fused"] = fused and not group.get("differentiable")
        self._version = -1  # of the parameter when the copy was last the same

    def host_state(self, inner: Optimizer, given: dict[str, Any]) -> None:
        """Take over state that was made for the parameter itself."""
        for key, value in given.items():
            inner.state[self.host][key] = value.to("cpu") if isinstance(value, Tensor) else value

    def receive(self, stage: Tensor, at: int) -> int:
        """Copy the gradient into the stage; gives where the next one may begin."""
        p, gradient = self.parameter, self.parameter.grad
        assert gradient is not None
        if p._version != self._version:  # the first time, or the program has written into the parameter
            self.host.copy_(p, non_blocking=True)
        room = stage[at : at + p.numel() * p.element_size()].view(p.dtype)
        staged = room.as_strided(p.shape, p.stride())
        staged.copy_(gradient, non_blocking=True)
        self.host.grad = staged
        return at + self.bytes

    def send(self) -> None:
        """Copy the stepped parameter back; what the GPU does next waits for it."""
        self.host.grad = None
        self.parameter.copy_(self.host, non_blocking=True)
        self._version = self.parameter._version


def _host(like: Tensor, shape: Any, dtype: torch.dtype, stride: Any = None) -> Tensor:
    """Host memory for copies from and to a GPU. Made of a tensor: it has no data where that has none."""
    pinned = like.device.type == "cuda"
    size = 1
    for length in shape:
        size *= length
    made = like.new_empty((size,), dtype=dtype, device="cpu", pin_memory=pinned)
    return made.as_strided(tuple(shape), stride) if stride is not None else made
