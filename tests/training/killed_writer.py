"""Saves checkpoints in processes that are killed, and looks at what is left. Run as a program by a test.

One process imports torch and forks the others: twenty imports would take longer than all the rest.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from oomph.training.checkpoint import Checkpoints, load

SIZE = 200_000  # numbers: long enough to write that a kill often comes in between


def state_of(step: int) -> dict[str, Any]:
    made = torch.Generator().manual_seed(step)
    weight = torch.randn(SIZE, generator=made)
    return {"model": {"weight": weight, "tied": weight}, "optimizer": {0: weight + 1}, "step": step}


def in_child(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException as problem:
            print(repr(problem), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return pid


def check(checkpoints: Checkpoints) -> int:
    """The step of the newest checkpoint, after making sure that it is exactly what was saved then."""
    found = checkpoints.latest()
    if found is None:
        return 0
    assert not found.skipped, found.skipped
    state, expected = load(found), state_of(found.step)
    assert state["step"] == found.step
    assert torch.equal(state["model"]["weight"], expected["model"]["weight"])
    assert torch.equal(state["optimizer"][0], expected["optimizer"][0])
    return found.step


def at_random_moments(folder: Path, times: int) -> dict[str, Any]:
    said = folder / "said"
    said.mkdir(parents=True)
    found = {"leftovers": 0, "last": 0, "kills": 0}

    def work() -> None:
        checkpoints = Checkpoints(folder, keep=2)
        step = check(checkpoints)
        (said / "resumed").touch()
        while True:
            step += 1
            checkpoints.save(step, state_of(step))
            if step % 2:
                checkpoints.wait()
            (said / str(step if step % 2 else step - 1)).touch()

    for number in range(times):
        pid = in_child(work)
        while not (said / "resumed").exists():
            time.sleep(0.001)
        time.sleep(random.Random(number).uniform(0, 0.12))
        os.kill(pid, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        (said / "resumed").unlink()
        found["kills"] += 1
        found["leftovers"] += len(list(folder.glob(".saving-*")))
        complete = max((int(path.name) for path in said.iterdir()), default=0)
        step = check(Checkpoints(folder))
        assert step >= complete, f"{complete} was complete, {step} is the newest"
        assert step >= found["last"]
        found["last"] = step
    return found


def at_every_call(folder: Path) -> dict[str, Any]:
    """Killed at the first, second, third ... call that touches a file, until the save goes through."""
    newest = []
    for number in range(1, 100):
        here = folder / str(number)
        checkpoints = Checkpoints(here, keep=1)
        checkpoints.save(1, state_of(1))
        checkpoints.close()

        def work(here: Path = here, number: int = number) -> None:
            checkpoints = Checkpoints(here, keep=1, asynchronous=False)
            calls = 0

            def count(event: str, arguments: tuple[Any, ...]) -> None:
                nonlocal calls
                if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"):
                    calls += 1
                    if calls == number:
                        os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(count)
            checkpoints.save(2, state_of(2))

        status = os.waitpid(in_child(work), 0)[1]
        again = Checkpoints(here, keep=1)
        newest.append(check(again))
        assert newest[-1] in (1, 2)
        if not os.WIFSIGNALED(status):
            assert os.WEXITSTATUS(status) == 0
            return {"calls": number - 1, "newest": newest}
        again.save(3, state_of(3))
        again.close()
        assert check(again) == 3
        assert [path.name for path in here.iterdir()] == ["step-00000003"]  # leftovers are gone
    raise AssertionError("the save never went through")


if __name__ == "__main__":
    torch.set_num_threads(1)
    where = Path(sys.argv[1])
    random_moments = at_random_moments(where / "random", 20)
    SIZE = 1000
    print(json.dumps({"random": random_moments, "calls": at_every_call(where / "calls")}))
