"""What the model makes of a prompt or of images: to look at while it trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from oomph.training.loop.evaluation import in_evaluation
from oomph.training.loop.precision import Precision

_PROMPT, _NEW, _TEMPERATURE = 32, 64, 0.8
_IMAGES, _ENLARGED = 8, 3


def sample_text(
    model: nn.Module, tokenizer: Any, batch: dict[str, Tensor], device: torch.device, precision: Precision
) -> str:
    """The first tokens of a held-out text, then `|`, then what the model goes on with."""
    prompt = batch["input_ids"][:1, :_PROMPT].to(device)
    draw = torch.Generator().manual_seed(0)
    ids = prompt
    with in_evaluation(model):
        for _ in range(_NEW):
            # The end alone: a model with learned positions has no more of them than it was trained with.
            with precision.autocast():
                logits = model(ids[:, -batch["input_ids"].shape[1] :]).logits[0, -1]
            known = logits.float().cpu()[: tokenizer.vocab_size]
            if not torch.isfinite(known).all():
                return f"{tokenizer.decode(prompt[0].tolist())} | (nothing: its numbers are not finite)"
            chosen = torch.multinomial(torch.softmax(known / _TEMPERATURE, 0), 1, generator=draw)
            ids = torch.cat([ids, chosen[None].to(device)], dim=1)
    return f"{tokenizer.decode(prompt[0].tolist())} | {tokenizer.decode(ids[0, prompt.shape[1] :].tolist())}"


def sample_images(
    model: nn.Module, batch: dict[str, Tensor], file: Path, device: torch.device, precision: Precision
) -> None:
    """A picture: held-out images above, the model's reconstructions below."""
    from oomph.training.data.needs import need

    images = batch["images"][:_IMAGES].to(device)
    with in_evaluation(model), precision.autocast():
        pixels = model(images).pixels
    made = pixels.float().transpose(1, 2).reshape(images.shape)
    rows = [torch.cat(list(each), dim=-1) for each in (images.float(), made)]
    grid = torch.cat(rows, dim=-2).clamp(0, 1).mul(255).round().byte().cpu()
    large = grid.repeat_interleave(_ENLARGED, 1).repeat_interleave(_ENLARGED, 2).permute(1, 2, 0)
    file.parent.mkdir(parents=True, exist_ok=True)
    need("PIL.Image", "pictures").fromarray(large.contiguous().numpy()).save(file)
