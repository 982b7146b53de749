"""Parts of the systems that the reports give figures for: an op, a layer or a loss, by itself.

Each part is plain torch on "cuda". The same function runs on a real GPU and, for its prediction, on the fake
one. Fields are bytes above what was allocated before the forward pass: `saved` after it, `forward` its peak,
`peak` that of forward and backward together; others are named in the part.

Legend: B batch, T tokens, D hidden size, H heads.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lab.benchmarks.systems.entries import language
from lab.benchmarks.systems.report_checks import SMALL_CHUNK, LossFunction, loss_error, losses, relative_error
from oomph.ops import precompute_updates
from oomph.workload import Workload
from oomph_lab.systems import ginr, longctx, pythia
from oomph_lab.systems.ginr.model import Attention, FeedForward, PreNorm
from oomph_lab.systems.ginr.naive import EagerAttention, EagerFeedForward, NaiveGINR
from oomph_lab.systems.longctx.naive import NaiveLongContext, RopeCache
from oomph_lab.systems.pythia.naive import WIKITEXT_2_WORDS, ResidentBatches

Reading = Mapping[str, float]


@dataclass(frozen=True)
class Step:
    """forward returns what backward starts from. leaves: whose gradients are freed after each step."""

    forward: Callable[[], Any]
    leaves: tuple[Tensor, ...]

    def backward(self, out: Any) -> None:
        results = out if isinstance(out, tuple) else (out,)
        torch.autograd.backward(results, [torch.ones_like(each) for each in results])

    def clear(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None


def memory_of(setup: Callable[[], Step]) -> Reading:
    """Of the second step: the first one makes workspaces."""
    step, found = setup(), {}
    for _ in range(2):
        step.clear()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = step.forward()
        found["saved"] = torch.cuda.memory_allocated() - before
        found["forward"] = torch.cuda.max_memory_allocated() - before
        step.backward(out)
        found["peak"] = torch.cuda.max_memory_allocated() - before
        del out
    return found


def milliseconds(step: Step) -> float:
    """The median of ten steps after three, forward and backward."""
    times = []
    for _ in range(13):
        step.clear()
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        step.backward(step.forward())
        ended.record()
        torch.cuda.synchronize()
        times.append(began.elapsed_time(ended))
    return statistics.median(times[3:])


def updates(chunk: int, batch: int = 16, device: str = "cuda") -> Step:
    """Report 000: transitions and writes of 16 x 256 tokens, 8 heads of 64, `chunk` tokens at a time."""
    shape = (batch, 256, 8, 64)
    k, v, log_alpha = (torch.randn(shape, device=device).requires_grad_() for _ in range(3))
    beta = torch.rand(shape[:3], device=device).requires_grad_()

    def forward() -> Any:
        return precompute_updates(k, v, -log_alpha.abs(), beta, memory_chunk_size=chunk)

    return Step(forward, (k, v, log_alpha, beta))


def loss(function: LossFunction, tokens: int) -> Step:
    """Report 002: the loss of the 4B model in bf16, one row, from hidden states on."""
    config = replace(longctx.PRESETS["4B"], num_layers=1)
    with torch.device("cuda"):
        model = config.build().to(torch.bfloat16)
    hidden = torch.randn(1, tokens, config.hidden_size, device="cuda", dtype=torch.bfloat16).requires_grad_()
    labels = torch.randint(0, config.vocab_size, (1, tokens), device="cuda")
    return Step(lambda: function(model, hidden, labels), (hidden, *model.parameters()))


def layer(make: Callable[[], nn.Module], *shape: int, device: str = "cuda") -> Step:
    with torch.device(device):
        module = make()
        x = torch.randn(shape).requires_grad_()
    return Step(lambda: module(x), (x, *module.parameters()))


def cross_attention() -> Step:
    config = ginr.PRESETS["default"]
    with torch.device("cuda"):
        module = PreNorm(512, EagerAttention(512, config.dim), config.dim)
        x, latents = (torch.randn(64, n, d).requires_grad_() for n, d in ((1024, 512), (256, config.dim)))
    return Step(lambda: module(x, latents), (x, latents, *module.parameters()))


def encoder() -> Step:
    config = ginr.PRESETS["default"]
    with torch.device("cuda"):
        model = NaiveGINR(config)
        images = torch.rand(64, 3, 32, 32)
    return Step(lambda: model.encode(images), tuple(model.parameters()))


def breakdown(workload: Workload) -> Reading:
    """Report 001's table: what a training step holds, by kind."""
    model = workload.make_model(lambda made: made).to("cuda")
    parameters = sum(each.nbytes for each in model.parameters())
    batch = workload.make_batch(torch.device("cuda"))
    optimizer: Any = torch.optim.AdamW(model.parameters())
    found: dict[str, float] = {"parameters": parameters, "count": parameters / 4}
    held = 0
    for _ in range(2):
        before = torch.cuda.memory_allocated()
        loss = model(**batch).loss
        found["activations"] = torch.cuda.memory_allocated() - before
        loss.backward()
        del loss
        found["gradients"] = torch.cuda.memory_allocated() - before
        held = torch.cuda.memory_allocated()
        optimizer.step()
        found["optimizer"] = max(found.get("optimizer", 0), torch.cuda.memory_allocated() - held)
        optimizer.zero_grad()
    return found


