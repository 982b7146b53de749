"""Scripts that measure oomph, run from the root of a checkout: `python -m benchmarks.NAME`; see README.md."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (str(ROOT / "src"), str(ROOT / "lab" / "src"), str(ROOT))  # for the path of other processes
RESULTS = ROOT / "benchmarks" / "results"  # committed rows
