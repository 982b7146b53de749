"""Scripts that measure the lab, run from the root of a checkout: see README.md of the other benchmarks."""

from pathlib import Path

from oomph_lab.training.config import CONFIGS as CONFIGS

RESULTS = Path(__file__).resolve().parent / "results"  # committed rows
