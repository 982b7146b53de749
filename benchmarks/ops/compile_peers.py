"""Compiles what fla's autotuners try, in many processes at once; ops.py then finds it in Triton's cache.

    python -m benchmarks.ops.compile_peers [WORKERS]     # on a GPU, before `ops.py kda`

Its kernels for KDA come in some 150 configurations for each number and size of heads, and one process would
compile them one after the other, for minutes. Nothing is chosen here: the tuning itself is left to the run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import zlib
from typing import Any

TOKENS = 256  # enough for every kernel; no kernel depends on their number


def main(workers: int) -> int:
    began = time.perf_counter()
    # A tuner that keeps its result would keep one of a tuning that never was.
    environment = {**os.environ, "FLA_CACHE_RESULTS": "0"}
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.ops.compile_peers", str(workers), str(index)],
            env=environment,
            stdout=None if index == 0 else subprocess.DEVNULL,
            stderr=None if index == 0 else subprocess.DEVNULL,
        )
        for index in range(workers)
    ]
    failed = sum(process.wait() != 0 for process in running)
    print(f"{workers} processes, {failed} failed: {time.perf_counter() - began:.0f} s", flush=True)
    return 1 if failed else 0


def compile_share(index: int, workers: int) -> None:
    """Walks through fla's forward and backward at every shape, compiling every `workers`-th configuration."""
    import torch

    from benchmarks.ops import kda as op_kda
    from benchmarks.ops.peers import Peer
    from benchmarks.ops.runs import step_of

    _compile_instead_of_tuning(index, workers)
    done = set()
    for case_shape in (*op_kda.TABLE, *op_kda.HELD_OUT, *op_kda.SWEEP):
        b, _, h, d = case_shape
        for contender in op_kda.contenders(case_shape, [Peer("fla")]):
            if contender.ours or (b, h, d, contender.name) in done:
                continue
            done.add((b, h, d, contender.name))
            made = op_kda.inputs((b, TOKENS, h, d), torch.bfloat16, torch.device("cuda"))
            began = time.perf_counter()
            try:
                step_of(contender, made)()
                torch.cuda.synchronize()
            except Exception as error:  # the run will say so as well
                print(f"{contender.name} {case_shape}: {error}", flush=True)
            print(f"{contender.name} {case_shape}: {time.perf_counter() - began:.0f} s", flush=True)


def _compile_instead_of_tuning(index: int, workers: int) -> None:
    from triton.runtime.autotuner import Autotuner

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        """No kernel runs: what comes after it meets arbitrary numbers, which nobody looks at."""
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        start = zlib.crc32(self.base_fn.__name__.encode())
        for number, config in enumerate(self.prune_configs(kwargs), start):
            if number % workers == index:
                try:
                    self.fn.run(*args, **{**kwargs, **config.all_kwargs(), "warmup": True})
                except Exception as error:  # too much shared memory, say: the tuner passes over it, too
                    print(f"  {self.base_fn.__name__} {config}: {type(error).__name__}", flush=True)
        self.nargs = None

    Autotuner.run = run


if __name__ == "__main__":
    if len(sys.argv) == 3:
        compile_share(int(sys.argv[2]), int(sys.argv[1]))
        sys.exit()
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else max(1, (os.cpu_count() or 2) - 2)))
