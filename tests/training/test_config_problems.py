"""Wrong configs: everything at once, each with its key, what was given and what is valid."""

from __future__ import annotations

import pytest

from oomph.errors import UserError
from oomph.training.config import ConfigError, load, load_dict, overrides_from_words


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


def test_a_name_that_the_system_does_not_have_is_not_proposed():
    (line,) = problems(system="longctx", model={"optimisation": 1})
    assert "use_8bit" not in line


def file_error(tmp_path, text, name="x.yaml"):
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        load(file)
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(str(tmp_path) + "/", "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "config 'x.yaml' is empty; it needs at least: system: pythia"),
        ("# only this\n", "config 'x.yaml' is empty; it needs at least: system: pythia"),
        ("- a\n", "config 'x.yaml' holds a list; it should be a mapping, like `system: pythia`"),
        ("word\n", "config 'x.yaml' holds one str; it should be a mapping, like `system: pythia`"),
        ("system: pythia\nmodel: [1\n", "config 'x.yaml', line 3 is not valid YAML: expected ',' or ']'"),
        ("a: 1\n\nb: 2\na: 3\n", "config 'x.yaml', line 4 is not valid YAML: the key 'a' is given twice"),
        ("system: !!python/object:os.system x\n", "config 'x.yaml', line 1 is not valid YAML: could not det"),
        ("model: {}\n", "x.yaml: system is missing; choose from hatchling, pythia, longctx, npt, ginr"),
        (
            "system: pytha\n",
            "x.yaml: system = 'pytha' is not valid; did you mean 'pythia'? Choose from hatch",
        ),
        ("system: [a]\n", "x.yaml: system = ['a'] is not valid; Choose from hatchling"),
    ],
)
def test_a_broken_file_is_one_line(tmp_path, text, message):
    assert file_error(tmp_path, text).startswith(message)


def test_a_file_that_is_not_there_suggests_its_neighbour(tmp_path):
    (tmp_path / "hn_xs.yaml").write_text("")
    with pytest.raises(UserError, match=r"hn_x\.yaml' does not exist; did you mean '.*hn_xs\.yaml'\?"):
        load(tmp_path / "hn_x.yaml")
    with pytest.raises(UserError, match=r"is a directory; give a \.yaml file"):
        load(tmp_path)


def test_bytes_are_not_text(tmp_path):
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="cannot be read: it is not UTF-8 text"):
        load(tmp_path / "x.yaml")


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


