"""Metrics on held-out data, and samples of what the model generates."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from oomph_lab.training.checkpoint_state import rng_state, set_rng_state
from oomph_lab.training.data.text import IGNORED_LABEL
from oomph_lab.training.libraries import need
from oomph_lab.training.step import Precision, count_tokens, to_device

PROMPT_TOKENS, NEW_TOKENS, TEMPERATURE = 32, 64, 0.8
SAMPLED_IMAGES, ENLARGEMENT = 8, 3


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Without gradients or dropout, and without advancing the random number generators of the training."""
    was_training, state = model.training, rng_state()
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
        set_rng_state(state)


def evaluate(
    model: nn.Module, batches: Iterable[Any], most: int, device: torch.device, precision: Precision
) -> dict[str, float]:
    """Means over at most `most` batches, weighted by the tokens or images of each batch's loss.

    Returns loss, and perplexity for a cross-entropy; psnr in dB, of the mean squared error, for images; for
    NPT also `matching`, the error of its converted layers, with the student's loss as language_loss, and the
    perplexity of the original model as base_perplexity.
    """
    sums: dict[str, Tensor] = {}
    total = 0
    with evaluation_mode(model):
        for batch in islice(batches, most):
            count = _loss_terms(batch)
            if not count:  # a single token: the mean of nothing
                continue
            with precision.autocast():
                found = _metrics(model, to_device(batch, device))
            for name, value in found.items():
                sums[name] = sums.get(name, 0.0) + value.double() * count
            total += count
    if not total:
        return {}
    means = {name: float(value) / total for name, value in sums.items()}
    if "mse" in means:
        return {"loss": means["mse"], "psnr": -10 * math.log10(max(means["mse"], 1e-12))}
    means["perplexity"] = math.exp(min(means.get("loss", means.get("language_loss", 0.0)), 700.0))
    if "base_loss" in means:
        means["base_perplexity"] = math.exp(min(means.pop("base_loss"), 700.0))
    return means


def _loss_terms(batch: dict[str, Tensor]) -> int:
    """Images; or tokens that are predicted: not the first of a row, not padding."""
    labels = batch.get("labels")
    return count_tokens(batch) if labels is None else int((labels[:, 1:] != IGNORED_LABEL).sum())


def _metrics(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    output = model(**batch)
    if hasattr(output, "psnr"):
        return {"mse": output.loss}
    match: Any = getattr(model, "match", None)
    if match is None:
        return {"loss": output.loss}
    base: Any = getattr(model, "teacher_loss")  # noqa: B009
    return {
        "language_loss": output.loss,
        "matching": match(batch["input_ids"]).loss,
        "base_loss": base(batch["input_ids"], batch["labels"]),
    }


def sample_text(
    model: nn.Module, tokenizer: Any, batch: dict[str, Tensor], device: torch.device, precision: Precision
) -> str:
    """The first tokens of a held-out text, `|`, and the model's continuation."""
    prompt = batch["input_ids"][:1, :PROMPT_TOKENS].to(device)
    generator = torch.Generator().manual_seed(0)
    ids = prompt
    with evaluation_mode(model):
        for _ in range(NEW_TOKENS):
            # Not more than the model was trained with: learned positions end there.
            with precision.autocast():
                logits = model(ids[:, -batch["input_ids"].shape[1] :]).logits[0, -1]
            known = logits.float().cpu()[: tokenizer.vocab_size]
            if not torch.isfinite(known).all():
                return f"{tokenizer.decode(prompt[0].tolist())} | (nothing: the logits are not finite)"
            chosen = torch.multinomial(torch.softmax(known / TEMPERATURE, 0), 1, generator=generator)
            ids = torch.cat([ids, chosen[None].to(device)], dim=1)
    return f"{tokenizer.decode(prompt[0].tolist())} | {tokenizer.decode(ids[0, prompt.shape[1] :].tolist())}"


def sample_images(
    model: nn.Module, batch: dict[str, Tensor], file: Path, device: torch.device, precision: Precision
) -> None:
    """Write an image: held-out images above, the model's reconstructions below."""
    images = batch["images"][:SAMPLED_IMAGES].to(device)
    with evaluation_mode(model), precision.autocast():
        pixels = model(images).pixels
    made = pixels.float().transpose(1, 2).reshape(images.shape)
    rows = [torch.cat(list(each), dim=-1) for each in (images.float(), made)]
    grid = torch.cat(rows, dim=-2).clamp(0, 1).mul(255).round().byte().cpu()
    large = grid.repeat_interleave(ENLARGEMENT, 1).repeat_interleave(ENLARGEMENT, 2).permute(1, 2, 0)
    file.parent.mkdir(parents=True, exist_ok=True)
    need("PIL.Image", "samples").fromarray(large.contiguous().numpy()).save(file)
