"""Shared by every test: what is marked `gpu` is skipped, by name, where there is no CUDA device; and signals
that stop a run are heard, also where the tests themselves were started in the background."""

import contextlib
import gc
import importlib
import multiprocessing
import os
import signal
import socket
import sys
import warnings

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tensors this small take longer with more; before torch
os.environ.setdefault("OOMPH_CUDNN", "0")  # predictions are the same with every build of torch

# With `-n 2`, this process only starts others, which run the tests: they do not wait until it has torch.
STARTS_OTHERS = "-n" in sys.argv[:-1] and sys.argv[sys.argv.index("-n") + 1] != "0"
if "PYTEST_XDIST_WORKER" in os.environ or not STARTS_OTHERS:
    import torch

    from oomph.prediction import isolation

if "torch" in globals() and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # for all tests alike, and before Triton is imported
gc.disable()  # while tests are collected: imports make a million objects, and none of them is garbage


def pytest_collection_finish():
    gc.freeze()  # nor need the collections of the tests look at them
    gc.set_threshold(20_000)  # not 700: cycles are few
    gc.enable()


@pytest.hookimpl(trylast=True)  # after the fixtures
def pytest_runtest_teardown(item, nextitem):
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()  # nor at what the tests of a file have imported


def pytest_unconfigure():
    gc.unfreeze()  # otherwise the interpreter ends modules before objects that use them


def pytest_addoption(parser):
    parser.addoption(
        "--overlay-seed", type=int, default=0, help="the first of the overlay's random sequences"
    )


def pytest_configure():
    """nohup, and a shell for what it starts with &, leave signals ignored, which all below them inherit."""
    for number, heard in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, heard)
    if "torch" in globals() and not torch.cuda.is_available():
        # Autograd starts threads for the devices of the first backward pass, after which no fork can run one.
        # Inside a FakeTensorMode, as some tests begin, there would be a device.
        torch.zeros((), requires_grad=True).backward()


def pytest_collection_modifyitems(items):
    # Two workers end at about the same time if the longest test, which compiles for a minute where nothing is
    # cached, comes first, and the files of ops, none of which takes long, come last.
    items.sort(key=lambda item: (item.path.stem != "test_kernels_compile", "ops" in item.path.parts))
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)


def _free_ports(count):
    """The first of free ports in a row, below those that connections get."""
    for first in range(20000 + os.getpid() % 100 * 100, 32000, count):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("0.0.0.0", port))
            return first
    raise AssertionError("no free ports")


@pytest.fixture
def run_ranks():
    """Calls `function(rank, port, *args)` in a process for each rank.

    The processes are forks, which have imported everything; beside a GPU, torch refuses backward passes in
    them, and they are forks of a server that has only imported torch.
    """
    method = "forkserver" if torch.cuda.is_available() else "fork"
    modules = ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "oomph.ops"]
    multiprocessing.get_context("forkserver").set_forkserver_preload(modules)
    if method == "fork":
        for name in modules:
            importlib.import_module(name)

    def run(function, ranks, *args):
        assert not torch.distributed.is_initialized(), "a test has left its process group"
        port = _free_ports(32)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # errors here, and not in a new process
            torch.multiprocessing.start_processes(function, (port, *args), ranks, start_method=method)

    return run


@pytest.fixture
def in_process(monkeypatch):
    """Predictions run in the test's own process: a child for each takes several times as long.

    For tests of what is traced. There are then no second attempts and no intervals, and scripts do not end.
    """
    monkeypatch.setattr(isolation, "_inside", True)
    yield
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
