"""What a benchmark workload is, and the small helpers they share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from oomph.workload import Workload

Optimizer = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Entry:
    """A workload to measure and predict: a Workload, or a function that returns a step."""

    target: Workload | Callable[[], Any]
    about: str
    convolutions: bool = False  # cuDNN's choices cannot be known: judged by a wider bound


def adamw(params: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4)


def from_config(
    config: Any,
    model: Any,
    *,
    attention: str = "sdpa",
    checkpointing: bool = False,
    experts: str | None = None,
) -> Callable[[], torch.nn.Module]:
    """A randomly initialised Hugging Face model, built anew at every call. `config` makes its config."""

    def build() -> torch.nn.Module:
        settings = config()
        settings._attn_implementation = attention
        if experts is not None:
            settings._experts_implementation = experts
        built = model(settings)
        if checkpointing:
            built.gradient_checkpointing_enable()
        if hasattr(built.config, "use_cache"):
            built.config.use_cache = False
        return built

    return build


def library_entry(
    about: str,
    config: Any,
    model: Any,
    batch: Callable[..., Any],
    *,
    attention: str = "sdpa",
    checkpointing: bool = False,
    experts: str | None = None,
    convolutions: bool = False,
    optimizer: Optimizer | None = adamw,
    **options: Any,
) -> Entry:
    """A Hugging Face model's; `options`: those of the Workload."""
    build = from_config(config, model, attention=attention, checkpointing=checkpointing, experts=experts)
    return Entry(Workload(build, batch, optimizer=optimizer, **options), about, convolutions)


def tokens(
    vocabulary: int, batch: int, length: int, *, padded: bool = False
) -> Callable[..., dict[str, Any]]:
    """Token ids with labels; `padded` adds a mask that hides the last quarter of half of the rows."""

    def make(device: torch.device) -> dict[str, Any]:
        ids = torch.randint(0, vocabulary, (batch, length), device=device)
        made = {"input_ids": ids, "labels": ids.clone()}
        if padded:
            mask = torch.ones(batch, length, dtype=torch.long, device=device)
            mask[: batch // 2, length - length // 4 :] = 0
            made["attention_mask"] = mask
        return made

    return make


def images(batch: int, size: int, classes: int = 1000) -> Callable[..., dict[str, Any]]:
    """Images with a class each."""

    def make(device: torch.device) -> dict[str, Any]:
        return {
            "pixel_values": torch.randn(batch, 3, size, size, device=device),
            "labels": torch.randint(0, classes, (batch,), device=device),
        }

    return make


def sgd(params: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-3)


def clipped(optimizer: Optimizer, norm: float = 1.0) -> Optimizer:
    """The same optimizer, clipping the gradients' norm just before each of its steps."""

    def build(params: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        kept = list(params)
        built = optimizer(kept)

        def clip(*_: Any) -> None:
            torch.nn.utils.clip_grad_norm_(kept, norm)

        built.register_step_pre_hook(clip)
        return built

    return build


class KeepsGradients(torch.optim.AdamW):
    """AdamW whose gradients stay allocated between steps."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        super().zero_grad(set_to_none=False)
