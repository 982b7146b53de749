"""What the tests of every language model ask of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def tokens(vocabulary: int, batch: int, length: int) -> Tensor:
    return torch.randint(0, vocabulary, (batch, length), generator=torch.Generator().manual_seed(7))


def text_batch(vocabulary: int, batch: int, length: int) -> Callable[[torch.device], dict[str, Tensor]]:
    def make(device: torch.device) -> dict[str, Tensor]:
        ids = torch.randint(0, vocabulary, (batch, length), device=device)
        return {"input_ids": ids, "labels": ids}

    return make


def assert_causal(model: nn.Module, vocabulary: int, length: int) -> None:
    """Changing token t changes outputs from t on, and none before."""
    model.double().eval()
    ids = tokens(vocabulary, 2, length)
    with torch.no_grad():
        before = model(ids).logits
        for t in (1, length // 2, length - 1):
            changed = ids.clone()
            changed[:, t] = (changed[:, t] + 1) % vocabulary
            after = model(changed).logits
            torch.testing.assert_close(after[:, :t], before[:, :t], rtol=0, atol=1e-12)
            assert (after[:, t] - before[:, t]).abs().max() > 1e-6


def assert_loss_is_that_of_the_logits(model: nn.Module, vocabulary: int, length: int) -> None:
    """Position t against label t + 1, labels of -100 left out."""
    model.double().eval()
    ids = tokens(vocabulary, 2, length)
    labels = ids.clone()
    labels[0, : length // 2] = -100
    logits = model(ids).logits
    out = model(ids, labels=labels)
    assert out.logits is None
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    auxiliary = 0.0 if out.auxiliary_loss is None else model.config.predictive_weight * out.auxiliary_loss
    torch.testing.assert_close(out.loss, expected + auxiliary)


def overfit(
    model: nn.Module, vocabulary: int, length: int, steps: int, lr: float = 3e-3
) -> tuple[float, float]:
    """The loss of the first and of the last step on one batch."""
    model.train()
    ids = tokens(vocabulary, 2, length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    losses = []
    for _ in range(steps):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses[0], losses[-1]


def assert_same_function(naive: nn.Module, model: nn.Module, ids: Tensor, atol: float = 1e-9) -> None:
    """Logits, loss and gradients, with the model's parameters in both."""
    naive.load_state_dict(model.state_dict())
    naive.double().eval()
    model.double().eval()
    torch.testing.assert_close(naive(ids).logits, model(ids).logits, rtol=0, atol=atol)
    labels = ids.clone()
    labels[:, 3] = -100
    results: list[Any] = [model(ids, labels=labels).loss for model in (naive, model)]
    torch.testing.assert_close(*results, rtol=0, atol=atol)
    for loss in results:
        loss.backward()
    expected = dict(model.named_parameters())
    for name, parameter in naive.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=0, atol=atol, msg=name)
