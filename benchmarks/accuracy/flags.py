"""Flags of Python with which the same program has to have the same prediction.

    python -m benchmarks.accuracy.flags

With -O Python compiles all of torch again where it may not keep what it compiled, which takes a minute: the
tests have -X dev and -W error alone (tests/prediction/test_observation.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from benchmarks import ROOT, SOURCES

FLAGS = ((), ("-O",), ("-X", "dev"), ("-W", "error"), ("-B", "-s", "-u"))


def main() -> int:
    peaks = {}
    for flags in FLAGS:
        words = ["-m", "oomph", "predict", "--json", "--gpu", "h200", "examples/gpt2.py:workload"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(SOURCES)}
        done = subprocess.run(
            [sys.executable, *flags, *words], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        peaks[flags] = json.loads(done.stdout)["peak"] if done.returncode in (0, 1) else done.stderr[-500:]
        print(" ".join(flags) or "(none)", peaks[flags])
    return 0 if all(peak == peaks[()] for peak in peaks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