def test_the_message_is_one_line_for_one_problem_and_a_list_for_several():
    with pytest.raises(ConfigError) as caught:
        load_dict({"system": "pythia"}, "mine", ["steps=0"])
    one = "mine: steps (which is training.steps) = 0 is not valid; it should be greater than or equal to 1"
    assert str(caught.value) == one
    with pytest.raises(ConfigError) as caught:
        load_dict({"system": "pythia"}, "mine", ["steps=0", "keep=0"])
    assert str(caught.value).splitlines()[0] == "mine has 2 problems:"
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("system", "key", "hint"),
    [
        ("longctx", "model.contxt_length", "did you mean 'context_length' (which is 'data.seq_len')?"),
        ("hatchling", "model.contxt_length", "did you mean 'model.context_length'?"),
        ("pythia", "training.learning_rat", "did you mean 'optimizer.learning_rate'?"),
        ("pythia", "trainig.steps", "did you mean 'training.steps'?"),
        ("pythia", "modle", "did you mean 'model'?"),
        ("pythia", "vocab_sise", "did you mean 'model.vocab_size'?"),
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


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["batch_size=4", "data.batch_size=8"],
            "is given twice, as batch_size = 4 and as data.batch_size = 8",
        ),
        (["batch_size=4", "batch_tokens=128"], "with batch_tokens=128 it is 1: give one of them"),
        (["batch_tokens=5"], "one sequence has 128 tokens"),
        (["steps=5", "epochs=2"], "training.steps is 5: give one"),
        (["curriculum=[]"], "give at least one stage, or null"),
        (["curriculum=[{seq_len: 8}]"], "data.curriculum.0.batch_tokens is missing; give batch_tokens or"),
        (["curriculum=[{batch_size: 8}]"], "data.curriculum.0.seq_len is missing"),
        (["curriculum=[{seq_len: 8, batch_size: 2}]", "seq_len=64"], "give data.curriculum=null too"),
        (
            ["curriculum=[{seq_len: 8, batch_size: 2}, {seq_len: 16, batch_size: 1}]"],
            "data.curriculum.0.steps is missing; only the last stage",
        ),
        (["data.vocab_size=20000"], "data.vocab_size = 20000 is not valid; the model has 10000 tokens"),
        (["data.tokenizer=bytes", "vocab_size=100"], "it has at least 260 tokens"),
        (["fixes=[fused_optimizer, no_foreach]"], "'fused_optimizer' and 'no_foreach' cannot be combined"),
        (
            ["fixes=optimizer_in_backward", "clip=1"],
            "training.clip) = 1.0 is not valid; with the fix 'optimizer",
        ),
        (["fixes=optimizer_in_backward", "accumulation=4"], "= 4 is not valid; with the fix 'optimizer_in"),
        (["fixes=3"], "fixes.0 = 3 is not valid; a fix is given as 3; give name"),
        (["model=3"], "model = 3 is not valid; give a mapping of keys"),
        (["lr=.nan"], "a finite number"),
        (["lr=[1"], "override 'lr=[1' is not valid YAML"),
        (["lr"], "override 'lr' is not key=value"),
    ],
)
def test_what_contradicts_itself_is_refused(overrides, message):
    (line,) = problems(overrides)
    assert message in line


def test_the_precision_of_npt_is_its_own():
    pytest.importorskip("transformers")
    (line,) = problems(["dtype=bfloat16", "preset=tiny", "tokenizer=words"], "npt")
    assert "npt's base has its own: give model.optimization.mixed_precision" in line


def test_wrong_fields_inside_a_field_are_named_by_their_path():
    pytest.importorskip("transformers")
    options = [
        "optimization.mixed_precision=int4",
        "optimization.use_8bit=1",
        "model.optimization.us_8bit=true",
    ]
    found = problems([*options, "preset=tiny", "tokenizer=words"], "npt")
    assert found[0] == (
        "model.optimization.us_8bit is not a key; did you mean 'model.optimization.use_8bit'?"
    )
    assert "optimization.use_8bit) = 1 is not valid; it should be a valid boolean" in found[1]
    assert "mixed_precision) = 'int4' is not valid; choose from 'no', 'bf16', 'fp16'" in found[2]


def test_weights_that_are_not_there_are_a_problem():
    pytest.importorskip("transformers")
    (line,) = problems(["weights=nowhere"], "npt")
    assert "weights='nowhere' is not a folder" in line


@pytest.mark.parametrize("word", ["seq_len", "--", "--=3", "--3=3"])
def test_a_word_that_is_no_override_is_refused(word):
    with pytest.raises(UserError, match=r"is not (an override|a flag)"):
        overrides_from_words([word])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.seq_len=1", "data.seq_len = 1 is not valid; it should be greater than or equal to 2"),
        ("training.seed=99999999999999999999", "training.seed = 99999999999999999999 is not valid"),
        ("training.memory_limit=25000000000", "has no unit; a size is a number with a unit"),
    ],
)
def test_numbers_that_no_run_could_use_are_refused(override, message):
    (line,) = problems([override])
    assert message in line


def test_two_precisions_of_different_kinds_are_refused():
    (line,) = problems(["training.dtype=bfloat16", "training.autocast=float16"])
    assert line.startswith("training.autocast = 'float16' is not valid; the parameters are bfloat16")
