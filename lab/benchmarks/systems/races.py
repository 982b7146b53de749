"""Whole training steps of a system against another form of it: same shape, same optimizer, in turns.

Both models are in memory; a peak is what a step adds to that, plus the model's own share.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from lab.benchmarks.systems.entries import text_batch
from oomph_lab.systems import hatchling, longctx, pythia


@dataclass(frozen=True)
class Race:
    name: str
    shape: str
    ours: Callable[[], nn.Module]
    theirs: Callable[[], nn.Module]
    batch: Callable[[Any], dict[str, torch.Tensor]]
    dtype: torch.dtype | None = torch.bfloat16
    autocast: torch.dtype | None = None
    optimizer: bool = True
    rounds: int = 10
    time_threshold: float = 1.0  # ours over theirs, at most
    memory_threshold: float = 1.0


class Runner:
    """One side of a race: its model on the GPU, and how a step of it goes."""

    def __init__(self, build: Callable[[], nn.Module], race: Race) -> None:
        before = torch.cuda.memory_allocated()
        with torch.device("cuda"):
            self.model = build().to(race.dtype)
        self.model.train()
        self.race = race
        self.optimizer = torch.optim.AdamW(self.model.parameters()) if race.optimizer else None
        self.batch = race.batch("cuda")
        self.step()
        self.step()  # what the optimizer holds is there after the first
        self.own = torch.cuda.memory_allocated() - before

    def step(self) -> tuple[float, int]:
        """Milliseconds, and bytes of the peak above what was there before the step."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        kind = self.race.autocast
        with torch.autocast("cuda", kind or torch.bfloat16, enabled=kind is not None):
            loss = self.model(**self.batch).loss
        loss.backward()
        if self.optimizer is not None:
            self.optimizer.step()
        self.model.zero_grad()
        ended.record()
        torch.cuda.synchronize()
        return began.elapsed_time(ended), torch.cuda.max_memory_allocated() - before


def run(race: Race) -> list[tuple[float, float]]:
    """(MiB, milliseconds) of ours and of theirs."""
    gc.collect()
    torch.cuda.empty_cache()
    sides = [Runner(build, race) for build in (race.ours, race.theirs)]
    times: list[list[float]] = [[], []]
    peaks = [0, 0]
    for _ in range(race.rounds):
        for number, side in enumerate(sides):
            took, above = side.step()
            times[number].append(took)
            peaks[number] = max(peaks[number], side.own + above)
    return [(peak / 2**20, statistics.median(each)) for peak, each in zip(peaks, times, strict=True)]


class _Block(nn.Module):
    """One hatchling layer between an input and a mean, which is the smallest loss there is."""

    def __init__(self, mode: str, chunk: int | None = None) -> None:
        super().__init__()
        config = replace(hatchling.PRESETS["hn_xs"], kda_mode=mode)
        self.block = hatchling.KDABlock(config, memory_chunk_size=chunk)

    def forward(self, x: torch.Tensor) -> Any:
        return SimpleNamespace(loss=self.block(x).float().square().mean())


def _activations(device: Any) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(16, 256, 512, device=device, dtype=torch.bfloat16, requires_grad=True)}


def checkpointed(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def built() -> nn.Module:
        from oomph import fixes

        model = build()
        if hasattr(model, "gradient_checkpointing_enable"):
            model.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            fixes.apply_to_model(["activation_checkpointing"], model)
        return model

    return built


def _gpt_neox(tokens: int) -> nn.Module:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        vocab_size=50_304,
        hidden_size=512,
        num_hidden_layers=6,
        num_attention_heads=8,
        intermediate_size=2048,
        rotary_pct=0.25,
        max_position_embeddings=max(2048, tokens),
        use_cache=False,
        attn_implementation="sdpa",
    )
    return GPTNeoXForCausalLM(config)


def qwen3(size: longctx.LongContextConfig, tokens: int) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=size.vocab_size,
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=max(40_960, tokens),
        rope_theta=size.rope_theta,
        tie_word_embeddings=size.tie_word_embeddings,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return Qwen3ForCausalLM(config)


def _pythia(batch: int, tokens: int, **options: Any) -> Race:
    config = pythia.PRESETS["pythia"]
    name = "pythia against GPTNeoX" + (", autocast" if "autocast" in options else "")
    return Race(
        name,
        f"{batch} x {tokens}",
        replace(config, seq_len=tokens).build,
        lambda: _gpt_neox(tokens),
        text_batch(50_304, batch, tokens),
        **options,
    )


def _longctx(size: str, batch: int, tokens: int, *, recompute: bool = False, **options: Any) -> Race:
    config = longctx.PRESETS[size]
    around = checkpointed if recompute else (lambda build: build)
    return Race(
        f"longctx {size} against Qwen3" + (", recomputed" if recompute else ""),
        f"{batch} x {tokens}",
        around(config.build),
        around(lambda: qwen3(config, tokens)),
        text_batch(config.vocab_size, batch, tokens),
        **options,
    )


def races() -> dict[str, Race]:
    wide = {"dtype": None, "autocast": torch.bfloat16}
    found = [
        Race(
            "hatchling block against the dense scan",
            "16 x 256",
            lambda: _Block("auto"),
            lambda: _Block("scan", 256),
            _activations,
            optimizer=False,
            memory_threshold=1 / 20,
        ),
        _pythia(8, 512),
        _pythia(32, 128),
        _pythia(4, 2048),
        _pythia(32, 128, **wide),
        _pythia(16, 1024, **wide),
        _longctx("0.6B", 4, 2048),
        _longctx("0.6B", 1, 8192),
        _longctx("0.6B", 1, 32_768, recompute=True, rounds=4),
        _longctx("qwen3-4B", 1, 2048),
        _longctx("qwen3-4B", 1, 8192, recompute=True, rounds=5),
    ]
    return {f"{race.name} {race.shape}": race for race in found}
