"""Hugging Face's Qwen3-4B (SDPA, checkpointing, AdamW in bf16): its longest context in 80 and in 23 GiB.

python -m lab.benchmarks.training.longctx_peer [OUT.csv]     # on a GPU: results/longctx_peer_<gpu>.csv

Contexts grow until one does not fit; ours of the same shape is measured at the first one. In 23 GiB none
fits: weights, gradients and AdamW's averages are 30 GiB.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch
from benchmarks import rows

import oomph
from lab.benchmarks import RESULTS
from lab.benchmarks.systems.entries import language
from lab.benchmarks.systems.races import checkpointed, qwen3
from oomph_lab.systems import longctx

SIZE = longctx.PRESETS["qwen3-4B"]
THEIRS, OURS = "Qwen3-4B of Hugging Face", "longctx qwen3-4B"
FIRST, STEP = 20_480, 4096  # tokens: one that fits in 80 GiB, and how much longer the next is


def workload(who: str, tokens: int) -> oomph.Workload:
    build: Callable[[], torch.nn.Module] = SIZE.build if who == OURS else lambda: qwen3(SIZE, tokens)
    return language(checkpointed(build), SIZE.vocab_size, 1, tokens, dtype="bfloat16")


def measured(who: str, gib: int, tokens: int) -> dict[str, Any]:
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, gib * 2**30 / total))
    row: dict[str, Any] = {
        "who": who,
        "limit_gib": gib,
        "tokens": tokens,
        "fits": False,
        "tokens_per_second": None,
        "measured_mib": None,
        "reserved_mib": None,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    try:
        found = oomph.measure(workload(who, tokens), steps=3)
    except torch.OutOfMemoryError:
        return row
    return row | {
        "fits": True,
        "tokens_per_second": round(tokens / found.seconds_per_step, 1),
        "measured_mib": round(found.peak.allocated / 2**20, 1),
        "reserved_mib": round(found.peak.reserved / 2**20, 1),
    }


def found() -> Iterator[dict[str, Any]]:
    yield in_process(THEIRS, 23, 512)
    yield in_process(OURS, 80, FIRST)
    for tokens in count(FIRST, STEP):
        row = in_process(THEIRS, 80, tokens)
        yield row
        if not row["fits"]:
            return


def in_process(who: str, gib: int, tokens: int) -> dict[str, Any]:
    """What one leaves behind, above all when it did not fit, must not count against the next."""
    return rows.in_process("lab.benchmarks.training.longctx_peer", "--one", who, str(gib), str(tokens))


def main() -> int:
    if sys.argv[1:2] == ["--one"]:
        who, gib, tokens = sys.argv[2:]
        rows.send(measured(who, int(gib), int(tokens)))
        return 0
    rows.need_gpu()
    name = f"longctx_peer_{rows.short_name(torch.cuda.get_device_name())}.csv"
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS / name
    done = []
    for row in found():
        done.append(row)
        print(row, flush=True)
        rows.write(out, done)
    return 0


if __name__ == "__main__":
    sys.exit(main())
