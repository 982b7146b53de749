"""Fixtures for tests of commands, here and in the lab."""

import json
import os
import pty
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from small_prediction import make_prediction

from oomph.cli.main import main
from oomph.records import Note, Prediction


@dataclass
class FakePredict:
    """Replaces the tracer in the child process: returns `result`, with its arguments as a note."""

    result: Prediction = field(default_factory=make_prediction)
    during: Callable[[Any], None] = lambda target: None

    def __call__(self, target, **options):
        self.during(target)
        arguments = {
            "name": getattr(target, "__name__", None),
            "sizes": getattr(target, "sizes", None),
            "fixes": [use.fix for use in getattr(target, "fixes", ())],
            "gpu": options.get("gpu"),
            "max": options.get("max"),
        }
        return replace(self.result, notes=(Note(json.dumps(arguments, default=str)),))

    @staticmethod
    def arguments(output):
        """The arguments of the call, from the output of `oomph predict --json`."""
        *_, note = json.loads(output)["notes"]  # after those on fixes
        return json.loads(note["text"])


@pytest.fixture
def fake_predict(monkeypatch):
    fake = FakePredict()
    monkeypatch.setattr("oomph.prediction.predict", fake)
    return fake


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Writes train.py in a fresh current directory."""
    monkeypatch.chdir(tmp_path)

    def write(text, name="train.py"):
        file = tmp_path / name
        file.write_text(text)
        return file

    return write


@pytest.fixture
def on_terminal():
    """Starts `oomph WORDS` on a terminal of its own: its process, and our side of the terminal.

    It is a fork, which has imported everything.
    """

    def start(words):
        with warnings.catch_warnings(action="ignore"):  # of threads beside a fork
            process, terminal = pty.fork()
        if process == 0:
            try:
                sys.stdin, sys.stdout, sys.stderr = map(os.fdopen, range(3), "rww")
                sys.argv = ["oomph", *words]
                main()
            except SystemExit as end:
                os._exit(end.code)
            finally:
                os._exit(1)
        return process, terminal

    return start
