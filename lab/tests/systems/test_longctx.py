"""The long-context decoder: the model, and the naive form of report 002."""

from dataclasses import replace

import pytest
import torch

import oomph
from oomph.errors import ArgumentError
from oomph.nn import RotaryEmbedding
from oomph_lab.systems.longctx import PRESETS, LongContextConfig
from oomph_lab.systems.longctx.naive import REPORT, NaiveLongContext, RopeCache

pytestmark = pytest.mark.usefixtures("in_process")

TINY = PRESETS["tiny"]


@pytest.mark.parametrize(
    ("size", "count"),
    [("4B", 3_915_962_880), ("0.6B", 596_049_920), ("qwen3-4B", 4_022_468_096), ("8B", 8_190_735_360)],
)
def test_the_sizes_have_their_parameters(size, count):
    assert LongContextConfig.of(size).get_total_params() == count


def test_sparse_attention_adds_gates_and_compression():
    dense, sparse = (LongContextConfig.of("4B", kind).get_total_params() for kind in ("dense", "nsa"))
    gates = 2560 * 3 * 32 + 3 * 32
    compression = 32 * 80 + (32 * 80 * 80 + 80) + (80 * 80 + 80)
    assert sparse - dense == 36 * (gates + 2 * compression)


def test_there_is_one_rotary_embedding_and_no_table_in_any_layer():
    model = LongContextConfig.of("tiny").build()
    assert sum(isinstance(module, RotaryEmbedding) for module in model.modules()) == 1
    assert list(model.buffers()) == []


def test_positions_in_bf16_collapse():
    cache = RopeCache(16, 1e4, 8, bug="rounded_positions").bfloat16()
    cos, _ = cache(131_072)
    assert torch.equal(cos[256], cos[257])  # the first that is wrong
    assert torch.arange(131_072).bfloat16().unique().numel() == 1409
    right, _ = RopeCache(16, 1e4, 8).bfloat16()(131_072)
    assert not torch.equal(right[256], right[257])  # right until it is rounded


def test_positions_counted_on_the_wrong_device_fail_in_a_prediction():
    def forward():
        with torch.device("cuda"):
            model = NaiveLongContext(TINY, 8, rope_bug="wrong_device")
        model(torch.zeros(1, 16, dtype=torch.long, device="cuda"))

    with pytest.raises(oomph.OomphError, match="cpu"):
        oomph.predict(forward)


def _loss_of_the_head(config, kind):
    """The loss alone, from hidden states on: nothing before it depends on the form of the head."""

    def forward():
        with torch.device("cuda"):
            model = kind(replace(config, num_layers=1)).bfloat16()
            shape = (REPORT.batch, REPORT.tokens)
            hidden = torch.randn(*shape, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
            labels = torch.zeros(shape, dtype=torch.long)
        model.output(hidden, labels).loss.backward()

    return forward


def test_the_loss_takes_222_gib_in_the_naive_form():
    config = LongContextConfig.of(REPORT.preset)
    naive = oomph.predict(_loss_of_the_head(config, lambda c: NaiveLongContext(c, 16)), gpu=REPORT.gpu)
    model = oomph.predict(_loss_of_the_head(config, LongContextConfig.build), gpu=REPORT.gpu)
    logits = REPORT.tokens * config.vocab_size * 2
    assert round(logits / 2**30, 2) == 37.09
    assert naive.fits is False
    assert naive.peak.allocated >= 6 * logits * (1 - 1e-5)  # logits, their copy, twice the copy in fp32
    assert model.fits is True
    assert model.peak.allocated < 8 * 2**30


@pytest.mark.parametrize("tied", [False, True])
def test_the_models_own_chunked_loss_is_that_of_its_forward(tied):
    torch.manual_seed(0)
    model = replace(PRESETS["tiny"], tie_word_embeddings=tied).build()
    ids = torch.randint(0, 256, (2, 30))
    hidden = model.hidden_states(ids)
    torch.testing.assert_close(model._compute_loss_chunked(hidden, ids), model(ids, ids).loss)
    torch.testing.assert_close(model._compute_loss_chunked(hidden, ids, chunk_size=7), model(ids, ids).loss)
    with pytest.raises(ArgumentError, match="chunk_size=0 is not valid"):
        model._compute_loss_chunked(hidden, ids, chunk_size=0)
