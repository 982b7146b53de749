"""A predicted program sees a file system that behaves as a real one; files and memory of the caller stay."""

import io
import mmap
import multiprocessing
import os
import sqlite3
import tempfile
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.overlay.fuzz import compare

import oomph
from oomph.errors import UserError


def test_random_operations_do_what_they_do_in_a_real_folder(tmp_path, request):
    first = request.config.getoption("--overlay-seed")
    assert compare([*range(first, first + 12)], 40, str(tmp_path)) == []


def test_memory_that_the_caller_shares_stays(tmp_path):
    for name in ("map", "torch"):
        np.zeros(50, "f4").tofile(tmp_path / name)
    mapped = np.memmap(tmp_path / "map", "f4", "r+")
    from_file = torch.from_file(str(tmp_path / "torch"), shared=True, size=50)
    anonymous = mmap.mmap(-1, 8192)
    tensor = torch.zeros(64).share_memory_()
    large = torch.zeros(20 * 2**20).share_memory_()  # copied by page
    array, lock = multiprocessing.Array("i", 4), multiprocessing.Lock()
    shared = SharedMemory(create=True, size=64)

    def program():
        for values in (mapped, from_file.numpy(), tensor.numpy(), large.numpy()):
            values[:] = 1
        mapped.flush()
        anonymous[:3] = shared.buf[:3] = b"xyz"
        array[0] = 7
        lock.acquire()
        child = multiprocessing.get_context("fork").Process(target=array.__setitem__, args=(1, 8))
        child.start()
        child.join()
        assert array[:2] == [7, 8]  # processes of the program share it
        again = SharedMemory(shared.name)
        again.buf[3:6] = b"xyz"
        again.close()
        again.unlink()
        torch.empty(4, device="cuda")

    with tempfile.TemporaryFile(dir=tmp_path) as unnamed:
        oomph.predict(lambda: (unnamed.write(b"x"), unnamed.flush(), program()))
        assert os.fstat(unnamed.fileno()).st_size == 0
    try:
        sums = [float(each.sum()) for each in (mapped, from_file, tensor, large)]
        assert sums == [0, 0, 0, 0]
        assert anonymous[:3] == bytes(3)
        assert bytes(shared.buf[:6]) == bytes(6)
        assert array[:2] == [0, 0]
        assert lock.acquire(block=False)
        assert not np.fromfile(tmp_path / "map", "f4").any()
    finally:
        shared.close()
        shared.unlink()


def test_c_code_that_writes_paths_of_the_program_is_redirected(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.zeros(50, "f4").tofile("values")
    with sqlite3.connect("log.db") as database:
        database.execute("create table t (x)")
    database.close()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def program():
        model = torch.nn.Linear(4, 4, device="cuda")
        torch.jit.save(torch.jit.script(model), "model.pt")
        torch.jit.script(model).save("again.pt")
        assert torch.jit.load("model.pt").weight.shape == (4, 4)
        values = torch.from_file("values", shared=True, size=50)
        values.numpy()[:] = 1
        assert np.fromfile("values", "f4").sum() == 50
        for connect in (
            lambda: sqlite3.connect("file:log.db?mode=rw", uri=True),
            lambda: sqlite3.Connection("log.db"),
        ):
            connection = connect()
            connection.execute("insert into t values (1)")
            connection.commit()
            connection.close()
        memory = sqlite3.connect(":memory:")
        memory.execute("attach 'log.db' as other")
        assert memory.execute("select count(*) from other.t").fetchone() == (2,)
        memory.close()

    oomph.predict(program)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_file_objects_are_what_they_are_outside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def describe():
        with open(Path("a"), "w") as file, open("a", "rb", 0) as raw:
            found = [file.name, type(file.name), isinstance(raw, io.FileIO)]
        return [*found, type(open) is type(print), type(os.stat) is type(print), repr(open), open.__module__]

    expected = describe()

    def program():
        assert describe() == expected

        with io.FileIO("a", "w") as file:
            file.write(b"abc")
        assert Path("a").read_text() == "abc"
        torch.empty(4, device="cuda")

    oomph.predict(program)
    assert Path("a").read_text() == ""


def test_a_full_disk_is_ours():
    def program():
        torch.empty(4, device="cuda")
        with open("/dev/full", "wb") as file:
            file.write(b"x")

    with pytest.raises(UserError, match=rf"{tempfile.gettempdir()}.*TMPDIR"):
        oomph.predict(program)
