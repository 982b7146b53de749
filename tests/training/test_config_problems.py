"""Wrong configs: everything at once, each with its key, what was given and what is valid."""

from __future__ import annotations

import pytest

from oomph.training.config import ConfigError, load_dict


def problems(overrides=(), system="pythia", **mapping):
    with pytest.raises(ConfigError) as caught:
        load_dict({"system": system, **mapping}, "test", overrides)
    return list(caught.value.problems)


@pytest.mark.parametrize("preset", [[1], {"a": 1}, 3])
def test_a_preset_that_is_no_word_is_told_like_any_other(preset):
    (line,) = problems(system="hatchling", model={"preset": preset}, data={"seq_len": 64})
    assert line.startswith(f"model.preset = {preset!r} is not valid; hatchling has hn_xs")


def test_a_wrong_field_of_the_model_leaves_the_right_ones_in_force():
    # The preset's own 64 words would be a second problem, which nobody made.
    model = {"preset": "tiny", "vocab_size": 300, "token_drop_layers": [5, 2]}
    (line,) = problems(system="hatchling", model=model)
    assert line.startswith("model.token_drop_layers")


def test_all_problems_are_told_at_once():
    found = problems(
        ["traning.steps=5", "lr=fast", "data.batch_size=0"],
        form="ill",
        model={"preset": "70m", "num_heads": 7, "dropout": "some", "hiden_size": 5},
        data={"shuffle": "yes", "curriculum": [{"seq_len": 8, "batch_token": 4}]},
        training={"schedule": "cosin", "clip": -1},
        fixes=["recompte", "activation_checkpointing:keep=all,depth=2"],
    )
    assert sorted(line.split(" ")[0] for line in found) == sorted(
        [
            *("traning.steps", "lr", "data.batch_size", "form", "model.preset", "model.hidden_size"),
            *("model.dropout", "model.hiden_size", "data.shuffle", "data.curriculum.0.batch_token"),
            *("training.schedule", "training.clip", "fixes.0", "fixes.1"),
        ]
    )
    text = "\n".join(found)
    for said in (
        "lr (which is optimizer.learning_rate) = 'fast' is not valid; it should be a valid number",
        "form = 'ill' is not valid; choose from 'model', 'naive'",
        "model.preset = '70m' is not valid; pythia has report, pythia",
        "model.hidden_size = 512 is not valid; give a multiple of num_heads=7",
        "model.hiden_size is not a key; did you mean 'model.hidden_size'?",
        "data.batch_size = 0 is not valid; it should be greater than or equal to 1",
        "data.shuffle = 'yes' is not valid; it should be a valid boolean",
        "data.curriculum.0.batch_token is not a key; did you mean 'batch_tokens'?",
        "training.schedule = 'cosin' is not valid; it should be 'constant', 'cosine' or 'linear'",
        "there is no fix 'recompte'; did you mean 'activation_checkpointing'?",
        "fix 'activation_checkpointing' has no option 'depth'",
    ):
        assert said in text


@pytest.mark.parametrize(
    ("system", "key", "hint"),
    [
        ("longctx", "model.contxt_length", "did you mean 'data.seq_len'?"),
        ("hatchling", "model.contxt_length", "did you mean 'model.context_length'?"),
        ("pythia", "training.learning_rat", "did you mean 'optimizer.learning_rate'?"),
        ("pythia", "trainig.steps", "did you mean 'training.steps'?"),
        ("pythia", "modle", "did you mean 'model'?"),
        ("pythia", "model.zzz", "the keys of 'model' are preset, vocab_size"),
        ("pythia", "zzz", "the sections are model, data, optimizer, training, output; besides them"),
        ("ginr", "model.vocab_sice", "did you mean 'data.vocab_size'?"),
        ("longctx", "sparse", "is not a key"),
    ],
)
def test_an_unknown_key_is_told_its_nearest(system, key, hint):
    (line,) = [one for one in problems([f"{key}=1"], system) if one.startswith(key)]
    assert line.startswith(f"{key} is not a key; ")
    assert hint in line


def test_the_nested_fields_and_the_precision_of_npt():
    pytest.importorskip("transformers")
    options = ["optimization.mixed_precision=int4", "optimization.use_8bit=1", "preset=tiny"]
    options += ["model.optimization.us_8bit=true", "dtype=bfloat16", "tokenizer=words"]
    found = "\n".join(problems(options, "npt"))
    for said in (
        "model.optimization.us_8bit is not a key; did you mean 'model.optimization.use_8bit'?",
        "optimization.use_8bit) = 1 is not valid; it should be a valid boolean",
        "mixed_precision) = 'int4' is not valid; choose from 'no', 'bf16', 'fp16'",
        "npt's base has its own: give model.optimization.mixed_precision",
    ):
        assert said in found
    (line,) = problems(["weights=nowhere"], "npt")
    assert "weights='nowhere' is not a folder" in line
