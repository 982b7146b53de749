"""Checkpoints: what is saved comes back bit for bit; which ones stay; what a failed save leaves."""

from __future__ import annotations

import json
import math
import os
import random
import resource
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from oomph.errors import ArgumentError, UserError
from oomph.fixes.optimizers.low_bit import to_low_bit
from oomph.training import checkpoint
from oomph.training.checkpoint import CheckpointError, Checkpoints, find, load
from oomph.training.checkpoint_state import rng_state, set_rng_state

DTYPES = [
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e8m0fnu),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32),
    *(torch.uint64, torch.bool),
]
STATE = {"x": torch.arange(1000)}


def save_and_load(folder: Path, state: dict[str, Any], asynchronous: bool = True) -> dict[str, Any]:
    checkpoints = Checkpoints(folder, asynchronous=asynchronous)
    checkpoints.save(1, state)
    checkpoints.close()
    return load(find(folder))


def same_bits(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(
        *(t.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8) for t in (one, other))
    )


def random_bits(dtype: torch.dtype, *shape: int) -> Tensor:
    size = math.prod(shape) * dtype.itemsize
    high = 2 if dtype is torch.bool else 256
    return torch.randint(high, (size,), dtype=torch.uint8).view(dtype).view(shape)


# ------------------------------------------------------------------------------------- round trip


@pytest.mark.parametrize("asynchronous", [True, False])
def test_tensors_of_every_dtype_and_layout_come_back_bit_for_bit(tmp_path: Path, asynchronous: bool) -> None:
    state = {}
    for dtype in DTYPES:
        state[str(dtype)] = {
            "matrix": random_bits(dtype, 5, 7),
            "scalar": random_bits(dtype),
            "empty": random_bits(dtype, 0, 3),
            "transposed": random_bits(dtype, 5, 7).t(),
            "every other": random_bits(dtype, 10, 6)[::2, 1::3],
            "expanded": random_bits(dtype, 1, 4).expand(3, 4),
        }
    matrix = state["torch.complex64"]["matrix"]
    state["complex"] = {"conjugate": matrix.conj(), "negative": matrix.conj().imag}
    found = save_and_load(tmp_path, state, asynchronous)
    for dtype_name, tensors in state.items():
        assert list(found[dtype_name]) == list(tensors)
        for name, tensor in tensors.items():
            assert same_bits(found[dtype_name][name], tensor), (dtype_name, name)


def test_plain_data_comes_back_with_its_types(tmp_path: Path) -> None:
    state = {
        "none": None,
        "flags": [True, False],
        "numbers": (1, -(2**80), 0.1, 1e-300, math.inf, -math.inf, -0.0),
        "text": 'a "quoted" line\nand ü',
        "nested": {"$tensor": "not a tensor", 3: {"x": []}, "empty": {}},
        "dtype": torch.bfloat16,
        "numpy": np.float64(0.5),
    }
    found = save_and_load(tmp_path, state)
    assert found == state
    assert [type(item) for item in found["numbers"]] == [int, int, float, float, float, float, float]
    assert math.isnan(save_and_load(tmp_path, {"loss": math.nan})["loss"])
    assert save_and_load(tmp_path / "a" / "b", {}) == {}


def test_tensors_in_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_FILE_BYTES", 100)
    state = {"model": {f"layer.{number}": torch.full((10,), number) for number in range(4)}}
    found = save_and_load(tmp_path, state)
    assert len(list((tmp_path / "step-00000001").glob("*.safetensors"))) == 4
    assert all(torch.equal(found["model"][name], tensor) for name, tensor in state["model"].items())


def test_tied_tensors_are_written_once_and_share_memory_again(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.randn(1000))
    found = save_and_load(tmp_path, {"model": {"embedding": weight, "head": weight}, "slice": weight[:10]})
    assert found["model"]["embedding"] is found["model"]["head"]
    assert torch.equal(found["slice"], weight[:10])
    assert find(tmp_path).size < 2 * 4000


def test_a_dense_layout_comes_back_because_8_bit_state_is_quantized_by_blocks(tmp_path: Path) -> None:
    tensor = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    found = save_and_load(tmp_path, {"x": tensor})["x"]
    assert found.stride() == tensor.stride()
    assert torch.equal(found, tensor)


