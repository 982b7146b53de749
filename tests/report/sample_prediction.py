"""A hand-made Prediction: twelve attention layers, a large loss, three steps."""

import os
from dataclasses import replace

from oomph.records import Alive, Allocation, Event, Moment, Note, Peak, Prediction, Site, StepPeak

GiB = 2**30
MiB = 2**20

LOSS = Site(os.path.join(os.getcwd(), "loss.py"), 41, "token_loss")
GPT2 = "/env/lib/python3.11/site-packages/transformers/models/gpt2/modeling_gpt2.py"
ATTENTION = Site(GPT2, 123, "forward")
CONTEXT = 512 * MiB


def allocation(id=0, size=GiB, **changes):
    values = {
        "shape": (8, 12, 2048, 2048),
        "dtype": "float32",
        "op": "aten._softmax",
        "module": "transformer.h.0.attn",
        "site": ATTENTION,
        "stage": "forward activations",
        "kind": "activation",
        "step": 2,
    }
    return Allocation(id=id, bytes=size, **{**values, **changes})


def prediction(**changes):
    """Needs 31.5 GiB of an RTX 3090; `changes` replaces fields."""
    loss = {"shape": (16384, 50257), "module": "", "site": LOSS}
    wte = {"shape": (50257, 768), "module": "transformer.wte", "site": None, "op": "parameter"}
    tensors = [allocation(i, 3 * GiB // 2, module=f"transformer.h.{i}.attn") for i in range(12)]
    tensors += [
        allocation(12, 5 * GiB, op="aten._log_softmax", stage="loss", **loss),
        allocation(13, 6 * GiB, op="aten._log_softmax_backward_data", stage="backward", **loss),
        allocation(14, 147 * MiB, stage="parameters", kind="parameter", **wte),
        allocation(15, 147 * MiB, stage="gradients", kind="gradient", **wte),
        allocation(16, 294 * MiB, stage="optimizer state", kind="optimizer state", **wte),
        allocation(
            17, 8 * MiB, shape=(8 * MiB,), dtype="uint8", op="cublas workspace", module="", site=None,
            stage="workspace", kind="workspace",
        ),
    ]  # fmt: skip
    at_peak = tuple(sorted((Alive(one.bytes, one) for one in tensors), key=lambda alive: -alive.bytes))
    allocated = sum(alive.bytes for alive in at_peak)
    events, timeline = three_steps(allocated)
    values = {
        "gpu": "rtx3090",
        "gpu_title": "RTX 3090",
        "capacity": 25296896000,
        "limit": 25296896000 - CONTEXT,
        "verdict": "does not fit",
        "refused": tensors[13],
        "peak": Peak(allocated, 31 * GiB, 31 * GiB + CONTEXT, step=2, stage="backward", site=LOSS),
        "steps": tuple(StepPeak(step, allocated - (step == 1) * GiB, 31 * GiB, GiB) for step in (1, 2, 3)),
        "at_peak": at_peak,
        "timeline": timeline,
        "events": events,
        "allocations": tuple(tensors),
        "notes": (Note("torch.compile is traced as eager", Site(LOSS.file, 7, "build")),),
        "seconds": 3.14,
    }
    return replace(Prediction(**values), **changes)


def three_steps(peak):
    """Events and moments of a run that climbs to its peak in each step, highest in the second."""
    events = []
    timeline = []
    for step in (1, 2, 3):
        events.append(Event("mark", -1, f"step {step}"))
        height = peak if step == 2 else peak - GiB
        for tick in range(200):
            rising = tick < 140
            share = (tick / 140) ** 2 if rising else (1 - (tick - 140) / 60)
            allocated = int(GiB + (height - GiB) * share) if tick != 140 else height
            events.append(Event("alloc" if rising else "free", tick))
            timeline.append(Moment(len(events) - 1, allocated, allocated + GiB))
    return tuple(events), tuple(timeline)
