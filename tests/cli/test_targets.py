"""TARGET: files, modules and configs, with their overrides; and what is wrong with one."""

import json
import sys
from pathlib import Path

import pytest

from oomph.cli.main import run
from oomph.cli.targets import open_target
from oomph.nn import NativeSparseAttention
from oomph.workload import Workload


@pytest.mark.parametrize("target", ["train.py:make", "pkg_of_test.steps:make"])
def test_a_function_of_a_file_or_module_is_handed_over_without_being_called(program, tmp_path, target):
    (tmp_path / "pkg_of_test").mkdir()
    text = "def make(size=3, *rest, **options):\n    raise RuntimeError('called')\n"
    program(f"{text}if __name__ == '__main__':\n    raise SystemExit(9)\n")  # it is no script
    program(text, "pkg_of_test/steps.py")
    with open_target(target) as found:
        assert found.__name__ == "make"


def test_the_folder_of_the_file_comes_first_on_the_path_while_in_use_and_is_removed_after(program, tmp_path):
    (tmp_path / "deep").mkdir()
    program("def make():\n    import neighbour_of_test\n    return neighbour_of_test.x\n", "deep/train.py")
    program("x = 5\n", "deep/neighbour_of_test.py")
    before = list(sys.path)
    with open_target("deep/train.py:make") as found:
        assert sys.path[0] == str(tmp_path / "deep")
        assert found() == 5
    assert sys.path == before
    assert "train" not in sys.modules


def test_a_file_named_like_a_module_in_use_does_not_replace_it(program):
    import json

    program("def make(): ...\n", "json.py")
    with open_target("json.py:make") as found:
        assert found.__name__ == "make"
        assert sys.modules["json"] is json
    assert sys.modules["json"] is json


def test_a_config_that_is_loaded_by_the_program_keeps_its_problems(program, capsys):
    program("import oomph.training.config as c\n\nc.load_dict({'system': 'pythia', 'epoch': 3}, 'mine')\n")
    (line,) = _error(capsys, "predict", "train.py:x")
    assert line.startswith("oomph: train.py:3: mine: epoch is not a key; did you mean 'training.epochs'?")


def test_a_file_that_chooses_its_device_when_imported_chooses_the_gpu(tmp_path):
    file = tmp_path / "chooses.py"
    file.write_text(
        "import torch\n"
        "device = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
        "def train():\n    return lambda: torch.empty(1024, device=device)\n"
    )
    with open_target(f"{file}:train") as target:
        assert target.__globals__["device"] == "cuda"


# ------------------------------------------------------------------------------------------- configs

TINY = str(Path(__file__).parents[2] / "configs" / "longctx_tiny.yaml")


def _error(capsys, *arguments):
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()


def test_a_config_is_a_workload_with_its_overrides_in():
    with open_target(TINY, ["batch_size=3", "model.attention=nsa"]) as found:
        assert isinstance(found, Workload)
        assert found.sizes == {"B": 3, "T": 128}
        assert any(isinstance(module, NativeSparseAttention) for module in found.model().modules())


def test_no_more_batches_of_a_step_are_traced_than_its_memory_needs():
    with open_target(TINY, ["accumulation=16"]) as found:
        assert isinstance(found, Workload)
        assert found.accumulate == 2


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        (["seq_len=32", "batch_size=2", "fixes=activation_checkpointing"], {"B": 2, "T": 32}),
        (["--seq_len", "32", "--batch-size=3", "--shuffle"], {"B": 3, "T": 32}),  # as `train` takes them
        (["--data.source", "corpus.py", "seq_len=32", "batch_size=2"], {"B": 2, "T": 32}),  # no script
        (["data.source=corpus.py", "seq_len=32", "batch_size=2"], {"B": 2, "T": 32}),
    ],
)
def test_predict_takes_a_config_and_overrides(fake_predict, capsys, words, sizes):
    assert run(["predict", TINY, *words, "--gpu", "rtx3090", "--json"]) == 0
    traced = fake_predict.arguments(capsys.readouterr().out)
    assert (traced["sizes"], traced["gpu"]) == (sizes, "rtx3090")
    assert traced["fixes"] == ["activation_checkpointing"] * ("fixes=activation_checkpointing" in words)


def test_a_configs_own_limit_is_that_of_its_prediction(fake_predict, capsys):
    """The smaller of the two, as the run would have it."""
    for more, limit in (([], "3GiB"), (["--max", "2GiB"], "2GiB"), (["--max", "4GiB"], "3GiB")):
        assert run(["predict", TINY, "training.memory_limit=3GiB", "--json", *more]) == 0
        assert fake_predict.arguments(capsys.readouterr().out)["max"] == limit


def test_fixes_on_the_command_line_come_on_top(fake_predict, capsys):
    words = ["--fix", "fused_linear_cross_entropy", "fixes=activation_checkpointing"]
    assert run(["predict", TINY, *words]) == 2
    assert "has to be applied before 'activation_checkpointing'" in capsys.readouterr().err
    words = ["--fix", "activation_checkpointing", "fixes=fused_linear_cross_entropy"]
    assert run(["predict", TINY, *words, "--json"]) == 0
    assert fake_predict.arguments(capsys.readouterr().out)["fixes"] == [
        "fused_linear_cross_entropy",
        "activation_checkpointing",
    ]


@pytest.mark.usefixtures("in_process")
def test_fixes_and_verify_take_a_config_and_overrides(capsys):
    small = ["seq_len=16", "batch_size=2"]
    assert (
        run(["fixes", TINY, *small, "--only", "activation_checkpointing", "--gpu", "rtx3090", "--json"]) == 0
    )
    assert json.loads(capsys.readouterr().out)["schema"] == 1
    assert run(["verify", TINY, "activation_checkpointing:keep=products", *small, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["holds"] is True


def test_several_problems_are_a_line_each(program, capsys):
    program("system: pythia\nmodel: {hiden_size: 3}\ntraining: {steps: many}\n", "x.yaml")
    assert _error(capsys, "predict", "x.yaml", "clip=0") == [
        "oomph: x.yaml has 3 problems:",
        "  model.hiden_size is not a key; did you mean 'model.hidden_size'?",
        "  training.steps = 'many' is not valid; it should be a valid integer",
        "  clip (which is training.clip) = 0 is not valid; it should be greater than 0",
    ]


SIZED = """
import torch, oomph
def batch(device, B, T): return torch.zeros(B, T, device=device)
w = oomph.Workload(lambda: torch.nn.Linear(1, 1), batch, lambda m, b: m(b).sum(), sizes={"B": 8, "T": 64})
def made(): return w
"""


@pytest.mark.parametrize("name", ["w", "made"])
def test_sizes_of_a_workload_can_be_given(program, fake_predict, capsys, name):
    program(SIZED)
    assert run(["predict", f"train.py:{name}", "B=3", "--json"]) == 0
    assert fake_predict.arguments(capsys.readouterr().out)["sizes"] == {"B": 3, "T": 64}
