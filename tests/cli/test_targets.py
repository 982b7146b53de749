"""TARGET: files and modules, with sizes; and what is wrong with one."""

import json
import sys

import pytest

from oomph.cli.main import run
from oomph.cli.targets import open_target


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

    program("def make(): ...\n", "json.py")
    with open_target("json.py:make") as found:
        assert found.__name__ == "make"
        assert sys.modules["json"] is json
    assert sys.modules["json"] is json


def test_a_file_that_chooses_its_device_when_imported_chooses_the_gpu(tmp_path):
    file = tmp_path / "chooses.py"
    file.write_text(
        "import torch\n"
        "device = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
        "def train():\n    return lambda: torch.empty(1024, device=device)\n"
    )
    with open_target(f"{file}:train") as target:
        assert target.__globals__["device"] == "cuda"


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
