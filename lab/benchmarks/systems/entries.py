"""The five systems as the systems benchmark runs them: model and naive, at shapes that one GPU can hold.

A naive form that no GPU holds at the report's shape is measured at a smaller one; at the report's own it is
only predicted (`oomph systems NAME`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

import oomph
from lab.benchmarks.systems.report_checks import CONFIGURATIONS
from oomph_lab.systems import ginr, hatchling, longctx, npt, pythia
from oomph_lab.systems.ginr import naive as naive_ginr
from oomph_lab.systems.hatchling.naive import NaiveHatchling
from oomph_lab.systems.longctx.naive import NaiveLongContext
from oomph_lab.systems.npt import naive as naive_npt
from oomph_lab.systems.pythia.naive import NaivePythia

CHECKPOINTED = ("activation_checkpointing",)


@dataclass(frozen=True)
class Entry:
    system: str
    form: str  # model or naive
    shape: str
    workload: oomph.Workload
    fixes: tuple[str, ...] = ()
    at_most_gib: float | None = None  # the threshold, where there is one

    @property
    def name(self) -> str:
        return " ".join((self.system, self.form, self.shape, *self.fixes))

    @property
    def fixed(self) -> oomph.Workload:
        return oomph.apply(list(self.fixes), self.workload) if self.fixes else self.workload


def on_the_gpu(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Random numbers for billions of parameters take the host minutes."""

    def built() -> nn.Module:
        with torch.device("cuda"):
            return build()

    return built


def text_batch(vocabulary: int, batch: int, tokens: int) -> Callable[[Any], dict[str, torch.Tensor]]:
    def make(device: Any) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, vocabulary, (batch, tokens), device=device)
        return {"input_ids": ids, "labels": ids}

    return make


def language(
    build: Callable[[], nn.Module], vocabulary: int, batch: int, tokens: int, **options: Any
) -> oomph.Workload:
    return oomph.Workload(on_the_gpu(build), text_batch(vocabulary, batch, tokens), **options)


def image(build: Callable[[], nn.Module], batch: int, *, size: int = 32, **options: Any) -> oomph.Workload:
    def images(device: Any) -> dict[str, torch.Tensor]:
        return {"images": torch.rand(batch, 3, size, size, device=device)}

    return oomph.Workload(on_the_gpu(build), images, **options)


def _adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in params if each.requires_grad])


def _hatchling() -> list[Entry]:
    xs = hatchling.PRESETS["hn_xs"]
    naive = partial(NaiveHatchling, xs)

    def entry(
        form: str,
        batch: int,
        tokens: int,
        build: Callable[[], nn.Module] = xs.build,
        fixes: tuple[str, ...] = (),
        preset: str = "hn_xs",
    ) -> Entry:
        vocabulary = hatchling.PRESETS[preset].vocab_size
        workload = language(build, vocabulary, batch, tokens, autocast="bfloat16")
        return Entry(f"hatchling {preset}", form, f"{batch} x {tokens}", workload, fixes)

    return [
        *(entry(f"chunked_updates {size}", 16, 256, partial(naive, size)) for size in (16, 32, 64, 128)),
        entry("naive", 8, 256, naive),
        *(entry(mode, 16, 256, replace(xs, kda_mode=mode).build) for mode in ("sequential", "chunked")),
        *(entry("model", batch, tokens) for batch, tokens in ((10, 512), (6, 768), (5, 1024), (16, 256))),
        entry("model", 16, 256, fixes=CHECKPOINTED),
        entry("naive", 16, 256, naive),
        entry("naive", 16, 256, naive, CHECKPOINTED),
        entry("model", 1, 4096, hatchling.PRESETS["hn_s"].build, preset="hn_s"),
    ]


