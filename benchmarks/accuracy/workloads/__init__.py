"""Every workload of the accuracy benchmark, by name."""

from __future__ import annotations

from benchmarks.accuracy.workloads.decoders import DECODERS
from benchmarks.accuracy.workloads.encoders import ENCODERS
from benchmarks.accuracy.workloads.entry import Entry
from benchmarks.accuracy.workloads.first import FIRST
from benchmarks.accuracy.workloads.functions import FUNCTIONS
from benchmarks.accuracy.workloads.held_out import HELD_OUT_LIBRARY
from benchmarks.accuracy.workloads.held_out_plain import HELD_OUT_PLAIN
from benchmarks.accuracy.workloads.held_out_steps import HELD_OUT_STEPS
from benchmarks.accuracy.workloads.plain import PLAIN

# Nobody tunes the predictor on these: they say how well it does on programs it has not seen.
HELD_OUT: dict[str, Entry] = {**HELD_OUT_LIBRARY, **HELD_OUT_PLAIN, **HELD_OUT_STEPS}
ALL: dict[str, Entry] = {**FIRST, **DECODERS, **ENCODERS, **PLAIN, **FUNCTIONS, **HELD_OUT}

__all__ = ["ALL", "HELD_OUT", "Entry"]
