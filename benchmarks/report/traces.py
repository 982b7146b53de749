"""Scripted predictions for the report: of any length, and with hostile strings."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from oomph.records import (
    Alive,
    Allocation,
    BatchTensor,
    Event,
    Finding,
    Moment,
    Note,
    Peak,
    Prediction,
    Site,
)
from oomph.report.html import Page

MiB = 2**20
CONTEXT = 512 * MiB
FORWARD = Site(__file__, 30, "forward")
HOSTILE = (
    "</script><img src=x onerror=window.hacked=1>\x1b[31m\"'`${window.hacked=1}\u2028\x00" + "<b>" * 99_999
)


def forward() -> None:
    """The line that the scripted tensors come from."""


class _Trace:
    """Events, and the allocator's state after each."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.timeline: list[Moment] = []
        self.allocations: list[Allocation] = []
        self.alive: dict[int, Alive] = {}
        self.allocated = self.highest = 0
        self.at_peak: tuple[Alive, ...] = ()

    def mark(self, label: str) -> None:
        self.events.append(Event("mark", -1, label))

    def alloc(
        self, size: int, module: str, site: Site | None, stage: Any, kind: Any, op: str, step: int
    ) -> int:
        id = len(self.allocations)
        shape = (size // 4096, 1024)
        one = Allocation(id, size - 100, shape, "float32", op, module, site, stage, kind, step)
        self.allocations.append(one)
        self.alive[id] = Alive(size, one)
        self._event("alloc", id, size)
        return id

    def free(self, id: int) -> None:
        self._event("free", id, -self.alive.pop(id).bytes)

    def _event(self, action: Any, id: int, change: int) -> None:
        self.events.append(Event(action, id))
        self.allocated += change
        if self.allocated > self.highest:
            self.highest = self.allocated
            self.at_peak = ()
        self.timeline.append(Moment(len(self.events) - 1, self.allocated, self.highest + MiB))

    def keep_peak(self) -> None:
        if not self.at_peak and self.allocated == self.highest:
            self.at_peak = tuple(sorted(self.alive.values(), key=lambda one: -one.bytes))


def trained(steps: int = 3, layers: int = 40, name: str = "layers", temporaries: int = 1) -> Prediction:
    """Layers save a tensor in forward and free it in backward; the loss is one large tensor."""
    trace = _Trace()
    for i in range(layers):
        trace.alloc(4 * MiB, f"{name}.{i}", None, "parameters", "parameter", "parameter", 0)
    for step in range(1, steps + 1):
        trace.mark(f"step {step}")
        saved = []
        for i in range(layers):
            layer, size = f"{name}.{i}.mlp", 8 * MiB + 4096 * step
            saved.append(
                trace.alloc(size, layer, FORWARD, "forward activations", "activation", "aten.gelu", step)
            )
            for _ in range(temporaries - 1):
                trace.free(
                    trace.alloc(MiB, layer, FORWARD, "forward activations", "temporary", "aten.mul", step)
                )
        line = Site("loss.py", 41, "token_loss")
        loss = trace.alloc(256 * MiB, "", line, "loss", "activation", "aten._log_softmax", step)
        trace.mark("backward")
        for id in reversed(saved):
            for _ in range(temporaries):
                temporary = trace.alloc(MiB, "", None, "backward", "temporary", "aten.mm", step)
                trace.keep_peak()
                trace.free(temporary)
            trace.free(id)
        trace.free(loss)
    reserved = trace.highest + MiB
    capacity = trace.highest * 4 // 5 + CONTEXT
    refused = trace.at_peak[0].allocation
    return Prediction(
        gpu="small",
        gpu_title="Small GPU",
        capacity=capacity,
        limit=capacity - CONTEXT,
        verdict="does not fit",
        refused=refused,
        peak=Peak(trace.highest, reserved, reserved + CONTEXT, steps, "loss", refused.site),
        steps=(),
        at_peak=trace.at_peak,
        timeline=tuple(trace.timeline),
        events=tuple(trace.events),
        allocations=tuple(trace.allocations),
        notes=(Note("torch.compile is traced as eager", FORWARD),),
    )


def page(run: Prediction, **sections: Any) -> Page:
    cards = [("Large GPU", 1 << 40, CONTEXT), ("Tiny GPU", 1 << 29, 0)]
    return Page("train.py", [("as it is", run)], cards, **sections)


def hostile() -> Page:
    """A program all of whose strings are HOSTILE."""
    site = Site(HOSTILE, 3, HOSTILE)

    def changed(one: Allocation) -> Allocation:
        return one._replace(op=HOSTILE, dtype=HOSTILE, site=site)

    run = trained(layers=3, name=HOSTILE)
    run = replace(
        run,
        allocations=tuple(map(changed, run.allocations)),
        at_peak=tuple(Alive(size, changed(one)) for size, one in run.at_peak),
        refused=changed(run.allocations[0]),
        notes=(Note(HOSTILE, site),),
        batch=(BatchTensor(HOSTILE, (1,), "int64"),),
    )
    finding = Finding("logits", 1, HOSTILE, HOSTILE, (site,), (), HOSTILE)
    return replace(page(run, findings=[finding], notes=run.notes), target=HOSTILE)


def data_of(html: str) -> Any:
    """The JSON object inside a page."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    return json.loads(found[1])
