"""Two processes on the CPU for the tests of several ranks, started once: that is what takes the time."""

from __future__ import annotations

import pickle
import socket
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

RANKS = 2
Work = Callable[[int], None]


def _joined(rank: int, port: int, works: Sequence[Work], folder: Path) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    # Where one rank has failed, the other waits for it no longer than this.
    options = {"rank": rank, "world_size": RANKS, "timeout": timedelta(seconds=10)}
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", **options)
    failures = {}
    for work in works:
        try:
            work(rank)
        except Exception:
            failures[work.__name__] = f"rank {rank}: {traceback.format_exc()}"
    (folder / f"rank{rank}").write_bytes(pickle.dumps(failures))
    dist.destroy_process_group()


def failures_of(works: Sequence[Work], folder: Path) -> dict[str, str]:
    """Run every `work(rank)` on both ranks; what failed, by the name of the function."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_joined, args=(port, list(works), folder), nprocs=RANKS)
    found: dict[str, str] = {}
    for rank in range(RANKS):
        for name, text in pickle.loads((folder / f"rank{rank}").read_bytes()).items():
            found[name] = found.get(name, "") + text
    return found
