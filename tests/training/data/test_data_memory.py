"""Memory does not grow with the data: a file of 64 MiB and one of 1 GiB, read in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from oomph.units import GiB, MiB

READ = """
import json, os, resource, sys, time
from oomph.training.data import DataSettings, Schedule, Stage, open_data

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

source, folder = sys.argv[1:]
open_data(DataSettings("stdlib", Schedule((Stage(2048, 4),)), tokenizer="bytes"), folder + "/warm")
before = resident()
start = time.process_time()
data = open_data(DataSettings(source, Schedule((Stage(2048, 4),)), tokenizer="bytes"), folder)
opening = time.process_time() - start
numbers = set()
for _ in range(400):
    batch = next(data.train)
    for row in batch["input_ids"][:1]:
        lines = data.tokenizer.decode(row.tolist()).split("\\n")[1:-1]
        numbers.update(int(line[:9]) for line in lines)
state = data.train.state_dict()
start = time.process_time()
data.train.load_state_dict(state)
next(data.train)
print(json.dumps({"grown": resident() - before, "opening": opening, "resuming": time.process_time() - start,
                  "first": min(numbers), "last": max(numbers), "blocks": state["identity"]["blocks"]}))
"""


def written(path: Path, size: int) -> int:
    """Lines of 512 bytes, each with its number; written by the MiB. The number of lines."""
    lines = size // 512
    step = MiB // 512
    rest = (" the quick brown fox jumps over the lazy dog" * 12)[:502]
    with path.open("w", encoding="ascii") as file:
        for first in range(0, lines, step):
            file.write("".join([f"{number:09d}{rest}\n" for number in range(first, first + step)]))
    return lines


@pytest.fixture
def large(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "large.txt"
    yield path
    path.unlink(missing_ok=True)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the resident size from /proc")
def test_a_file_of_a_gibibyte_takes_no_more_memory_than_one_of_64_mebibytes(
    large: Path, tmp_path: Path
) -> None:
    found = {}
    for size in (64 * MiB, GiB):
        lines = written(large, size)
        assert large.stat().st_size == size
        command = [sys.executable, "-c", READ, str(large), str(tmp_path / str(size))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        found[size] = json.loads(done.stdout)
        # Batches come from all over the file, although only 3 MiB of it were asked for.
        assert found[size]["last"] - found[size]["first"] > lines / 4
        assert found[size]["grown"] < 48 * MiB
        assert found[size]["opening"] < 2
        assert found[size]["resuming"] < 2
    assert found[GiB]["blocks"] == 1024
    assert found[GiB]["grown"] < found[64 * MiB]["grown"] + 16 * MiB
