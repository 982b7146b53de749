"""Memory snapshots of real runs: what they say, and files that are none."""

import pickle
import resource

import pytest
from benchmarks.report.snapshots import damaged, malicious, snapshot
from benchmarks.report.traces import trained

from oomph.cli.main import run
from oomph.errors import UserError
from oomph.prediction.allocator import replay
from oomph.report.recording import read_snapshot
from oomph.report.snapshot import write_snapshot
from oomph.report.terminal import report_console, report_text

MiB = 2**20


def test_the_snapshot_of_a_prediction_gives_the_prediction(tmp_path):
    before = trained(steps=2)
    file = tmp_path / "run.pickle"
    done = replay(before.events, before.allocations, record=True)
    write_snapshot(file, before, done.trace)
    found = read_snapshot(file.read_bytes(), "run.pickle")
    assert found.peak.reserved == max(moment.reserved for moment in done.timeline)
    assert found.peak.allocated == pytest.approx(max(moment.allocated for moment in done.timeline), rel=0.001)
    assert {site for site, _ in found.by_line()} == {site for site, _ in before.by_line()}
    assert dict(found.by_module()).keys() == dict(before.by_module()).keys()
    assert [stage for stage, _ in found.by_stage()] == [stage for stage, _ in before.by_stage()]


@pytest.fixture(scope="module")
def ended():
    return read_snapshot(pickle.dumps(snapshot()), "oom.pickle")


def test_what_was_alive_when_memory_ran_out(ended):
    assert ended.peak.allocated == (64 + 4 * 8 + 4 * 8) * MiB
    assert dict(ended.by_stage()) == {
        "parameters": 64 * MiB, "gradients": 32 * MiB, "optimizer state": 32 * MiB
    }  # fmt: skip
    assert max(moment.allocated for moment in ended.timeline) == (64 + 32 + 32 + 8) * MiB
    assert ended.peak.reserved == (64 + 4 * 8 + 32 + 4 * 8 + 4 * 8) * MiB


def test_the_failed_request_has_its_line_and_the_fragments_are_named(ended):
    assert ended.refused.site is not None
    assert (ended.refused.bytes, ended.refused.op) == (48 * MiB, "aten.mm")
    assert (ended.refused.site.file, ended.refused.site.line) == ("/home/me/train.py", 12)
    shown = report_text(ended, report_console())
    assert shown.startswith("ran out of memory with 128 MiB allocated\n")
    assert "train.py:12: tried to allocate 48 MiB" in shown
    assert "expandable_segments" in shown  # 64 MiB are free, 32 MiB at most in one block


def test_a_run_that_did_not_fail_peaks_at_its_highest_moment():
    found = read_snapshot(pickle.dumps(snapshot(out_of_memory=False)), "run.pickle")
    assert found.refused is None
    assert dict(found.by_stage())["loss"] == 32 * MiB
    assert found.peak.allocated == (64 + 32 + 32 + 8) * MiB


def test_explain_writes_text_json_and_html(tmp_path, capsys):
    file, html = tmp_path / "oom.pickle", tmp_path / "oom.html"
    file.write_bytes(pickle.dumps(snapshot()))
    assert run(["explain", str(file), "--html", str(html)]) == 0
    assert "ran out of memory" in capsys.readouterr().out
    assert "ran out of memory" in html.read_text()
    assert run(["explain", str(file), "--json"]) == 0
    (tmp_path / "oom.json").write_text(capsys.readouterr().out)
    assert run(["compare", str(tmp_path / "oom.json"), str(file)]) == 0
    assert "unchanged" in capsys.readouterr().out


def test_nothing_of_a_file_is_executed(tmp_path):
    sentinel = tmp_path / "executed"
    limit = resource.getrlimit(resource.RLIMIT_AS)
    for data in malicious(str(sentinel)):
        with pytest.raises(UserError, match=r"^x\.pickle is not a PyTorch memory snapshot: [^\n]+$"):
            read_snapshot(data, "x.pickle")
    assert not sentinel.exists()
    assert resource.getrlimit(resource.RLIMIT_AS) == limit


def test_1000_damaged_files_are_read_or_refused_in_one_line():
    refused = []
    for number, data in enumerate(damaged(1000)):
        try:
            found = read_snapshot(data, "x.pickle")
            if number % 20 == 0:
                report_text(found, report_console())
        except UserError as error:
            refused.append(str(error))
    assert len(refused) > 500
    assert not [line for line in refused if "\n" in line or not line.isprintable()]
