from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
from small_prediction import make_prediction

from oomph.records import Prediction


@dataclass
class FakePredict:
    """Stands in for the tracer: remembers what it was given, and gives back what it is told to."""

    result: Prediction = field(default_factory=make_prediction)
    during: Callable[[Any], None] = lambda target: None
    calls: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)

    def __call__(self, target: Any, **options: Any) -> Prediction:
        self.calls.append((target, options))
        self.during(target)
        return self.result


@pytest.fixture
def fake_predict(monkeypatch: pytest.MonkeyPatch) -> FakePredict:
    fake = FakePredict()
    room = sys.modules.get("oomph.prediction")
    if room is None:
        room = ModuleType("oomph.prediction")
        room.__path__ = []  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "oomph.prediction", room)
    monkeypatch.setattr(room, "predict", fake, raising=False)
    return fake


@pytest.fixture
def program(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """Writes train.py in a fresh current directory."""
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "train.py"):
        file = tmp_path / name
        file.write_text(text)
        return file

    return write
