"""A Prediction as JSON, schema 1."""

import json
import random

import pytest
from sample_prediction import LOSS, prediction

from oomph.records import Moment
from oomph.report.as_json import downsample, prediction_to_json


def test_the_object_has_the_keys_and_figures_of_the_prediction():
    given = prediction()
    made = prediction_to_json(given)
    assert json.loads(json.dumps(made, allow_nan=False)) == made
    assert made["schema"] == 1
    assert {
        "schema", "gpu", "peak", "fits", "stages", "modules", "lines", "at_peak", "findings", "notes"
    } <= made.keys()  # fmt: skip
    assert {"allocated", "reserved", "device"} <= made["peak"].keys()
    assert {
        "bytes", "shape", "dtype", "op", "module", "file", "line", "stage", "kind"
    } <= made["at_peak"][0].keys()  # fmt: skip
    assert (made["gpu"], made["fits"], made["capacity"]) == ("rtx3090", False, given.capacity)
    assert made["peak"]["allocated"] == given.peak.allocated
    assert (made["peak"]["step"], made["peak"]["stage"], made["peak"]["line"]) == (2, "backward", 41)
    assert [one["step"] for one in made["steps"]] == [1, 2, 3]
    for key in ("stages", "modules", "at_peak"):
        assert sum(one["bytes"] for one in made[key]) == made["peak"]["allocated"], key
    assert [one["line"] for one in made["lines"]] == [123, 41]
    line = {"file": LOSS.file, "line": 41, "function": "token_loss"}
    assert made["lines"][1] == {**line, "bytes": made["lines"][1]["bytes"]}
    assert made["notes"] == [{"text": "torch.compile is traced as eager", "file": LOSS.file, "line": 7}]
    assert (made["refused"]["bytes"], made["refused"]["line"]) == (6 * 2**30, 41)


def test_without_a_limit_fits_and_refused_are_null():
    made = prediction_to_json(prediction(gpu=None, capacity=None, limit=None, verdict=None, refused=None))
    assert made["fits"] is made["refused"] is made["gpu"] is None


def long_timeline(seed):
    """A random walk of allocated bytes, with somewhat more reserved."""
    chance = random.Random(seed)
    allocated, moments = 0, []
    for event in range(5000):
        allocated = max(0, allocated + chance.randint(-100, 110))
        moments.append(Moment(event, allocated, allocated + chance.randint(0, 500)))
    return tuple(moments)


@pytest.mark.parametrize("points", [1, 2, 7, 50])
def test_a_long_timeline_is_shortened_and_keeps_both_maxima(points):
    timeline = long_timeline(seed=points)
    shorter = downsample(timeline, points)
    assert 1 <= len(shorter) <= points
    assert list(shorter) == sorted(shorter)
    assert set(shorter) <= set(timeline)
    assert max(m.allocated for m in shorter) == max(m.allocated for m in timeline)
    if points > 1:
        assert max(m.reserved for m in shorter) == max(m.reserved for m in timeline)


def test_the_timeline_has_at_most_400_points_and_a_shorter_one_is_complete():
    timeline = tuple(Moment(i, i, 0) for i in range(401))
    assert len(prediction_to_json(prediction(timeline=timeline))["timeline"]) == 400
    made = prediction_to_json(prediction(timeline=timeline[:400]))["timeline"]
    assert made == [moment._asdict() for moment in timeline[:400]]
