"""Saves checkpoints in forks that are killed, and looks at what is left."""

import os
import signal
import sys

import torch

from oomph_lab.training.checkpoint import Checkpoints, load

SIZE = 1000


def state_of(step):
    made = torch.Generator().manual_seed(step)
    weight = torch.randn(SIZE, generator=made)
    return {"model": {"weight": weight, "tied": weight}, "optimizer": {0: weight + 1}, "step": step}


def in_child(work):
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException as problem:
            print(repr(problem), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return pid


def check(checkpoints):
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


def newest_after_kills(folder):
    """The newest checkpoint after a kill at the first, second, third ... call that touches a file, until the
    save goes through."""
    newest = []
    for number in range(1, 100):
        here = folder / str(number)
        checkpoints = Checkpoints(here, keep=1)
        checkpoints.save(1, state_of(1))
        checkpoints.close()

        def work(here=here, number=number):
            checkpoints = Checkpoints(here, keep=1)
            calls = 0

            def count(event, arguments):
                nonlocal calls
                if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"):
                    calls += 1
                    if calls == number:
                        os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(count)
            checkpoints.save(2, state_of(2))
            checkpoints.wait()

        status = os.waitpid(in_child(work), 0)[1]
        again = Checkpoints(here, keep=1)
        newest.append(check(again))
        assert newest[-1] in (1, 2)
        if not os.WIFSIGNALED(status):
            assert os.WEXITSTATUS(status) == 0
            return newest
        again.save(3, state_of(3))
        again.close()
        assert check(again) == 3
        assert [path.name for path in here.iterdir()] == ["step-00000003"]  # leftovers are gone
    raise AssertionError("the save never went through")
