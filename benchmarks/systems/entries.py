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
from benchmarks.systems.report_checks import CONFIGURATIONS
from oomph.systems import ginr, hatchling, longctx, npt, pythia
from oomph.systems.ginr import naive as naive_ginr
from oomph.systems.hatchling.naive import NaiveHatchling
from oomph.systems.longctx.naive import NaiveLongContext
from oomph.systems.npt import naive as naive_npt
from oomph.systems.pythia.naive import NaivePythia


@dataclass(frozen=True)
class Entry:
    system: str
    form: str  # model or naive
    shape: str
    workload: oomph.Workload
    fixes: tuple[str, ...] = ()
    at_most_gib: float | None = None  # the bar, where there is one

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
    def pictures(device: Any) -> dict[str, torch.Tensor]:
        return {"images": torch.rand(batch, 3, size, size, device=device)}

    return oomph.Workload(on_the_gpu(build), pictures, **options)


def _adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in params if each.requires_grad])


def _hatchling() -> list[Entry]:
    config = hatchling.PRESETS["hn_xs"]
    options: dict[str, Any] = {"autocast": "bfloat16"}
    model = language(config.build, config.vocab_size, 16, 256, **options)
    naive = language(lambda: NaiveHatchling(config), config.vocab_size, 16, 256, **options)
    small = hatchling.PRESETS["hn_s"]

    def other(form: str, batch: int, tokens: int, build: Callable[[], nn.Module]) -> Entry:
        shape = f"{batch} x {tokens}"
        return Entry(
            "hatchling hn_xs", form, shape, language(build, config.vocab_size, batch, tokens, **options)
        )

    def in_mode(mode: str) -> Callable[[], nn.Module]:
        return replace(config, kda_mode=mode).build

    return [
        *(
            other(f"chunked_updates {size}", 16, 256, partial(NaiveHatchling, config, size))
            for size in (16, 32, 64, 128)
        ),
        other("naive", 8, 256, partial(NaiveHatchling, config)),
        other("sequential", 16, 256, in_mode("sequential")),
        other("chunked", 16, 256, in_mode("chunked")),
        *(other("model", batch, tokens, config.build) for batch, tokens in ((10, 512), (6, 768), (5, 1024))),
        Entry("hatchling hn_xs", "model", "16 x 256", model),
        Entry("hatchling hn_xs", "model", "16 x 256", model, ("activation_checkpointing",)),
        Entry("hatchling hn_xs", "naive", "16 x 256", naive),
        Entry("hatchling hn_xs", "naive", "16 x 256", naive, ("activation_checkpointing",)),
        Entry(
            "hatchling hn_s",
            "model",
            "1 x 4096",
            language(small.build, small.vocab_size, 1, 4096, **options),
        ),
    ]


def _pythia() -> list[Entry]:
    report, published = pythia.PRESETS["report"], pythia.PRESETS["pythia"]
    long = replace(report, vocab_size=50_304, seq_len=512)
    sparse = replace(long, sparse="local")
    tokens = 16_384

    def at_16k(pattern: str | None) -> Entry:
        build = replace(report, seq_len=tokens, sparse=pattern).build
        return Entry("pythia report", pattern or "dense", f"1 x {tokens}", language(build, 10_000, 1, tokens))

    return [
        *map(at_16k, (None, "local", "global", "mixed")),
        Entry(
            "pythia report",
            "model",
            "32 x 128, V 50,304",
            language(replace(report, vocab_size=50_304).build, 50_304, 32, 128),
        ),
        Entry("pythia report", "model", "32 x 128, V 10,000", language(report.build, 10_000, 32, 128)),
        Entry("pythia report", "model", "8 x 512", language(long.build, 50_304, 8, 512)),
        Entry("pythia report", "model", "8 x 512 local", language(sparse.build, 50_304, 8, 512)),
        Entry(
            "pythia published",
            "model",
            "4 x 2048",
            language(published.build, 50_304, 4, 2048, dtype="bfloat16"),
        ),
        Entry("pythia report", "naive", "8 x 512", language(lambda: NaivePythia(long), 50_304, 8, 512)),
        Entry(
            "pythia report",
            "naive",
            "32 x 128, V 10,000",
            language(lambda: NaivePythia(report), 10_000, 32, 128),
        ),
    ]