def test_training_resumes_bit_for_bit_with_the_8_bit_optimizer(tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(80, 80), nn.GELU(), nn.Linear(80, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return model, to_low_bit(
            optimizer, fix="optimizer_8bit", state_format="8bit", stochastic=False, sgd=False
        )

    def steps(model: nn.Module, optimizer: Any, numbers: range) -> None:
        for number in numbers:
            x = torch.randn(4, 80, generator=torch.Generator().manual_seed(number))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = build()
    steps(model, optimizer, range(3))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    assert any(t.dtype is torch.uint8 for t in state["optimizer"]["state"][0].values() if t is not None)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, state)
    steps(model, optimizer, range(3, 6))
    checkpoints.close()

    again, other = build()
    found = load(find(tmp_path), into={"model": again.state_dict()})
    other.load_state_dict(found["optimizer"])
    steps(again, other, range(3, 6))
    for one, two in zip(model.parameters(), again.parameters(), strict=True):
        assert same_bits(one.detach(), two.detach())


def test_torchao_optimizer_state_comes_back_as_it_was(tmp_path: Path) -> None:
    module = pytest.importorskip("torchao.optim.subclass_8bit")
    codes = torch.randint(256, (4, 256), dtype=torch.uint8)
    state = module.OptimState8bit(codes, torch.rand(4), torch.rand(256), True, torch.float32)
    found = save_and_load(tmp_path, {"state": {0: {"exp_avg": state}}})["state"][0]["exp_avg"]
    assert type(found) is type(state)
    assert (found.signed, found.dtype, found.shape) == (True, torch.float32, state.shape)
    for name in ("codes", "scale", "qmap"):
        assert torch.equal(getattr(found, name), getattr(state, name))


def test_what_is_saved_is_the_state_at_the_time_of_the_call(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    state: dict[str, Any] = {"x": torch.zeros(2_000_000), "list": [1]}
    checkpoints.save(1, state)
    state["x"].fill_(7)
    state["list"].append(2)
    checkpoints.close()
    found = load(find(tmp_path))
    assert found["x"].count_nonzero() == 0
    assert found["list"] == [1]


def test_loading_into_a_state_fills_its_own_tensors(tmp_path: Path) -> None:
    shared = torch.randn(4)
    complex_ = torch.randn(2, dtype=torch.complex128)
    save_and_load(tmp_path, {"model": {"a": shared, "b": shared, "c": complex_}, "step": 3})
    # Separate here, although they shared memory when saved; and one of them strided.
    own = {
        "a": nn.Parameter(torch.zeros(4)),
        "b": torch.zeros(8)[::2],
        "c": torch.zeros(4, dtype=torch.complex128)[::2],
    }
    found = load(find(tmp_path), into={"model": own})
    assert found["model"]["a"] is own["a"]
    assert torch.equal(own["a"], shared)
    assert torch.equal(own["b"], shared)
    assert torch.equal(own["c"], complex_)
    assert found["step"] == 3


def test_every_random_number_generator_continues_where_it_was(tmp_path: Path) -> None:
    def draw() -> list[Any]:
        return [
            *(random.random(), random.gauss(0, 1)),
            *(torch.rand(3).tolist(), torch.randn(17).tolist()),
            *(np.random.rand(), np.random.randn()),
        ]

    random.gauss(0, 1)  # leaves a second number waiting, which is part of the state
    np.random.randn()
    state = rng_state()
    json.dumps(state)  # plain data
    expected = draw()
    draw()
    set_rng_state(save_and_load(tmp_path, {"rng": state})["rng"])
    assert draw() == expected
    with pytest.raises(UserError, match="random number state"):
        set_rng_state({"python": [1, [], None]})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), "cannot save a.0: it is a object; a checkpoint holds tensors"),
        ({1, 2}, "cannot save a.0: it is a set"),
        (torch.ones(2, device="meta"), "cannot save a.0: it is on the meta device"),
        (torch.eye(2).to_sparse(), "cannot save a.0: it is torch.sparse_coo"),
        ({(1, 2): 3}, "cannot save a.0: its keys"),
    ],
)
def test_what_cannot_be_saved_is_named(tmp_path: Path, value: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Checkpoints(tmp_path).save(1, {"a": [value]})
    assert list(tmp_path.iterdir()) == []


def test_bad_arguments(tmp_path: Path) -> None:
    recursive: dict[str, Any] = {}
    recursive["self"] = recursive
    with pytest.raises(UserError, match="contains itself"):
        Checkpoints(tmp_path).save(1, recursive)
    for step in (-1, True, 1.0, "1"):
        with pytest.raises(ArgumentError, match="number of steps done"):
            Checkpoints(tmp_path).save(step, {})  # type: ignore[arg-type]
    for keep in (0, -1, True, "3"):
        with pytest.raises(ArgumentError, match="number of checkpoints to keep"):
            Checkpoints(tmp_path, keep=keep)  # type: ignore[arg-type]
    (tmp_path / "x").write_text("")
    with pytest.raises(UserError, match="x is a file; checkpoints need a folder"):
        Checkpoints(tmp_path / "x")
    with pytest.raises(UserError, match="cannot make the folder"):
        Checkpoints(tmp_path / "x" / "y").save(1, {})
    assert Checkpoints(tmp_path / "none").latest() is None


# --------------------------------------------------------------------------------------- rotation


def save(checkpoints: Checkpoints, *steps: int) -> None:
    for step in steps:
        checkpoints.save(step, {"x": torch.full((3,), float(step))})
    checkpoints.wait()


def corrupt(folder: Path, step: int) -> Path:
    (file,) = (folder / f"step-{step:08d}").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    return file


def steps_of(checkpoints: Checkpoints) -> list[int]:
    return [saved.step for saved in checkpoints.all()]


def test_the_newest_few_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, 10, 9, 20, 100_000_000)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000020", "step-100000000"]
    latest = checkpoints.latest()
    assert latest is not None
    assert latest.step == 100_000_000
    assert not latest.skipped
    assert find(str(tmp_path / "step-00000020")).step == 20
    going_back = Checkpoints(tmp_path, keep=1)
    save(going_back, 5)  # the one just saved is never the one deleted
    assert steps_of(going_back) == [5]


