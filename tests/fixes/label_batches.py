"""Batches whose rows have different numbers of labels, and small Hugging Face models."""

import pytest
from small import tiny_batch


def uneven(device, key="targets", tokens="tokens"):
    """Rows with very different numbers of labels that count; the last row has none."""
    batch = tiny_batch(device, rows=6)
    labels = batch["targets"].clone()
    for row in range(6):
        labels[row, : 4 * row + 4] = -100
    return {tokens: batch["tokens"], key: labels}


def hugging_face(kind):
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 97, "attention_dropout": 0.0}
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=97,
            n_embd=16,
            n_layer=1,
            n_head=2,
            n_positions=64,
            attn_pdrop=0,
            embd_pdrop=0,
            resid_pdrop=0,
        )
        return transformers.GPT2LMHeadModel(config)
    if kind == "llama":
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, **sizes))
    if kind == "bert":
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=97, **sizes, **none))
    config = transformers.T5Config(
        vocab_size=97, d_model=16, d_ff=32, d_kv=8, num_layers=1, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)
