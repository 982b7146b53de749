"""Notebooks as targets."""

import json

import pytest

from oomph import notebooks
from oomph.cli.main import run

MODEL = """
import torch
model = torch.nn.Linear(256, 256).cuda()
optimizer = torch.optim.Adam(model.parameters())
"""
TRAINING = """
for _ in range(100):
    loss = model(torch.randn(64, 256, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def notebook(tmp_path, monkeypatch):
    """Writes exp.ipynb, or another, in a fresh current directory."""
    monkeypatch.chdir(tmp_path)

    def write(*cells, name="exp.ipynb", **metadata):
        code = [{"cell_type": "code", "source": cell.strip("\n").splitlines(True)} for cell in cells]
        cells = [{"cell_type": "markdown", "source": ["# text"]}, *code]
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps({"cells": cells, "metadata": metadata, "nbformat": 4}))
        return name

    return write


@pytest.fixture
def predicted(notebook, capsys):
    """The object of `oomph predict exp.ipynb --json`."""

    def predict(*cells, name="exp.ipynb"):
        assert run(["predict", notebook(*cells, name=name), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return predict


def test_cells_run_in_order_and_lines_are_those_of_their_cells(notebook, capsys):
    notebook("", "%matplotlib inline\n!nvidia-smi --query-gpu=name" + MODEL, TRAINING, "display(model)")
    assert run(["predict", "exp.ipynb"]) == 0
    text = capsys.readouterr().out
    assert "exp.ipynb cell 2, line 2" in text  # the empty cell has no number
    assert 'loss = model(torch.randn(64, 256, device="cuda"))' in text
    assert "not run: %matplotlib inline (cell 1)" in text


def test_magics_that_matter_are_followed(predicted):
    found = predicted(
        "!mkdir -p data\n%cd data\n%env SIZE=256",
        "%%writefile helper.py\nsize = 256\ndef check(x): assert x == 256",
        "%run helper.py\nimport os, helper\nhelper.check(int(os.environ['SIZE']))\ncheck(size)",
        "%%capture out\nimport asyncio\nawait asyncio.sleep(0)\nfrom IPython.display import HTML\n"
        "import inspect\ninspect.getmodule(inspect.currentframe())",
        "assert out.stdout == ''\nfrom tqdm.notebook import trange\nlist(trange(1))\nnumber = 3\nnumber",
        "assert _ == Out[5] == 3\nfiles = !ls {number}\n%time import math\nmath?",
        "%%time" + MODEL + "get_ipython().run_line_magic('env', 'A=1')",
        TRAINING,
    )
    assert {one["file"] for one in found["lines"]} == {"exp.ipynb cell 7", "exp.ipynb cell 8"}


def test_a_notebook_runs_in_its_own_folder(predicted, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/local.py").write_text("size = 256\n")
    found = predicted(
        "from local import size\nopen('local.py').close()", MODEL, TRAINING, name="sub/exp.ipynb"
    )
    assert found["lines"][0]["file"] == "sub/exp.ipynb cell 3"


def test_values_of_cells_are_kept_as_jupyter_keeps_them(predicted):
    size = "torch.zeros(2**20, device='cuda')"
    kept = predicted(MODEL + size, TRAINING)["peak"]["allocated"]
    assert kept - predicted(MODEL + size + ";", TRAINING)["peak"]["allocated"] == 4 * 2**20


def test_an_error_names_its_cell(notebook, capsys):
    notebook(
        MODEL, "def f(x):\n    return x @ torch.ones(3, device='cuda')\n\nf(torch.ones(4, device='cuda'))"
    )
    assert run(["predict", "exp.ipynb"]) == 3
    error = capsys.readouterr().err
    assert 'File "exp.ipynb cell 2", line 4, in <module>' in error
    assert "return x @ torch.ones(3, device='cuda')" in error
    assert "the program failed at exp.ipynb cell 2, line 2: " in error


@pytest.mark.parametrize(
    ("cell", "command"),
    [
        ("!python -u train.py --lr {1 + 1}", "oomph predict -- python -u train.py --lr 2"),
        (
            "%%bash\npip install x\npython -m pip install y\nbash setup.sh\nA=1 python3 -m pkg.train",
            "oomph predict -- A=1 python3 -m pkg.train",
        ),
        ("!uv run train.py --a '1|2' 2>&1 | tee log", "oomph predict -- uv run train.py --a '1|2'"),
        ("!cd code && accelerate launch train.py", "oomph predict -- accelerate launch train.py"),
    ],
)
def test_training_in_another_program_is_said_with_what_predicts_it(notebook, capsys, cell, command):
    notebook(cell)
    assert run(["predict", "exp.ipynb"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "exp.ipynb put nothing on the GPU" in last
    assert f"`{command}`" in last


@pytest.mark.parametrize(
    "command", ["sudo apt install python3 g++", "conda install x", "accelerate config", "python --version"]
)
def test_other_commands_are_no_training(command):
    assert notebooks.training_command(command) is None


@pytest.mark.parametrize("line", ["%run", "%run -i", "%run -m"])
def test_a_run_magic_without_a_file_is_one_line(notebook, capsys, line):
    notebook(line)
    assert run(["predict", "exp.ipynb"]) == 2
    error = capsys.readouterr().err
    assert "%run is given no file" in error
    assert len(error.splitlines()) == 1


def test_commands_run_where_they_are_allowed(notebook, capsys, tmp_path):
    notebook("!echo $((1 + 1)) > here.txt\nn = !cat here.txt\nassert n == ['2'], n" + MODEL, TRAINING)
    assert run(["predict", "exp.ipynb", "--allow-subprocesses"]) == 0
    assert "not run" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("x = 7\n% 3", None),
        ("x = (7\n% 3)\n%cd a", "x = (7\n% 3)\nget_ipython().run_line_magic('cd', 'a')"),
        ("!echo \"it's (\ny = 1", "get_ipython().system('echo \"it\\'s (')\ny = 1"),
        ("!pip install \\\n  a\ny = 1", "get_ipython().system('pip install   a')\n\ny = 1"),
        ("if a:\n    pip install b", "if a:\n    get_ipython().run_line_magic('pip', 'install b')"),
        ("x = %timeit -n 10 -o f(a, -1)", "x = f(a, -1)"),
        ("s = '''\n%cd a\n'''", "s = '''\n%cd a\n'''"),
        ("%%timeit -n 3\nf()", "# %%timeit -n 3\nf()"),
    ],
)
def test_lines_of_ipython_become_python(notebook, source, code):
    (cell,) = notebooks.load(notebook(source))
    assert cell.code == (source if code is None else code)


def test_what_is_no_notebook_in_python_is_refused(notebook, tmp_path, capsys):
    (tmp_path / "old.ipynb").write_text('{"worksheets": [], "nbformat": 3}')
    notebook("print(1)", name="r.ipynb", language_info={"name": "R"})
    notebook("", name="empty.ipynb")
    for target, message in {
        "old.ipynb": "not a notebook of format 4",
        "r.ipynb": "written in R",
        "empty.ipynb": "has no code cells",
        "r.ipynb:name": "is a part of a notebook",
    }.items():
        assert run(["predict", target]) == 2
        assert message in capsys.readouterr().err
