"""Two predictions beside each other, also from their JSON."""

import json
from dataclasses import replace

import pytest
from sample_prediction import LOSS, MiB, prediction

from oomph.cli.main import run
from oomph.records import Alive, Site
from oomph.report.as_json import prediction_from_json, prediction_to_json
from oomph.report.comparison import line_changes


def grown():
    """Its loss has moved by ten lines and takes 64 MiB more."""
    before = prediction()
    moved = Site(LOSS.file, LOSS.line + 10, LOSS.function)
    at_peak = tuple(
        Alive(size + 64 * MiB * (one.stage == "loss"), one._replace(site=moved) if one.site == LOSS else one)
        for size, one in before.at_peak
    )
    peak = before.peak
    peak = replace(
        peak,
        allocated=peak.allocated + 64 * MiB,
        reserved=peak.reserved + 64 * MiB,
        device=peak.device + 64 * MiB,
    )
    return replace(before, at_peak=at_peak, peak=peak)


def test_json_gives_the_record_back():
    before = prediction()
    found = prediction_from_json(json.loads(json.dumps(prediction_to_json(before))))
    assert (found.peak, found.by_stage(), found.by_line()) == (
        before.peak,
        before.by_stage(),
        before.by_line(),
    )
    again = prediction_to_json(found)
    assert again["at_peak"] == prediction_to_json(before)["at_peak"]


def test_the_line_that_grew_is_named_though_it_moved():
    (change,) = line_changes(prediction(), grown())
    assert (change.bytes, change.label) == (64 * MiB, f"loss.py:{LOSS.line + 10}")
    assert line_changes(prediction(), prediction()) == []
    renamed = replace(
        prediction(),
        at_peak=tuple(
            Alive(size, one._replace(site=one.site and replace(one.site, file=f"{one.site.file[:-3]}_2.py")))
            for size, one in prediction().at_peak
        ),
    )
    assert line_changes(prediction(), renamed) == []


def test_lines_of_one_function_are_told_apart():
    def run(bytes_by_line):
        one = prediction().at_peak[0].allocation
        return replace(
            prediction(),
            at_peak=tuple(
                Alive(size, one._replace(op="aten.mm", site=Site("model.py", line, "forward")))
                for line, size in bytes_by_line.items()
            ),
        )

    before = run({10: 4 * MiB, 11: 8 * MiB})
    for after in (run({10: 9 * MiB, 11: 8 * MiB}), run({20: 9 * MiB, 21: 8 * MiB})):
        (change,) = line_changes(before, after)
        assert (change.before, change.after) == (4 * MiB, 9 * MiB)
        assert change.label in ("model.py:10", "model.py:20")
    changes = line_changes(before, run({10: 4 * MiB, 11: 8 * MiB, 12: 2 * MiB}))
    assert [(one.label, one.before, one.after) for one in changes] == [("model.py:12", 0, 2 * MiB)]


@pytest.mark.parametrize(
    ("tolerance", "status"), [("1%", 0), ("0%", 1), ("63MiB", 1), ("64MiB", 0), ("many", 2), ("-1%", 2)]
)
def test_growth_beyond_the_tolerance_is_status_1(tolerance, status, tmp_path, capsys):
    for name, one in (("old.json", prediction()), ("new.json", grown())):
        (tmp_path / name).write_text(json.dumps(prediction_to_json(one)))
    words = [str(tmp_path / name) for name in ("old.json", "new.json")]
    assert run(["compare", *words, "--tolerance", tolerance]) == status
    shown = capsys.readouterr()
    assert "+64.0 MiB" in shown.out or "+64 MiB" in shown.out or status == 2
    assert status != 2 or tolerance in shown.err


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 2}', '{"schema": 1}', "\x80\x04", "[" * 99_999])
def test_other_files_are_refused_in_one_line(text, tmp_path, capsys):
    file = tmp_path / "old.json"
    file.write_text(text)
    assert run(["compare", str(file), str(file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "old.json" in line
    assert "Error" not in line
