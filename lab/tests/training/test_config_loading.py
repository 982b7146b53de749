"""Configs as they are loaded: defaults, other names, overrides, what follows from what."""

import json

import pytest

from oomph_lab.training.config import ConfigError, Stage, load, load_dict, overrides_from_words


def config(overrides=(), **mapping):
    return load_dict({"system": "pythia", **mapping}, "test", overrides)


def test_a_system_is_enough(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("system: pythia\n")
    made = load(file)
    assert (made.name, made.system, made.form, made.preset) == ("mine", "pythia", "model", "report")
    assert made.output.dir == "runs/mine"
    assert (made.data.source, made.data.tokenizer, made.data.vocab_size) == ("stdlib", "words", 10_000)
    assert (made.data.seq_len, made.data.batch_size, made.training.steps) == (128, 1, 1000)
    assert made.stages == (Stage(128, 1, 1),)


def test_images_have_their_own_source_and_no_tokens():
    made = load_dict({"system": "ginr"}, "test")
    assert (made.data.source, made.data.tokenizer, made.data.seq_len) == ("photographs", None, None)
    with pytest.raises(ConfigError, match=r"seq_len \(which is data.seq_len\) = 64 is not valid; ginr reads"):
        load_dict({"system": "ginr"}, "test", ["seq_len=64"])


def test_the_flags_of_report_002_are_keys():
    words = "--model_size 0.6B --context_length 131072 --attention_type nsa --gradient_checkpointing "
    words += "--batch_size 1 --gradient_accumulation_steps 4"
    made = load_dict({"system": "longctx"}, "test", overrides_from_words(words.split()))
    assert (made.preset, made.model_config.attention, made.data.seq_len) == ("0.6B", "nsa", 131_072)
    assert (made.training.accumulate, [use.fix for use in made.fixes]) == (4, ["activation_checkpointing"])


def test_the_keys_of_report_003_stand_where_it_had_them():
    pytest.importorskip("transformers")
    made = load_dict(
        {
            "system": "npt",
            "model": {"preset": "small"},
            "optimization": {"use_cpu_offload": True, "mixed_precision": "fp16", "use_8bit": True},
            "training": {"batch_size": 2, "max_length": 64, "learning_rate": 1e-4},
        },
        "test",
    )
    optimization = made.model_config.optimization
    assert (optimization.use_cpu_offload, optimization.mixed_precision, optimization.use_8bit) == (
        True,
        "fp16",
        True,
    )
    assert (made.data.batch_size, made.data.seq_len, made.optimizer.learning_rate) == (2, 64, 1e-4)


@pytest.mark.parametrize(
    ("written", "meaning"),
    [
        ("accumulation=3", "training.accumulate=3"),
        ("training.gradient_accumulation_steps=3", "training.accumulate=3"),
        ("lr=0.5", "optimizer.learning_rate=0.5"),
        ("max_length=64", "data.seq_len=64"),
        ("data.context_length=64", "data.seq_len=64"),
        ("batch_tokens=512", "data.batch_tokens=512"),
        ("clip=2.0", "training.clip=2.0"),
        ("sparse=false", "model.sparse=null"),
        ("model.use_sparse_attention=true", "model.sparse=local"),
        ("batch-size=4", "data.batch_size=4"),
        ("curriculum=[{seq_len: 8, batch_tokens: 16}]", "data.curriculum=[{seq_len: 8, batch_tokens: 16}]"),
    ],
)
def test_another_name_means_the_same(written, meaning):
    assert config([written]) == config([meaning])


def test_an_override_replaces_the_files_key_by_whatever_name():
    made = config(["data.context_length=64"], data={"seq_len": 32, "batch_size": 4})
    assert (made.data.seq_len, made.data.batch_size) == (64, 4)
    file = {"data": {"batch_size": 4}, "training": {"epochs": 2}}
    made = config(["batch_tokens=640", "steps=5", "seed=7"], **file)
    assert (made.data.batch_size, made.training.steps, made.training.epochs) == (5, 5, None)
    assert (made.training.seed, made.data.seed) == (7, 7)
    made = config(["data.batch_tokens=null", "training.steps=null"], **file)
    assert (made.data.batch_size, made.training.epochs) == (4, 2)
    assert config(["data={seq_len: 16, batch_size: 2}"]).stages == (Stage(16, 2, 1),)


def test_fixes_of_the_file_are_for_its_own_form():
    mapping = {"fixes": ["fused_linear_cross_entropy"], "training": {"gradient_checkpointing": True}}
    both = ["fused_linear_cross_entropy", "activation_checkpointing"]
    assert [use.fix for use in config(**mapping).fixes] == both
    assert [use.fix for use in config(["form=naive"], **mapping).fixes] == ["activation_checkpointing"]
    assert [use.fix for use in config(form="naive", **mapping).fixes] == both
    assert config(["form=naive", "fixes=no_foreach"], **mapping).fixes[0].fix == "no_foreach"


def test_the_model_is_made_for_the_length_of_the_data_unless_it_says_otherwise():
    assert config(["seq_len=300"]).model_config.seq_len == 300
    assert config(["seq_len=30", "model.seq_len=64"]).model_config.seq_len == 64
    with pytest.raises(ConfigError, match=r"data.seq_len = 300 .* model.seq_len = 64"):
        config(["data.seq_len=300", "model.seq_len=64"])
    context = load_dict({"system": "hatchling"}, "test", ["seq_len=32"]).model_config.context_length
    assert context == 1024  # a shorter sequence takes nothing away


def test_a_stage_has_its_rows_and_its_own_accumulation():
    first = {"seq_len": 8, "batch_tokens": 70, "steps": 3, "accumulate": 5}
    stages = [first, {"seq_len": 16, "batch_size": 4}]
    made = config(data={"curriculum": stages}, training={"accumulate": 2})
    assert made.stages == (Stage(8, 8, 5, 3), Stage(16, 4, 2))
    assert made.largest_stage == made.stages[1]
    assert (made.data.seq_len, made.data.batch_size) == (16, 4)  # as many tokens, and longer
    assert made.training.steps == 1000
    lasting = [first, {**stages[1], "steps": 4}]
    assert config(data={"curriculum": lasting}).training.steps == 7


def test_words_of_yaml_mean_what_people_mean():
    made = config(["lr=1e-4", "model.norm_eps=1e-6", "vocab_size=20_000", "training.dtype=bf16"])
    assert (made.optimizer.learning_rate, made.model_config.norm_eps) == (1e-4, 1e-6)
    assert (made.model_config.vocab_size, made.training.dtype) == (20_000, "bfloat16")
    words = load_dict({"system": "longctx"}, "test", ["preset=tiny", "vocab_size=300", "source=no"])
    assert words.data.source == "no"


@pytest.mark.parametrize("system", ["pythia", "hatchling", "longctx", "ginr"])
def test_what_a_config_says_of_itself_makes_it_again(system):
    made = load_dict(
        {"system": system, "fixes": ["activation_checkpointing:keep=matmuls"]}, "test", ["lr=1e-4"]
    )
    assert load_dict(json.loads(json.dumps(made.to_dict())), "test") == made


def test_flags_and_values_are_told_apart():
    words = ["--sparse", "--seq-len", "64", "lr=1e-3", "--x.y=a=b", "--offset", "-1", "--last"]
    assert overrides_from_words(words) == (
        *("sparse=true", "seq-len=64", "lr=1e-3", "x.y=a=b", "offset=-1", "last=true"),
    )


@pytest.mark.parametrize("word", ["*.txt", "**/*.md", "runs/exp #2", "notes #1"])
def test_patterns_and_names_with_signs_are_words_on_the_command_line(word):
    assert load_dict({"system": "pythia"}, "test", [f"output.dir={word}"]).output.dir == word
    assert load_dict({"system": "pythia"}, "test", [f"output.dir={word!r}"]).output.dir == word


def problems(overrides=(), system="pythia", **mapping):
    with pytest.raises(ConfigError) as caught:
        load_dict({"system": system, **mapping}, "test", overrides)
    return list(caught.value.problems)


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
