"""How many files of oomph a reader of one call has to open: files in which a function runs.

    python -m benchmarks.files_entered

Counts with sys.setprofile, without what runs while our modules are imported: their bodies, and functions that
these call. Processes that the call forks are counted, too: a prediction runs in one.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from transformers import GPT2LMHeadModel  # noqa: F401  # under the profiler, its import takes minutes

import oomph
from benchmarks import CONFIGS, ROOT
from oomph.cli.main import run

PACKAGE = Path(oomph.__file__).parent


class _Stop(BaseException):
    """Ends a run after its first training step."""


def entered(call: Callable[[], Any]) -> list[str]:
    files = [str(path) for path in sorted(PACKAGE.rglob("*.py"))]
    positions = {path: position for position, path in enumerate(files)}
    seen = mmap.mmap(-1, len(files))  # shared with forks

    importing = 0

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal importing
        code = frame.f_code
        if event not in ("call", "return") or code.co_filename not in positions:
            return
        if code.co_name == "<module>":
            importing += 1 if event == "call" else -1
        elif not importing and code.co_flags & 0x2:  # CO_NEWLOCALS: a function
            seen[positions[code.co_filename]] = 1

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            call()
    except _Stop:
        pass
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return [path.removeprefix(f"{PACKAGE}/") for path, entered in zip(files, seen[:], strict=True) if entered]


def predict() -> None:
    run(["predict", str(ROOT / "examples" / "gpt2.py") + ":workload", "--gpu", "rtx3090"])


def cross_entropy() -> None:
    x, weight = torch.randn(4096, 64, requires_grad=True), torch.randn(8192, 64, requires_grad=True)
    oomph.ops.linear_cross_entropy(x, weight, torch.randint(0, 8192, (4096,))).backward()


def first_training_step() -> None:
    from oomph.training.config import load
    from oomph.training.metrics import Callbacks
    from oomph.training.run import train

    class StopAfterOne(Callbacks):
        def on_step(self, *args: Any, **kwargs: Any) -> None:
            raise _Stop

    with tempfile.TemporaryDirectory() as folder:
        config = load(str(CONFIGS / "pythia_tiny.yaml"), [f"output.dir={folder}/run", "training.device=cpu"])
        train(config, callbacks=StopAfterOne())


def main() -> None:
    for call in (predict, cross_entropy, first_training_step):
        files = entered(call)
        print(f"{call.__name__}: {len(files)} files")
        print("  " + " ".join(files))


if __name__ == "__main__":
    main()
