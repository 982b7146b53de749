"""Records in notebooks, and callbacks of trainers."""

import subprocess
import sys

import pytest
import torch
from benchmarks.report.snapshots import snapshot
from benchmarks.report.traces import hostile

from oomph.integrations import callbacks, jupyter
from oomph.measurement import oplog
from oomph.prediction.isolation import show_progress
from oomph.records import Diagnosis


def test_strings_of_a_program_are_escaped():
    page = hostile()
    shown = jupyter.diagnosis_html(Diagnosis(page.runs[0][1], tuple(page.findings)))
    assert "<img" not in shown
    assert "</script>" not in shown
    assert len(shown) < 20_000
    assert "does not fit" in shown


def test_records_have_it_in_a_notebook_only():
    code = (
        "import sys, types; sys.modules['IPython'] = types.ModuleType('IPython'); import oomph; "
        "from oomph.records import Prediction; assert 'torch' not in sys.modules; Prediction._repr_html_"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_progress_is_one_line_in_a_notebook(monkeypatch, capsys):
    pytest.importorskip("tqdm")
    for delay in (0.0, 60.0):  # short predictions show none
        with show_progress(None, delay) as elsewhere:
            elsewhere("tracing", 0.5)
        assert capsys.readouterr().err == ""
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "ipykernel", None)
            with show_progress(None, delay) as progress:
                for number in range(50):
                    progress("tracing", number / 50)
                progress("replaying", None)
        shown = capsys.readouterr().err
        assert "\n" not in shown
        assert ("tracing" in shown) == (delay == 0)
        assert shown[shown.rfind("\r") :].strip() == ""  # it is gone


def test_the_first_failed_request_is_reported_once(monkeypatch, tmp_path, capsys):
    observers = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(oplog, "cuda_lazy_call", lambda call: call())
    monkeypatch.setattr(oplog, "record_memory_history", lambda *_, **__: None)
    monkeypatch.setattr(oplog, "out_of_memory_observer", observers.append)
    monkeypatch.setattr(oplog, "memory_snapshot", snapshot)
    callbacks.report_out_of_memory(tmp_path / "oom.html")
    for _ in range(2):
        observers[0](0, 1, 2, 3)
    assert capsys.readouterr().err.count("train.py:12: tried to allocate 48 MiB") == 1
    assert "ran out of memory" in (tmp_path / "oom.html").read_text()


def test_without_a_gpu_a_callback_does_nothing(tmp_path):
    pytest.importorskip("accelerate", reason="the Trainer of transformers needs accelerate")
    from oomph.integrations.huggingface import OomphCallback

    logs = {"loss": 1.0}
    callback = OomphCallback(str(tmp_path / "oom.html"))
    callback.on_train_begin(None, None, None)
    callback.on_log(None, None, None, logs=logs)
    assert logs == {"loss": 1.0}
