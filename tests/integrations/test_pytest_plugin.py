"""The fixture `oomph_peak`, and tests that use it."""

from importlib import metadata
from pathlib import Path

import pytest
from benchmarks.report.traces import trained

from oomph.integrations.pytest_plugin import FOLDER, PredictedPeak

USER_TEST = """
import torch
from torch import nn

def training():
    model = nn.Linear(512, {width}).to("cuda")
    optimizer = torch.optim.SGD(model.parameters())

    def step():
        model(torch.randn(2048, 512, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step

def test_memory(oomph_peak):
    assert oomph_peak(training, gpu="rtx3090") < "{most}"
"""


def test_a_peak_compares_with_sizes():
    peak = PredictedPeak(trained())
    assert peak == peak.bytes
    assert "1MiB" < peak < "1TiB"
    assert peak > PredictedPeak(trained(layers=3))
    with pytest.raises(TypeError, match="38GiB"):
        assert peak < 1.5


def run_pytest(*words):
    installed = any(one.name == "oomph" for one in metadata.entry_points(group="pytest11"))
    plugin = [] if installed else ["-p", "oomph.integrations.pytest_plugin"]
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-p",
        "no:faulthandler",
        "-p",
        "no:unraisableexception",  # collects garbage five times at the end
        "--rootdir",
        ".",
        "-c",
        "/dev/null",
    ]
    return int(pytest.main([*options, *plugin, *words]))


@pytest.mark.usefixtures("in_process")
def test_growth_fails_with_the_line_that_grew(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("test_mine.py").write_text(USER_TEST.format(width=512, most="1GiB"))
    assert run_pytest("--oomph-update", "test_mine.py") == 0
    (baseline,) = Path(FOLDER).glob("*.json")
    assert str(tmp_path) not in baseline.read_text()
    monkeypatch.delitem(__import__("sys").modules, "test_mine", raising=False)
    Path("test_mine.py").write_text(USER_TEST.format(width=4096, most="400MiB"))
    assert run_pytest("test_mine.py") == 1
    shown = capsys.readouterr().out
    assert "since the baseline" in shown
    assert "test_mine.py:10" in shown
