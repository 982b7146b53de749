"""How long the first answer for a model's name takes, from the shell with all imports, and what it says.

python -m benchmarks.models [CASE ...] [--out F]     # results/models.csv

`seconds` pass on the clock; where other programs use the cores too, `cpu_seconds` tell more. `host_mib` is
that of the largest process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from benchmarks import RESULTS
from benchmarks.rows import revision, stored, write

# Name: the model, the method ("" is the ladder of all), and the seconds that it may take on two idle cores.
CASES: dict[str, tuple[str, str, float]] = {
    "8b-qlora": ("Qwen/Qwen3-8B", "qlora", 15),
    "8b-lora": ("Qwen/Qwen3-8B", "lora", 15),
    "70b-qlora": ("meta-llama/Llama-3.1-70B", "qlora", 45),
    "moe-lora": ("mistralai/Mixtral-8x7B-v0.1", "lora", 45),
    "8b-ladder": ("Qwen/Qwen3-8B", "", 90),
}
_GPU, _LENGTH = "rtx4090", 4096
_LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes", "accelerate")


@dataclass(frozen=True)
class Row:
    case: str
    model: str
    method: str
    gpu: str
    length: int
    peak: int | None  # bytes on the device; of one method
    fits: str  # the methods that do
    threshold_seconds: float
    seconds: float
    cpu_seconds: float
    host_mib: int
    load: float  # of the machine when it began, in processes
    versions: str


def measured(case: str) -> Row:
    model, method, threshold = CASES[case]
    words = ["predict", model, "--method", method] if method else ["fit", model]
    words += ["--gpu", _GPU, "--length", str(_LENGTH), "--json"]
    load, began = os.getloadavg()[0], time.perf_counter()
    run = subprocess.Popen([sys.executable, "-m", "oomph", *words], stdout=subprocess.PIPE)
    assert run.stdout is not None
    output = run.stdout.read()
    _, status, usage = os.wait4(run.pid, 0)
    seconds = time.perf_counter() - began
    if os.waitstatus_to_exitcode(status) not in (0, 1):
        sys.exit(f"{case}: oomph {' '.join(words)} failed")
    found = json.loads(output)
    rungs = found.get("methods", [{**found, "method": method}])
    return Row(
        case=case,
        model=model,
        method=method or "all",
        gpu=_GPU,
        length=_LENGTH,
        peak=found["peak"]["device"] if method else None,
        fits=" ".join(rung["method"] for rung in rungs if rung["fits"]),
        threshold_seconds=threshold,
        seconds=round(seconds, 1),
        cpu_seconds=round(usage.ru_utime + usage.ru_stime, 1),
        host_mib=usage.ru_maxrss // 1024,
        load=round(load, 1),
        versions=" ".join(f"{name} {metadata.version(name)}" for name in _LIBRARIES),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--out", type=Path, default=RESULTS / "models.csv")
    given = parser.parse_args()
    for case in given.cases or CASES:
        row = {**asdict(measured(case)), **revision()}
        print(json.dumps(row), flush=True)
        write(given.out, [*(each for each in stored(given.out) if each["case"] != case), row])


if __name__ == "__main__":
    main()