def test_a_step_saved_again_replaces_the_first(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=3)
    save(checkpoints, 1, 2)
    for number in (7.0, 8.0):
        checkpoints.save(2, {"x": torch.tensor(number)})
    checkpoints.wait()
    assert steps_of(checkpoints) == [1, 2]
    assert load(find(tmp_path))["x"] == 8.0


def test_corrupt_newer_checkpoints_are_skipped_and_named(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1, 2, 3)
    file = corrupt(tmp_path, 3)
    (tmp_path / "step-00000002" / "manifest.json").write_text("{")
    latest = checkpoints.latest()
    assert latest is not None
    assert latest.step == 1
    first, second = latest.skipped.values()
    assert first == f"{file} is corrupt: its contents do not match their hash"
    assert "manifest.json is corrupt" in second


def test_only_corrupt_ones_are_an_error_and_not_a_fresh_start(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1, 2)
    corrupt(tmp_path, 1)
    corrupt(tmp_path, 2)
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*step-00000002.*\(and 1 older\)"):
        checkpoints.latest()


def test_rotation_does_not_count_corrupt_checkpoints(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, 1, 2)
    (tmp_path / "step-00000002" / "state.json").unlink()
    save(checkpoints, 3)
    assert steps_of(checkpoints) == [1, 3]
    corrupt(tmp_path, 3)
    assert checkpoints.latest().step == 1  # type: ignore[union-attr]
    save(checkpoints, 4, 5)
    assert steps_of(checkpoints) == [3, 4, 5]
    save(checkpoints, 3)
    assert load(find(tmp_path / "step-00000003-2"))["x"].tolist() == [3, 3, 3]


