"""Batches in parts, where the batch does not tell what its parts count in the loss."""

from dataclasses import replace

import pytest
import torch
from small import tiny_batch, workload
from torch import nn

import oomph
from oomph import fixes
from oomph.fixes.registry import FixContext


def by_length(model, batch):
    """A mean over tokens that lengths count, which is not the mean of the rows'."""
    tokens, lengths = batch
    own = model(tokens).square().mean(-1)
    counted = torch.arange(own.shape[1], device=own.device) < lengths[:, None]
    return own[counted].sum() / counted.sum()


def with_lengths(device):
    tokens = tiny_batch(device)["tokens"]
    return tokens, torch.tensor([2, 3, 20, 24], device=device)


def test_where_the_batch_does_not_tell_what_its_parts_count_the_fix_holds_on_a_condition():
    work = replace(workload(layers=1), batch=with_lengths, loss=by_length)
    assert not fixes.verify("micro_batches", work).holds
    offers = fixes.find("micro_batches").proposals(FixContext(oomph.predict(work), work))
    assert offers
    assert all("all rows count the same in the loss" in offer.condition for offer in offers)


ROWS = torch.ones(4, 3)
WHOLE = torch.ones(4, 3, dtype=torch.long)


@pytest.mark.parametrize(
    ("batch", "condition"),
    [
        (WHOLE, ""),
        ({"tokens": WHOLE, "targets": WHOLE}, ""),
        ({"input_ids": WHOLE, "attention_mask": WHOLE, "labels": WHOLE}, ""),
        ({"x": ROWS, "target": ROWS}, ""),
        ((ROWS, torch.ones(4, dtype=torch.long)), ""),
        ({"a": WHOLE, "b": WHOLE, "num_items_in_batch": torch.tensor(3)}, ""),
        ({"tokens": WHOLE, "scale": torch.tensor(2.0)}, ""),
        ((WHOLE, torch.ones(4, dtype=torch.long)), "no tensor of the batch is named labels or targets"),
        ((WHOLE, WHOLE > 0), "no tensor of the batch is named labels or targets"),
        ((WHOLE, ROWS), "no tensor of the batch is named labels or targets"),
        ((ROWS, ROWS, WHOLE), "no tensor of the batch is named labels or targets"),
        ({"tokens": WHOLE, "targets": WHOLE, "loss_mask": ROWS}, "whatever 'loss_mask' of the batch says"),
    ],
)
def test_batches_that_tell_what_their_parts_count_and_others(batch, condition):
    work = oomph.Workload(lambda: nn.Linear(3, 1), lambda device: batch, lambda m, x: m(ROWS).mean())
    offers = fixes.find("micro_batches").proposals(FixContext(None, work))
    assert [offer.options["parts"] for offer in offers] == [2, 4]
    for offer in offers:
        assert condition in offer.condition
        assert bool(offer.condition) == bool(condition)
