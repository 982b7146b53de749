"""Hatchling: the model, and the naive form of report 000."""

from dataclasses import replace

import pytest
import torch
from text_batches import text_batch, tokens

import oomph
from oomph_lab.systems.blocks import CausalAttention
from oomph_lab.systems.hatchling import PRESETS, HatchlingConfig, KDABlock
from oomph_lab.systems.hatchling.naive import REPORT, NaiveHatchling

pytestmark = pytest.mark.usefixtures("in_process")

TINY = PRESETS["tiny"]
NO_DROP = replace(TINY, token_drop=0.0)


@pytest.mark.parametrize(("name", "layers", "attentions"), [("hn_xs", 16, 4), ("hn_s", 32, 8)])
def test_every_fourth_layer_is_attention_without_positions(name, layers, attentions):
    with torch.device("meta"):
        model = PRESETS[name].build()
    kinds = [isinstance(layer.attention, KDABlock) for layer in model.layers]
    assert kinds == [True, True, True, False] * attentions
    assert len(kinds) == layers
    softmax = [m for m in model.modules() if isinstance(m, CausalAttention)]
    assert all(m._rotate is None for m in softmax)
    assert model.positions is None


def test_hn_xs_is_built_as_the_report_has_it():
    with torch.device("meta"):
        model = PRESETS["hn_xs"].build()
    assert model.lm_head is None  # tied
    drops = [getattr(layer.attention.inner, "token_drop", 0.0) for layer in model.layers]
    assert drops == [0.25 if 4 <= n <= 14 and n % 4 != 3 else 0.0 for n in range(16)]
    block = model.layers[0].attention.inner
    assert (block.decay, block.threshold, block.surrogate_beta) == (0.92, 0.35, 9.0)
    assert (block.num_heads, block.head_dim, block.memory_chunk_size) == (8, 64, None)
    assert PRESETS["hn_xs"].get_total_params() == sum(p.numel() for p in model.parameters())


def test_the_predictive_loss_stops_at_its_target():
    torch.manual_seed(0)
    model = replace(NO_DROP, predictive_weight=1.0).build().double()
    hidden = torch.randn(1, 2, 32, dtype=torch.float64, requires_grad=True)
    labels = torch.full((1, 2), -100)
    out = model.output(hidden, labels)
    expected = (model.predictor(hidden[:, 0]) - hidden[:, 1]).square().mean()
    torch.testing.assert_close(out.auxiliary_loss, expected)
    out.loss.backward()
    assert hidden.grad[:, 0].abs().max() > 0
    assert hidden.grad[:, 1].abs().max() == 0
    assert replace(NO_DROP, predictive_weight=0.0).build().predictor is None


def test_one_token_has_nothing_to_predict():
    ids = tokens(64, 2, 1)
    out = NO_DROP.build()(ids, labels=ids)
    assert out.loss.item() == 0
    assert out.auxiliary_loss is None


def test_on_the_reports_card_the_naive_form_fails_where_the_model_fits():
    config = PRESETS[REPORT.preset]
    rows = text_batch(config.vocab_size, REPORT.batch, REPORT.tokens)

    def one_pass(build, config, backward):  # traced in a fraction of the time that three steps take
        def step():
            model = build(config).cuda()
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(**rows(torch.device("cuda"))).loss
            if backward:
                loss.backward()

        return oomph.predict(step, gpu=REPORT.gpu)

    half = replace(config, n_layers=config.n_layers // 2)
    assert one_pass(NaiveHatchling, half, backward=False).fits is False  # half of the forward suffices
    model = one_pass(HatchlingConfig.build, config, backward=True)
    optimizer = 2 * 4 * config.get_total_params()
    assert model.peak.reserved + optimizer < 4 * 2**30  # of 23.6
