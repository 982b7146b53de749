"""One line on what to do after the error of a program."""

import pytest

from oomph.advice import what_helps
from oomph.cli.main import run
from oomph.errors import ProgramError

HUB = "OSError: We couldn't connect to 'https://huggingface.co' to load the files"


@pytest.mark.parametrize(
    ("message", "traceback", "expected"),
    [
        (
            HUB,
            "  m = AutoModel.from_pretrained('meta-llama/Llama-3.1-8B', dtype=x)\n" + HUB,
            "`oomph predict meta-llama/Llama-3.1-8B --method full`",
        ),
        (
            "LocalEntryNotFoundError: outgoing traffic has been disabled",
            "huggingface_hub/x.py",
            "hf download",
        ),
        (
            "ConnectionError: Couldn't reach 'org/data' on the Hub (OfflineModeIsEnabled)",
            "",
            "data set org/data",
        ),
        ("EndpointConnectionError: Could not connect to the endpoint URL: x", "", "--allow-network"),
        ("RuntimeError: cannot load", "URLError: <urlopen error name resolution>", "--allow-network"),
        ("OSError: You are trying to access a gated repo.\n403 Client Error", "", "hf auth login"),
        (
            "RuntimeError: git failed",
            "Refused: a predicted program cannot start other programs",
            "--allow-subprocesses",
        ),
        ("PermissionError: [Errno 13] unable to open file: 'data.h5'", "", "h5py"),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'a.csv'", "", "a sample of the data"),
        ("KeyError: 'LOCAL_RANK'", "os.environ['LOCAL_RANK']\nKeyError: 'LOCAL_RANK'", "add --torchrun"),
        ("ValueError: environment variable RANK expected, but not set", "", "add --torchrun"),
        ("KeyError: 'SLURM_PROCID'", "", "SLURM_PROCID=0"),
        ("KeyError: 'OMPI_COMM_WORLD_SIZE'", "", "mpirun"),
        ("KeyError: 'DATA'", "x = os.environ['DATA']\nKeyError: 'DATA'", "DATA=VALUE oomph predict"),
        ("AcceleratorError: invalid device ordinal (cuda:1 was asked for)", "", "--ranks 2"),
        ("ModuleNotFoundError: No module named 'google.colab'", "", "Colab alone"),
        ("ModuleNotFoundError: No module named 'wandb'", "", "install wandb"),
        ("EOFError: EOF when reading a line", "", "standard input"),
        # Nothing to say: what was given is said already, or no row knows it.
        ("Refused: cannot start other programs (--allow-subprocesses permits it): git", "", None),
        ("ModuleNotFoundError: No module named 'apex'; it is built for CUDA", "", None),
        ("ValueError: Tokenizer class Foo does not exist", "", None),
        ("EOFError: Ran out of input", "pickle.load(file)\nEOFError: Ran out of input", None),
        ("KeyError: 'loss'", "x['loss']\nKeyError: 'loss'", None),
        ("RuntimeError: shapes (3,) and (4,)", "", None),
    ],
)
def test_an_error_has_one_line_of_advice(message, traceback, expected):
    error = ProgramError(message, "train.py", 3, traceback)
    error.forbidden = ("subprocesses", "network")
    found = what_helps(error)
    assert (expected in found) if expected else found == ""
    assert "\n" not in found


def test_what_was_allowed_is_not_advised():
    error = ProgramError("ConnectionError: Max retries exceeded")
    assert what_helps(error) == ""  # of `oomph measure`, which forbids nothing


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import urllib.request\nurllib.request.urlopen('http://example.org')", "--allow-network"),
        ("import os\nos.environ['SLURM_PROCID']", "SLURM_NTASKS=8"),
        ("import torch\ntorch.ones(3, device='cuda:1')", "--ranks 2"),
    ],
)
def test_the_advice_is_the_line_after_the_error(program, capsys, source, expected):
    program(source)
    assert run(["predict", "train.py"]) == 3
    *_, error, last = capsys.readouterr().err.splitlines()
    assert "the program failed at" in error
    assert expected in last


@pytest.mark.parametrize(("name", "status"), [("peft", 2), ("oomph.peft", 70), ("peft.missing", 70)])
def test_only_a_whole_package_can_be_missing(monkeypatch, capsys, name, status):
    def fail(*args):
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr("oomph.gpus.catalogue", fail)
    assert run(["gpus"]) == status
    assert "bug in oomph" in capsys.readouterr().err or status == 2
