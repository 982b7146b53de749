from __future__ import annotations

from pathlib import Path

import pytest

from oomph.records import Site
from oomph.report.paths import place, short_path

HERE = Path("/home/ada/project")


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("/home/ada/project/loss.py", "loss.py"),
        ("/home/ada/project/models/gpt.py", "models/gpt.py"),
        ("/env/lib/python3.11/site-packages/transformers/gpt2.py", "transformers/gpt2.py"),
        ("/usr/lib/python3/dist-packages/yaml/x.py", "yaml/x.py"),
        ("/home/ada/project/.venv/lib/site-packages/torchvision/resnet.py", "torchvision/resnet.py"),
        ("/data/a/b/c/train.py", ".../b/c/train.py"),
        ("/data/train.py", "/data/train.py"),
        ("relative/train.py", "relative/train.py"),
        ("<stdin>", "<stdin>"),
    ],
)
def test_paths_are_shown_by_their_telling_part(file, expected):
    assert short_path(file, HERE) == expected


def test_a_place_is_file_and_line():
    assert place(Site("/home/ada/project/loss.py", 41, "f"), HERE) == "loss.py:41"
