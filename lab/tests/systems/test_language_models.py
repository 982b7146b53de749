"""Hatchling, Pythia and the long-context decoder: causality, loss, training, and their naive forms."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from text_batches import tokens

from oomph_lab.systems import hatchling, longctx, pythia
from oomph_lab.systems.hatchling.naive import NaiveHatchling
from oomph_lab.systems.longctx.naive import NaiveLongContext
from oomph_lab.systems.pythia.naive import NaivePythia

HATCHLING = replace(hatchling.PRESETS["tiny"], token_drop=0.0)
_SIZES = {"vocab_size": 50, "seq_len": 72, "hidden_size": 32, "num_heads": 4, "intermediate_size": 64}
PYTHIA = replace(pythia.PRESETS["report"], **_SIZES, num_layers=2, dropout=0.0)
LONGCTX = longctx.PRESETS["tiny"]
CONFIGS = {
    "hatchling spiking": HATCHLING,
    "hatchling kimi": replace(HATCHLING, gate="kimi"),
    "pythia report": PYTHIA,
    "pythia published": replace(pythia.PRESETS["pythia"], **_SIZES, num_layers=2),
    "pythia sparse": replace(PYTHIA, sparse="mixed", block_size=4),
    "longctx dense": LONGCTX,
    "longctx nsa": replace(LONGCTX, attention="nsa"),
    "longctx qwen": replace(LONGCTX, qk_norm=True, tie_word_embeddings=True),
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@every_config
def test_changing_a_token_changes_no_earlier_output(config):
    length = 70  # more than NSA's top blocks
    model = config.build().double().eval()
    ids = tokens(config.vocab_size, 2, length)
    with torch.no_grad():
        before = model(ids).logits
        for t in (1, length // 2, length - 1):
            changed = ids.clone()
            changed[:, t] = (changed[:, t] + 1) % config.vocab_size
            after = model(changed).logits
            torch.testing.assert_close(after[:, :t], before[:, :t], rtol=0, atol=1e-12)
            assert (after[:, t] - before[:, t]).abs().max() > 1e-6


@every_config
def test_the_loss_is_that_of_the_shifted_logits_without_ignored_labels(config):
    model = config.build().double().eval()
    ids = tokens(config.vocab_size, 2, 20)
    labels = ids.clone()
    labels[0, :10] = -100
    logits = model(ids).logits
    out = model(ids, labels=labels)
    assert out.logits is None
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(out.loss, expected)


@pytest.mark.parametrize("name", ["hatchling kimi", "pythia published", "longctx nsa"])
def test_a_small_batch_can_be_overfitted(name):
    config = CONFIGS[name]
    # Hatchling learns slower: two layers, and no auxiliary loss.
    slower = {"n_layers": 2, "attention_every": 2, "predictive_weight": 0.0}
    model = (replace(config, **slower) if config.__class__ is hatchling.HatchlingConfig else config).build()
    ids = tokens(config.vocab_size, 2, 14)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    while len(losses) < 50 and min(losses, default=9) >= 0.5:
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] > 3.5
    assert losses[-1] < 0.5


NAIVE = {
    **{name: (config, NaiveHatchling) for name, config in CONFIGS.items() if name == "hatchling spiking"},
    "hatchling chunked": (HATCHLING, lambda config: NaiveHatchling(config, 8)),
    **{name: (config, NaivePythia) for name, config in CONFIGS.items() if "pythia" in name},
    **{
        name: (config, lambda config: NaiveLongContext(config, 80))
        for name, config in CONFIGS.items()
        if "longctx" in name
    },
    "longctx rebuilt cache": (LONGCTX, lambda config: NaiveLongContext(config, 8)),
}


@pytest.mark.parametrize("name", NAIVE)
def test_the_naive_form_has_the_same_logits_loss_and_gradients(name):
    config, build_naive = NAIVE[name]
    tolerance = {"rtol": 0, "atol": 1e-5 if "longctx" in name else 1e-9}  # its caches are rounded to fp32
    naive, model = build_naive(config), config.build()
    naive.load_state_dict(model.state_dict())
    naive.double().eval()
    model.double().eval()
    ids = tokens(config.vocab_size, 1, 70)
    labels = ids.clone()
    labels[:, 3] = -100
    torch.testing.assert_close(naive(ids).logits, model(ids).logits, **tolerance)
    losses = [each(ids, labels=labels).loss for each in (naive, model)]
    torch.testing.assert_close(*losses, **tolerance)
    for loss in losses:
        loss.backward()
    expected = dict(model.named_parameters())
    for parameter_name, parameter in naive.named_parameters():
        gradient = expected[parameter_name].grad
        torch.testing.assert_close(parameter.grad, gradient, **tolerance, msg=parameter_name)
