"""Scripts that measure oomph, run from the root of a checkout: `python -m benchmarks.NAME`; see README.md."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"  # committed rows
CONFIGS = ROOT / "configs"
