"""DistributedDataParallel and DataParallel of torch, whose replicas are one on the fake GPU."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from oomph.prediction.compat.library import Library
from oomph.prediction.patches import Patches
from oomph.prediction.tracer.streams import DEVICE
from oomph.torch_internals import tree_map
from oomph.units import MiB

if TYPE_CHECKING:
    from oomph.prediction.tracer.tracer import Tracer


def _train_one_replica(patches: Patches, tracer: Tracer) -> None:
    patches.set(nn.DataParallel, "forward", _call_on_gpu)
    if torch.distributed.is_available():
        _replace_distributed_data_parallel(patches, tracer)


def _call_on_gpu(self: Any, *inputs: Any, **kwargs: Any) -> Any:
    def moved(value: Any) -> Any:
        return value.to(DEVICE) if isinstance(value, torch.Tensor) else value

    return self.module(*tree_map(moved, inputs), **tree_map(moved, kwargs))


def _replace_distributed_data_parallel(patches: Patches, tracer: Tracer) -> None:
    """DDP's reducer is written in C++ for real tensors. What it allocates are its buckets of gradients."""
    ddp = nn.parallel.DistributedDataParallel
    bind = inspect.signature(ddp.__init__).bind

    def init(self: Any, module: nn.Module, device_ids: Any = None, *args: Any, **kwargs: Any) -> None:
        given = bind(self, module, device_ids, *args, **kwargs)
        given.apply_defaults()
        named = given.arguments
        nn.Module.__init__(self)
        for name in ("dim", "broadcast_buffers", "find_unused_parameters", "gradient_as_bucket_view"):
            setattr(self, name, named[name])
        self.broadcast_buffers = self.broadcast_buffers is not False
        self._given = {name: value for name, value in named.items() if name not in ("self", "module")}
        self.module, self.device_ids, self.static_graph = module, device_ids, named["static_graph"]
        self.device = next((p.device for p in module.parameters()), None)
        self.device_type = self.device.type if self.device is not None else "cuda"
        self.output_device = (
            (device_ids or [None])[0] if named["output_device"] is None else named["output_device"]
        )
        self.process_group = named["process_group"] or torch.distributed.group.WORLD
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = False
        self.reducer, self.logger = _Reducer(), _Reducer()
        self._cap_mb = named["bucket_cap_mb"] or 25
        self.bucket_bytes_cap = int(self._cap_mb * MiB)
        self._buckets = _Buckets(module, self._cap_mb, tracer)
        self._replaced_buckets = None
        self._may_be_held = []  # ids of buckets, in the second forward
        self._has_reduced = False
        self._will_rebuild = bool(self.static_graph) or not self.find_unused_parameters
        ranks = torch.distributed.get_world_size(self.process_group)

        def reduce(parameter: torch.Tensor) -> None:
            if not self.require_backward_grad_sync:
                return
            self._replaced_buckets = None
            tracer.freed_at_last.update(dict.fromkeys(self._may_be_held, len(tracer.recorder.events)))
            self._may_be_held = []
            self._has_reduced = True
            if self.gradient_as_bucket_view:
                parameter.grad = self._buckets.view(parameter)
            if ranks > 1:
                tracer.work.collective(2 * parameter.nbytes * (ranks - 1) // ranks, ranks, "backward")

        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(reduce)

    def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        # After the first backward the buckets are made again, in the order in which gradients came. NCCL's
        # watchdog, which looks every 100 ms, keeps the old ones until the next backward, unless the program
        # takes its time to get a batch from a loader. Workers may have the batch ready.
        if self._will_rebuild and self._has_reduced and torch.is_grad_enabled():
            self._will_rebuild = False
            self._replaced_buckets, self._buckets = self._buckets, None
            if tracer.loader_workers is None:
                tracer.note_once("DDP: in the second forward, NCCL may still hold the first buckets")
            else:
                self._may_be_held = self._replaced_buckets.ids if tracer.loader_workers else []
                self._replaced_buckets = None
            self._buckets = _Buckets(self.module, self._cap_mb, tracer)
        if self.device_ids:
            return _call_on_gpu(self, *inputs, **kwargs)
        return self.module(*inputs, **kwargs)

    def set_static_graph(self: Any) -> None:
        self._will_rebuild = self.static_graph = True

    def get_state(self: Any) -> dict[str, Any]:
        return {"module": self.module, **self._given, "process_group": None}

    def set_state(self: Any, state: dict[str, Any]) -> None:
        self.__init__(**state)

    patches.set(ddp, "__init__", init)
    patches.set(ddp, "forward", forward)
    patches.set(ddp, "register_comm_hook", lambda *args, **kwargs: None)
    patches.set(ddp, "_set_static_graph", set_static_graph)
    patches.set(ddp, "_get_ddp_logging_data", lambda self: {})
    patches.set(ddp, "__getstate__", get_state)
    patches.set(ddp, "__setstate__", set_state)


class _Reducer:
    """Stands for DDP's reducer, which programs ask to prepare for a backward pass."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


class _Buckets:
    """One buffer for about `cap_mb` of gradients of a dtype; the first holds 1 MiB."""

    def __init__(self, module: nn.Module, cap_mb: float, tracer: Tracer) -> None:
        self._views: dict[torch.Tensor, torch.Tensor] = {}
        self.ids: list[int] = []
        self._tracer = tracer
        filled: dict[Any, list[torch.Tensor]] = {}  # of dtype and device: parameters of the open bucket
        for parameter in module.parameters():
            if not parameter.requires_grad:
                continue
            key = parameter.dtype, parameter.device
            filled.setdefault(key, []).append(parameter)
            size = sum(each.nbytes for each in filled[key])
            if size >= (cap_mb if self._views else 1) * MiB:
                self._add(filled.pop(key))
        for parameters in filled.values():
            self._add(parameters)

    def _add(self, parameters: list[torch.Tensor]) -> None:
        sizes = [each.numel() for each in parameters]
        bucket = torch.empty(sum(sizes), dtype=parameters[0].dtype, device=parameters[0].device)
        allocation = self._tracer.recorder.allocation_of(bucket)
        if allocation is not None:
            allocation.kind = "gradient"
            self.ids.append(allocation.id)
        self._views.update(zip(parameters, bucket.split(sizes), strict=True))

    def view(self, parameter: torch.Tensor) -> torch.Tensor:
        return self._views[parameter].view_as(parameter)


LIBRARY = Library("DDP", None, in_trace=_train_one_replica)
