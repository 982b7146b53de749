"""Every workload of the accuracy benchmark, by name."""

from __future__ import annotations

from workloads.decoders import DECODERS
from workloads.encoders import ENCODERS
from workloads.entry import Entry
from workloads.first import FIRST
from workloads.functions import FUNCTIONS
from workloads.plain import PLAIN

ALL: dict[str, Entry] = {**FIRST, **DECODERS, **ENCODERS, **PLAIN, **FUNCTIONS}

__all__ = ["ALL", "Entry"]