def test_leftovers_of_a_killed_save_are_removed_by_the_next(tmp_path: Path) -> None:
    for name in (".saving-step-00000001", ".deleting-step-00000001", "notes.1"):
        (tmp_path / name).mkdir()
    save(Checkpoints(tmp_path), 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.1", "step-00000002"]


def test_a_half_deleted_folder_is_not_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    save(checkpoints, 1)

    def fails(path: Any, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr("shutil.rmtree", fails)
    checkpoints.save(2, {})
    with pytest.raises(UserError, match=r"step 2 is saved, but an older checkpoint .* Input/output error"):
        checkpoints.wait()
    assert steps_of(checkpoints) == [2]


# --------------------------------------------------------------------------------------- failures


def fsync_fails(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def fails(*_: Any) -> Any:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fails)


def test_a_full_disk_is_found_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=3, f_frsize=1024))
    with pytest.raises(UserError, match=r"step 2: it needs 1.0 MiB .* 3.0 KiB \(3072 bytes\) free") as caught:
        checkpoints.save(2, STATE)
    assert "--resume" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_disk_that_fills_while_writing_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    checkpoints = Checkpoints(tmp_path, asynchronous=asynchronous)
    save(checkpoints, 1)
    with monkeypatch.context() as patches:
        fsync_fails(patches, 28)
        with pytest.raises(UserError, match=r"no room on disk for the checkpoint of step 2"):
            save(checkpoints, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    save(checkpoints, 3)
    assert steps_of(checkpoints) == [1, 3]


def test_a_write_that_the_system_stops_half_way_leaves_nothing_behind(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        checkpoints.save(2, {"x": torch.zeros(1 << 20)})
        with pytest.raises(UserError, match=r"no room on disk .* step 2: it needs 5.0 MiB"):
            checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_an_error_of_the_thread_is_raised_once_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path)
    with monkeypatch.context() as patches:
        fsync_fails(patches, 5)
        checkpoints.save(1, STATE)
        with pytest.raises(UserError, match=r"could not save step 1 in .*: Input/output error"):
            checkpoints.save(2, STATE)
        checkpoints.save(2, STATE)
        with pytest.raises(UserError, match="could not save step 2"):
            checkpoints.close()
    save(checkpoints, 3)
    assert steps_of(checkpoints) == [3]


def test_save_returns_before_the_disk_is_done_and_the_next_one_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, rename = threading.Event(), os.rename

    def slow(*paths: Any) -> None:
        assert gate.wait(10)
        rename(*paths)

    monkeypatch.setattr(os, "rename", slow)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, STATE)
    assert checkpoints.all() == []
    threading.Timer(0.05, gate.set).start()
    checkpoints.save(2, STATE)
    assert steps_of(checkpoints)[:1] == [1]
    checkpoints.close()
    assert steps_of(checkpoints) == [1, 2]


def test_without_host_memory_for_a_copy_the_checkpoint_is_written_before_save_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path)

    def no_room(*_: Any) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8000 bytes.")

    monkeypatch.setattr(checkpoints._host_copy, "take", no_room)
    with pytest.warns(UserWarning, match="the host has no room for a copy of the state"):
        checkpoints.save(1, STATE)
    assert steps_of(checkpoints) == [1]


def test_a_program_that_ends_without_close_finishes_its_checkpoint(tmp_path: Path) -> None:
    script = f"""
import torch
from oomph.training.checkpoint import Checkpoints
Checkpoints({str(tmp_path)!r}).save(1, {{"x": torch.ones(3_000_000)}})
"""
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, timeout=60, capture_output=True, text=True
    )
    assert done.stderr == ""
    assert steps_of(Checkpoints(tmp_path)) == [1]


# -------------------------------------------------------------------------------------------- GPU


@pytest.mark.gpu
@pytest.mark.parametrize("asynchronous", [True, False])
def test_gpu_tensors_changed_right_after_save_are_saved_as_they_were(
    tmp_path: Path, asynchronous: bool
) -> None:
    checkpoints = Checkpoints(tmp_path, asynchronous=asynchronous)
    x = torch.randn(64 << 20, device="cuda").bfloat16()
    t = torch.randn(1000, 1000, device="cuda").t()
    expected, expected_t = x.cpu(), t.cpu()
    for step in (1, 2):
        checkpoints.save(step, {"x": x, "t": t})
        x.add_(1)
        if step == 1:
            expected.add_(1)
    checkpoints.close()
    found = load(find(tmp_path), into={"x": torch.empty_like(x)})
    assert torch.equal(found["x"].cpu(), expected)
    assert found["x"].is_cuda
    assert torch.equal(found["t"], expected_t)


@pytest.mark.gpu
def test_saving_takes_no_memory_of_the_gpu(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    x = torch.randn(16 << 20, device="cuda")
    t = torch.randn(4000, 1000, device="cuda").t()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    checkpoints.save(1, {"x": x, "t": t})
    checkpoints.close()
    assert torch.cuda.max_memory_allocated() == before