def _pythia() -> list[Entry]:
    report, published = pythia.PRESETS["report"], pythia.PRESETS["pythia"]
    wide = replace(report, vocab_size=50_304)
    long = replace(wide, seq_len=512)

    def entry(
        form: str,
        batch: int,
        tokens: int,
        config: Any,
        suffix: str = "",
        build: Callable[[], nn.Module] | None = None,
        preset: str = "report",
        **options: Any,
    ) -> Entry:
        workload = language(build or config.build, config.vocab_size, batch, tokens, **options)
        return Entry(f"pythia {preset}", form, f"{batch} x {tokens}{suffix}", workload)

    return [
        *(
            entry(pattern or "dense", 1, 16_384, replace(report, seq_len=16_384, sparse=pattern))
            for pattern in (None, "local", "global", "mixed")
        ),
        entry("model", 32, 128, wide, ", V 50,304"),
        entry("model", 32, 128, report, ", V 10,000"),
        entry("model", 8, 512, long),
        entry("model", 8, 512, replace(long, sparse="local"), " local"),
        entry("model", 4, 2048, published, preset="published", dtype="bfloat16"),
        entry("naive", 8, 512, long, build=partial(NaivePythia, long)),
        entry("naive", 32, 128, report, ", V 10,000", partial(NaivePythia, report)),
    ]


def _longctx() -> list[Entry]:
    dense, sparse = longctx.PRESETS["4B"], longctx.LongContextConfig.of("4B", "nsa")
    tokens = 32_768

    def entry(attention: str, form: str, build: Callable[[], nn.Module]) -> Entry:
        workload = language(build, dense.vocab_size, 1, tokens, dtype="bfloat16")
        return Entry(f"longctx 4B {attention}", form, f"1 x {tokens}", workload, CHECKPOINTED)

    return [
        entry("dense", "model", dense.build),
        entry("nsa", "model", sparse.build),
        entry("dense", "naive", partial(NaiveLongContext, dense, tokens)),
    ]


NPT_TOKENS = (4, 8)  # a loop over tokens adds the same for each: two lengths give the slope


def _npt() -> list[Entry]:
    config, small = npt.PRESETS["default"], npt.PRESETS["small"]
    eight = replace(config, optimization=replace(config.optimization, use_8bit=True))

    def entry(
        name: str,
        form: str,
        batch: int,
        tokens: int,
        build: Callable[[], nn.Module],
        vocabulary: int = 128_256,
        at_most_gib: float | None = None,
    ) -> Entry:
        workload = language(build, vocabulary, batch, tokens, optimizer=_adamw)
        return Entry(f"npt {name}", form, f"{batch} x {tokens}", workload, at_most_gib=at_most_gib)

    per_token = partial(naive_npt.build, small, "per_token")
    return [
        *(
            entry(row.name, row.component, 1, tokens, partial(naive_npt.build, row.config, row.component))
            for row in CONFIGURATIONS
            if row.component not in (None, "whole") and row.model != "GPT-2"
            for tokens in NPT_TOKENS
        ),
        entry("GPT-2 per token", "naive", 1, 32, per_token, 50_257),
        entry("Llama-3.1-8B", "model", 4, 512, config.build, at_most_gib=17.5),
        entry("Llama-3.1-8B 8-bit", "model", 4, 512, eight.build, at_most_gib=10.0),
        entry("GPT-2", "model", 4, 512, small.build, 50_257),
        entry("GPT-2 whole", "naive", 1, 64, partial(naive_npt.build, small), 50_257),
        entry("GPT-2 per token", "naive", 1, 64, per_token, 50_257),
    ]


def _ginr() -> list[Entry]:
    config = ginr.PRESETS["default"]

    def solution(name: str, preset: str, batch: int = 64, *fixes: str) -> Entry:
        changed = ginr.PRESETS[preset]
        workload = image(partial(naive_ginr.build, changed), batch, size=changed.image_size)
        return Entry(f"ginr {name}", "naive", f"{batch}, fp32", workload, fixes)

    fp32, autocast = image(config.build, 64), image(config.build, 64, autocast="bfloat16")
    return [
        solution("solution 1", "solution_1_feedforward"),
        solution("solution 2", "solution_2_cross"),
        solution("solution 3", "default", 16),
        solution("solution 4", "default", 64, *CHECKPOINTED),
        solution("solution 5", "solution_5_resolution"),
        solution("queries", "scent_queries"),
        solution("residual", "residual"),
        Entry("ginr self", "model", "64, fp32", fp32),
        Entry("ginr self", "model", "64, autocast", autocast),
        Entry("ginr self", "model", "64, autocast", autocast, CHECKPOINTED, 6.0),
        Entry("ginr self", "model", "64, fp32", fp32, CHECKPOINTED, 6.0),
        solution("self", "default"),
    ]


def entries() -> Mapping[str, Entry]:
    found = [*_hatchling(), *_pythia(), *_longctx(), *_npt(), *_ginr()]
    return {entry.name: entry for entry in found}