def _longctx() -> list[Entry]:
    dense, sparse = longctx.PRESETS["4B"], longctx.LongContextConfig.of("4B", "nsa")
    fixes = ("activation_checkpointing",)

    def at(tokens: int, build: Callable[[], nn.Module]) -> oomph.Workload:
        return language(build, dense.vocab_size, 1, tokens, dtype="bfloat16")

    return [
        Entry("longctx 4B dense", "model", "1 x 32768", at(32_768, dense.build), fixes),
        Entry("longctx 4B nsa", "model", "1 x 32768", at(32_768, sparse.build), fixes),
        Entry(
            "longctx 4B dense",
            "naive",
            "1 x 32768",
            at(32_768, lambda: NaiveLongContext(dense, 32_768)),
            ("activation_checkpointing",),
        ),
    ]


NPT_TOKENS = (4, 8)  # a loop over tokens adds the same for each: two lengths give the slope


def _npt() -> list[Entry]:
    config = npt.PRESETS["default"]
    eight = replace(config, optimization=replace(config.optimization, use_8bit=True))
    small = npt.PRESETS["small"]

    def at(build: Callable[[], nn.Module], vocabulary: int, batch: int, tokens: int) -> oomph.Workload:
        return language(build, vocabulary, batch, tokens, optimizer=_adamw)

    rows = [row for row in CONFIGURATIONS if row.component not in (None, "whole") and row.model != "GPT-2"]
    return [
        *(
            Entry(
                f"npt {row.name}",
                str(row.component),
                f"1 x {tokens}",
                at(partial(naive_npt.build, row.config, str(row.component)), 128_256, 1, tokens),
            )
            for row in rows
            for tokens in NPT_TOKENS
        ),
        Entry(
            "npt GPT-2 per token",
            "naive",
            "1 x 32",
            at(lambda: naive_npt.build(small, "per_token"), 50_257, 1, 32),
        ),
        Entry("npt Llama-3.1-8B", "model", "4 x 512", at(config.build, 128_256, 4, 512), (), 17.5),
        Entry("npt Llama-3.1-8B 8-bit", "model", "4 x 512", at(eight.build, 128_256, 4, 512), (), 10.0),
        Entry("npt GPT-2", "model", "4 x 512", at(small.build, 50_257, 4, 512)),
        Entry("npt GPT-2 whole", "naive", "1 x 64", at(lambda: naive_npt.build(small), 50_257, 1, 64)),
        Entry(
            "npt GPT-2 per token",
            "naive",
            "1 x 64",
            at(lambda: naive_npt.build(small, "per_token"), 50_257, 1, 64),
        ),
    ]


def _ginr() -> list[Entry]:
    config = ginr.PRESETS["default"]
    bf16: dict[str, Any] = {"autocast": "bfloat16"}

    def solution(name: str, preset: str, batch: int = 64, *fixes: str) -> Entry:
        changed = ginr.PRESETS[preset]
        workload = image(lambda: naive_ginr.build(changed), batch, size=changed.image_size)
        return Entry(f"ginr {name}", "naive", f"{batch}, fp32", workload, fixes)

    return [
        solution("solution 1", "solution_1_feedforward"),
        solution("solution 2", "solution_2_cross"),
        solution("solution 3", "default", 16),
        solution("solution 4", "default", 64, "activation_checkpointing"),
        solution("solution 5", "solution_5_resolution"),
        solution("queries", "scent_queries"),
        solution("residual", "residual"),
        Entry("ginr self", "model", "64, fp32", image(config.build, 64)),
        Entry("ginr self", "model", "64, autocast", image(config.build, 64, **bf16)),
        Entry(
            "ginr self",
            "model",
            "64, autocast",
            image(config.build, 64, **bf16),
            ("activation_checkpointing",),
            6.0,
        ),
        Entry("ginr self", "model", "64, fp32", image(config.build, 64), ("activation_checkpointing",), 6.0),
        Entry("ginr self", "naive", "64, fp32", image(lambda: naive_ginr.build(config), 64)),
    ]


def entries() -> Mapping[str, Entry]:
    found = [*_hatchling(), *_pythia(), *_longctx(), *_npt(), *_ginr()]
    return {entry.name: entry for entry in found}
