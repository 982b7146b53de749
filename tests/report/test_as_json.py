from __future__ import annotations

import json

from sample_prediction import LOSS, prediction

from oomph.records import Moment
from oomph.report.as_json import prediction_to_json


def test_the_object_has_the_keys_of_schema_one():
    made = prediction_to_json(prediction())
    assert made["schema"] == 1
    assert {
        "schema", "gpu", "peak", "fits", "stages", "modules", "lines", "at_peak", "findings", "notes"
    } <= made.keys()  # fmt: skip
    assert {"allocated", "reserved", "device"} <= made["peak"].keys()
    assert {
        "bytes", "shape", "dtype", "op", "module", "file", "line", "stage", "kind"
    } <= made["at_peak"][0].keys()  # fmt: skip


def test_it_survives_a_round_trip_through_json():
    made = prediction_to_json(prediction())
    assert json.loads(json.dumps(made, allow_nan=False)) == made


def test_the_figures_are_those_of_the_prediction():
    given = prediction()
    made = prediction_to_json(given)
    assert (made["gpu"], made["fits"], made["capacity"]) == ("rtx3090", False, given.capacity)
    assert made["peak"]["allocated"] == given.peak.allocated
    assert (made["peak"]["step"], made["peak"]["stage"], made["peak"]["line"]) == (2, "backward", 41)
    assert [one["step"] for one in made["steps"]] == [1, 2, 3]


def test_stages_modules_and_tensors_each_add_up_to_the_peak():
    made = prediction_to_json(prediction())
    for key in ("stages", "modules", "at_peak"):
        assert sum(one["bytes"] for one in made[key]) == made["peak"]["allocated"], key


def test_lines_carry_file_line_and_function_and_come_largest_first():
    made = prediction_to_json(prediction())
    assert [one["line"] for one in made["lines"]] == [123, 41]
    assert made["lines"][1] | {"bytes": 0} == {
        "file": LOSS.file, "line": 41, "function": "token_loss", "bytes": 0
    }  # fmt: skip


def test_a_tensor_without_a_line_has_null_there():
    workspace = prediction_to_json(prediction())["at_peak"][-1]
    assert (workspace["op"], workspace["file"], workspace["line"]) == ("cublas workspace", None, None)


def test_notes_and_the_refused_request_carry_their_lines():
    made = prediction_to_json(prediction())
    assert made["notes"] == [{"text": "torch.compile is traced as eager", "file": LOSS.file, "line": 7}]
    assert (made["refused"]["bytes"], made["refused"]["line"]) == (6 * 2**30, 41)


def test_without_a_limit_fits_and_refused_are_null():
    made = prediction_to_json(prediction(gpu=None, capacity=None, limit=None, fits=None, refused=None))
    assert made["fits"] is made["refused"] is made["gpu"] is None


def test_a_long_timeline_is_thinned_and_keeps_its_peak():
    timeline = tuple(Moment(i, 10**9 if i == 54321 else i % 1000, 0) for i in range(100_000))
    thinned = prediction_to_json(prediction(timeline=timeline))["timeline"]
    assert len(thinned) == 400
    assert {"event": 54321, "allocated": 10**9, "reserved": 0} in thinned


def test_a_short_timeline_is_kept_whole():
    timeline = tuple(Moment(i, i, 0) for i in range(400))
    made = prediction_to_json(prediction(timeline=timeline))["timeline"]
    assert made == [moment._asdict() for moment in timeline]


def test_the_seconds_of_a_step_are_given_and_null_where_they_are_not_known():
    assert prediction_to_json(prediction(step_seconds=0.25))["step_seconds"] == 0.25
    assert prediction_to_json(prediction())["step_seconds"] is None
