"""A pytest plugin: memory regressions fail in CI, without a GPU.

    def test_memory(oomph_peak):
        assert oomph_peak(workload, gpu="a100-40gb") < "38GiB"

`pytest --oomph-update` stores what every such call needs in `oomph_baselines/`, beside the test file. From
then on a failed assertion also says what grew since, and at which line.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from oomph.records import Prediction
from oomph.units import format_bytes, parse_bytes

FOLDER = "oomph_baselines"
_LINES = 5


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("oomph")
    group.addoption("--oomph-update", action="store_true", help="store the memory that tests predict")


def pytest_assertrepr_compare(op: str, left: object, right: object) -> list[str] | None:
    """What a failed assertion prints."""
    if not isinstance(left, PredictedPeak):
        return None
    return [f"{left!r} {op} {right!r}", *left.changes()]


@functools.total_ordering
@dataclass(frozen=True, eq=False)
class PredictedPeak:
    """What a step needs on its GPU, in bytes. Compares with a number of bytes or a size: `peak < "38GiB"`."""

    prediction: Prediction
    baseline: Prediction | None = None

    @property
    def bytes(self) -> int:
        """With the CUDA context; of a prediction without a GPU, what the allocator reserves."""
        peak = self.prediction.needed
        return peak.reserved if self.prediction.gpu is None else peak.device

    def __eq__(self, other: object) -> bool:
        return self.bytes == _bytes(other)

    def __lt__(self, other: object) -> bool:
        return self.bytes < _bytes(other)

    __hash__ = None  # type: ignore[assignment]

    def __int__(self) -> int:
        return self.bytes

    def __repr__(self) -> str:
        return f"<{format_bytes(self.bytes)} on {self.prediction.gpu_title or 'any GPU'}>"

    def changes(self) -> list[str]:
        """What grew most since the baseline; without one, the lines that hold most."""
        from oomph.report.comparison import comparison_line, line_changes, signed_bytes
        from oomph.report.terminal import file_and_line

        if self.baseline is None:
            lines = self.prediction.by_line()[:_LINES]
            return [
                "largest at the peak:",
                *(f"  {format_bytes(n)}  {file_and_line(site)}" for site, n in lines),
            ]
        found = [one for one in line_changes(self.baseline, self.prediction) if one.bytes > 0][:_LINES]
        rows = [f"  {signed_bytes(one.bytes)}  {one.label}  {one.code}".rstrip() for one in found]
        return [f"since the baseline: {comparison_line(self.baseline.peak, self.prediction.peak)}", *rows]


def _bytes(other: object) -> int:
    if isinstance(other, PredictedPeak):
        return other.bytes
    if isinstance(other, str | int) and not isinstance(other, bool):
        return parse_bytes(other)
    raise TypeError(f"a peak compares with a size such as '38GiB' or a number of bytes, not {other!r}")


@pytest.fixture
def oomph_peak(request: pytest.FixtureRequest) -> Callable[..., PredictedPeak]:
    """`oomph_peak(target, gpu=...)`: as oomph.predict, and the result compares with "38GiB"."""
    calls = 0

    def predict(target: Any, **options: Any) -> PredictedPeak:
        nonlocal calls
        from oomph.prediction import predict
        from oomph.report.as_json import prediction_from_json, prediction_to_json

        calls += 1
        prediction = predict(target, **options)
        name = re.sub(r"[^\w.-]+", "_", f"{request.path.stem}.{request.node.name}.{calls}")
        file = request.path.parent / FOLDER / f"{name}.json"
        if request.config.getoption("--oomph-update"):
            file.parent.mkdir(exist_ok=True)
            found = _relative(prediction_to_json(prediction), request.config.rootpath)
            found["timeline"] = []  # a baseline needs the peak alone
            file.write_text(json.dumps(found, allow_nan=False, indent=1) + "\n")
        baseline = prediction_from_json(json.loads(file.read_text())) if file.exists() else None
        return PredictedPeak(prediction, baseline)

    return predict


def _relative(found: dict[str, Any], root: Path) -> dict[str, Any]:
    """Without the directories of this machine, so that the file is the same on another one."""
    for one in (*found["at_peak"], *found["lines"], *found["notes"], found["peak"]):
        if one.get("file") and Path(one["file"]).is_relative_to(root):
            one["file"] = Path(one["file"]).relative_to(root).as_posix()
    found["seconds"] = 0
    return found
