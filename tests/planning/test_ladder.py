"""The ladder of a model's name: what fits on a card with each method, how large, and which cards do."""

import json

import pytest

from oomph.cli.main import run
from oomph.errors import UserError

pytest.importorskip("accelerate")
pytest.importorskip("transformers").Trainer  # noqa: B018  # imported once, and not in each prediction
WIDTH, LENGTH = 256, 2048
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 4096,
    "hidden_size": WIDTH,
    "intermediate_size": 4 * WIDTH,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": False,
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def test_the_largest_that_fits_and_what_cards_cost(folder, tmp_path, capfd):
    prices = tmp_path / "prices.csv"
    prices.write_text("card,price per hour\nh100-80gb,2.0\nrtx4090,0.4\n")
    asked = ["--method", "full", "--length", str(LENGTH), "--gpu", "1GiB", "--prices", str(prices)]
    assert run(["fit", folder, *asked, "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    (full,) = found["methods"]
    assert full["fits"]
    assert full["largest_length"] == {"size": LENGTH, "exact": True, "fails": False}  # of its positions
    for rows, status in ((full["largest_batch"]["size"], 0), (full["largest_batch"]["size"] + 1, 1)):
        words = ["--batch", str(rows), "--length", str(LENGTH), "--gpu", "1GiB", "--json"]
        assert run(["predict", folder, *words]) == status
    assert {card["gpu"] for card in full["cards"]} == {"h100-80gb", "rtx4090"}
    each = [card["per_million_tokens"] for card in full["cards"]]
    assert each == sorted(each)
    of_4090 = next(card for card in full["cards"] if card["gpu"] == "rtx4090")
    assert of_4090["per_million_tokens"] == pytest.approx(0.4 / 3.6e3 / of_4090["tokens_per_second"] * 1e6)


def test_without_a_card_all_methods_and_the_cards_that_do(folder, capfd):
    assert run(["fit", folder, "--length", "64"]) == 0
    text = capfd.readouterr().out
    assert [line.split()[0] for line in text.splitlines() if line.startswith("  full")] == ["full"] * 2
    assert "RTX" in text
    assert f"oomph predict {folder} --method" in text


@pytest.mark.filterwarnings("ignore:.*all_gather_into_tensor:FutureWarning")
def test_how_many_cards_full_fine_tuning_needs(folder, capfd):
    asked = ["--method", "full", "--ranks", "--length", "8", "--gpu", "rtx4090", "--max", "22MiB", "--json"]
    assert run(["fit", folder, *asked]) == 1
    (full,) = json.loads(capfd.readouterr().out)["methods"]
    assert full["verdict"] == "does not fit"
    assert full["ranks"] or full["no_ranks"]
    if full["ranks"]:
        assert full["rank_peak"]["reserved"] <= 22 * 2**20


@pytest.mark.filterwarnings("ignore:.*all_gather_into_tensor:FutureWarning")
def test_cards_are_counted_also_where_fixes_are_enough_and_failed_searches_say_so(folder, monkeypatch, capfd):
    def fail(*args):
        raise UserError("no size was found")

    monkeypatch.setattr("oomph.planning.ladder.largest_of", fail)
    asked = ["--method", "full", "--ranks", "--length", "512", "--gpu", "rtx3090", "--max", "90MiB"]
    assert run(["fit", folder, *asked, "--allow", "training"]) == 0
    text = capfd.readouterr().out
    assert "full has no largest length, because the search for it failed: no size was found" in text
    assert "not known" in text
    assert "full: with several of these cards: " in text
    assert "--gpu rtx3090 --max 90MiB --allow training    # how to apply the fixes" in text


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--method", "lora", "--ranks"], "--ranks needs a card"),
        (["--plan", "plan.json"], "--plan is for one method and a card"),
        (["--prices", "missing.csv"], "--prices 'missing.csv' cannot be read"),
        (["--method", "generate"], "method 'generate' has no ladder"),
        (
            ["--method", "qlora", "--optimizer", "adamw9", "--gpu", "1GiB", "--prices", "{bad}"],
            "is not a price",
        ),
    ],
)
def test_mistakes(folder, tmp_path, capfd, words, line):
    (tmp_path / "bad.csv").write_text("rtx4090,free\nrtx3090,cheap\n")
    words = [str(tmp_path / "bad.csv") if word == "{bad}" else word for word in words]
    assert run(["fit", folder, *words]) == 2
    assert line in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--parallel", "tp"], "--parallel 'tp' is not valid; valid: fsdp2, ddp"),
        (["--method", "qlora"], "method 'qlora' with FSDP2 is not predicted"),
        (["--method", "generate"], "method 'generate' runs in one process"),
    ],
)
def test_methods_that_several_ranks_do_not_run(folder, capfd, words, line):
    assert run(["predict", folder, "--ranks", "2", *words]) == 2
    assert line in capfd.readouterr().err


@pytest.mark.filterwarnings("ignore:.*all_gather_into_tensor:FutureWarning")
def test_two_ranks_share_what_one_holds(folder, capfd):
    peaks = []
    for ranks in (["--ranks", "2"], ["--ranks", "8"]):
        assert run(["predict", folder, "--length", "64", *ranks, "--json"]) == 0
        peaks.append(json.loads(capfd.readouterr().out)["peak"]["allocated"])
    assert peaks[1] < peaks[0]
