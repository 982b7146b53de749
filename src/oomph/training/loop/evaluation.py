"""How good the model is on data that it does not train on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from oomph.training.checkpoints import rng_state, set_rng_state
from oomph.training.data.packing import IGNORED
from oomph.training.loop.batches import counted_tokens, moved
from oomph.training.loop.precision import Precision


@contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """Without gradients or dropout. Random numbers drawn inside are not missing from the training."""
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
    """Means over at most so many batches, each counted by what its loss is a mean of: tokens or images.

    loss, and its perplexity where it is a cross-entropy; psnr for images, in dB, of the mean error; for an
    NPT matching, the error of its converted layers, which is what it trains, and its student's language_loss.
    """
    sums: dict[str, Tensor] = {}
    total = 0
    with in_evaluation(model):
        for batch in islice(batches, most):
            count = _in_the_mean(batch)
            if not count:  # one token, with none before it: the mean of nothing
                continue
            with precision.autocast():
                found = _figures(model, moved(batch, device))
            for name, value in found.items():
                sums[name] = sums.get(name, 0.0) + value.double() * count
            total += count
    if not total:
        return {}
    means = {name: float(value) / total for name, value in sums.items()}
    if "mse" in means:
        return {"loss": means["mse"], "psnr": -10 * math.log10(max(means["mse"], 1e-12))}
    means["perplexity"] = math.exp(min(means.get("loss", means.get("language_loss", 0.0)), 700.0))
    return means


def _in_the_mean(batch: dict[str, Tensor]) -> int:
    """Images; or tokens that are predicted: not a row's first, not padding."""
    labels = batch.get("labels")
    return counted_tokens(batch) if labels is None else int((labels[:, 1:] != IGNORED).sum())


def _figures(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    output = model(**batch)
    if hasattr(output, "psnr"):
        return {"mse": output.loss}
    match: Any = getattr(model, "match", None)
    if match is None:
        return {"loss": output.loss}
    found = {"language_loss": output.loss, "matching": match(batch["input_ids"]).loss}
    return found