def forward_stages(tokens: int) -> Reading:
    """Report 002's table: the naive 4B model's forward pass without gradients, as its profiler ran it."""
    config = longctx.PRESETS["4B"]
    base = torch.cuda.memory_allocated()
    with torch.device("cuda"):
        model: Any = NaiveLongContext(config, 0).to(torch.bfloat16)
        ids = torch.zeros(1, tokens, dtype=torch.long)
    found: dict[str, float] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            found[name] = torch.cuda.memory_allocated() - base

        return hook

    for block in model.layers:  # the caches of all layers are there before the first, as in the report
        block.attention.inner.rotary_cache(tokens)
    found["parameters"] = torch.cuda.memory_allocated() - base
    hooks = (("embedding", model.embedding), ("first_layer", model.layers[0]), ("layers", model.layers[-1]))
    for name, module in hooks:
        module.register_forward_hook(note(name))
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        logits = model(ids).logits
    found["logits"] = logits.nbytes
    found["forward"] = torch.cuda.memory_allocated() - base
    found["peak"] = torch.cuda.max_memory_allocated() - base
    return found


def deltas(batch: int, tokens: int, width: int, device: str = "cuda") -> Reading:
    """Report 003: weight deltas by its einsum, d 4096, rank 16, fp32, without gradients."""
    with torch.device(device):
        mod, A, B = torch.randn(batch, tokens, 16), torch.randn(4096, 16), torch.randn(16, width)
    if device == "cpu":
        return {"result": torch.einsum("bsr,dr,rf->bsdf", mod, A, B).nbytes, "modulation": mod.nbytes}
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = torch.einsum("bsr,dr,rf->bsdf", mod, A, B)
    return {
        "result": found.nbytes,
        "modulation": mod.nbytes,
        "peak": torch.cuda.max_memory_allocated() - before,
    }


def parts() -> dict[str, Callable[[], Reading]]:
    """By name. `Step`s are timed as well: see `steps`."""
    report = pythia.PRESETS["report"]
    found: dict[str, Callable[[], Reading]] = {
        name: partial(memory_of, setup) for name, setup in steps().items()
    }
    found["forward stages 131,072"] = partial(forward_stages, 131_072)
    found["breakdown V 10,000, 32 x 128"] = lambda: breakdown(language(report.build, 10_000, 32, 128))
    wide = replace(report, vocab_size=50_000)
    found["breakdown V 50,000, 32 x 128"] = lambda: breakdown(language(wide.build, 50_000, 32, 128))
    found["deltas 4 x 64 x 11008"] = partial(deltas, 4, 64, 11_008)
    found["deltas 1 x 1 x 11008"] = partial(deltas, 1, 1, 11_008)
    found["deltas 4 x 1 x 11008"] = partial(deltas, 4, 1, 11_008)
    found["deltas 4 x 64 x 14336"] = partial(deltas, 4, 64, 14_336)
    return found


def steps() -> dict[str, Callable[[], Step]]:
    standard, chunked, recomputed, model = losses().values()
    width, positions = (64, 1024, 512), "64 x 1,024"
    return {
        **{f"updates {chunk}": partial(updates, chunk) for chunk in (256, 128, 64, 32, 16)},
        **{
            f"loss {name} {tokens:,}": partial(loss, function, tokens)
            for tokens, chosen in (
                (4096, {"standard": standard}),
                (
                    32_768,
                    {"standard": standard, "chunked": chunked, "recomputed": recomputed, "model": model},
                ),
                (131_072, {"chunked": chunked, "recomputed": recomputed, "model": model}),
            )
            for name, function in chosen.items()
        },
        f"attention eager {positions}": partial(layer, lambda: PreNorm(512, EagerAttention(512)), *width),
        f"attention fused {positions}": partial(layer, lambda: PreNorm(512, Attention(512)), *width),
        f"feed-forward eager {positions}": partial(
            layer, lambda: PreNorm(512, EagerFeedForward(512)), *width
        ),
        f"feed-forward tiled {positions}": partial(layer, lambda: PreNorm(512, FeedForward(512)), *width),
        f"cross-attention eager {positions}": cross_attention,
        "encoder 64": encoder,
    }


def values() -> dict[str, Callable[..., Reading]]:
    """What has a value to compute, on any device."""
    return {
        "rope positions 131,072": rope_positions,
        "data resident": resident_batches,
        "chunked updates": chunked_updates_error,
        "chunked loss": chunked_loss_error,
    }


def rope_positions(device: str = "cuda") -> Reading:
    """Report 002's fix: distinct rows of the rotary cache that it rebuilds in bf16."""
    cache = RopeCache(80, 1e4, 1, "rounded_positions").to(device, torch.bfloat16)
    cos, sin = cache(131_072)
    return {"distinct": len(torch.unique(torch.cat((cos, sin), 1).float(), dim=0))}


def resident_batches(device: str = "cuda") -> Reading:
    """Report 001: the tokens of WikiText-2 that its program had on the GPU."""
    model: Any = ResidentBatches(pythia.PRESETS["report"])
    assert model.batches.numel() <= WIKITEXT_2_WORDS
    return {"tokens": model.batches.to(device).numel()}


def chunked_updates_error(device: str = "cuda") -> Reading:
    """Report 000's fix: how far outputs and gradients are from those without chunks, in fp32."""
    results = []
    for chunk in (256, 64):
        torch.manual_seed(0)
        step = updates(chunk, batch=1, device=device)
        out = step.forward()
        step.backward(out)
        results.append([*(each.detach() for each in out), *(leaf.grad for leaf in step.leaves)])
    return {"error": relative_error(*results)}


def chunked_loss_error(device: str = "cuda") -> Reading:
    """Report 002's fix: how far loss and gradients are from the standard loss's, in float64."""
    with torch.device(device):
        return {"error": loss_error(losses(SMALL_CHUNK)["report, chunked"])}
