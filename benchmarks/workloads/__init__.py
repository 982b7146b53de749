"""Every workload of the accuracy benchmark, by name."""

from __future__ import annotations

from workloads.decoders import DECODERS
from workloads.encoders import ENCODERS
from workloads.entry import Entry
from workloads.first import FIRST
from workloads.functions import FUNCTIONS
from workloads.held_out import HELD_OUT_LIBRARY
from workloads.held_out_plain import HELD_OUT_PLAIN
from workloads.held_out_steps import HELD_OUT_STEPS
from workloads.plain import PLAIN

# Nobody tunes the predictor on these: they say how well it does on programs it has not seen.
HELD_OUT: dict[str, Entry] = {**HELD_OUT_LIBRARY, **HELD_OUT_PLAIN, **HELD_OUT_STEPS}
ALL: dict[str, Entry] = {**FIRST, **DECODERS, **ENCODERS, **PLAIN, **FUNCTIONS, **HELD_OUT}

__all__ = ["ALL", "HELD_OUT", "Entry"]
