"""Checkpoints: what is saved comes back bit for bit; which ones stay; what a failed save leaves."""

import json
import math
import random
import resource
import warnings

import numpy as np
import pytest
import torch
from killed_writer import newest_after_kills
from torch import nn

from oomph.errors import UserError
from oomph_lab.training import checkpoint
from oomph_lab.training.checkpoint import CheckpointError, Checkpoints, find, load
from oomph_lab.training.checkpoint_state import rng_state, set_rng_state

DTYPES = [
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e8m0fnu),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32),
    *(torch.uint64, torch.bool),
]


def save_and_load(folder, state):
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, state)
    checkpoints.close()
    return load(find(folder))


def same_bits(one, other):
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(
        *(t.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8) for t in (one, other))
    )


def random_bits(dtype, *shape):
    size = math.prod(shape) * dtype.itemsize
    high = 2 if dtype is torch.bool else 256
    return torch.randint(high, (size,), dtype=torch.uint8).view(dtype).view(shape)


# ------------------------------------------------------------------------------------- round trip


def test_tensors_of_every_dtype_and_layout_come_back_bit_for_bit(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_FILE_BYTES", 1000)  # many files
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
    found = save_and_load(tmp_path, state)
    assert len(list((tmp_path / "step-00000001").glob("*.safetensors"))) > 3
    for dtype_name, tensors in state.items():
        assert list(found[dtype_name]) == list(tensors)
        for name, tensor in tensors.items():
            assert same_bits(found[dtype_name][name], tensor), (dtype_name, name)
            if name == "transposed":  # 8-bit optimizer state is quantized by blocks of memory
                assert found[dtype_name][name].stride() == tensor.stride()


def test_plain_data_comes_back_with_its_types(tmp_path):
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


def test_tied_tensors_are_written_once_and_share_memory_again(tmp_path):
    weight = nn.Parameter(torch.randn(1000))
    found = save_and_load(tmp_path, {"model": {"embedding": weight, "head": weight}, "slice": weight[:10]})
    assert found["model"]["embedding"] is found["model"]["head"]
    assert torch.equal(found["slice"], weight[:10])
    (file,) = find(tmp_path).folder.glob("*.safetensors")
    assert file.stat().st_size < 2 * 4000


def test_loading_into_a_state_fills_its_own_tensors(tmp_path):
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


def test_every_random_number_generator_continues_where_it_was(tmp_path):
    def draw():
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


def test_what_cannot_be_saved_is_named(tmp_path):
    recursive = {}
    recursive["self"] = recursive
    sparse, meta = torch.eye(2).to_sparse(), torch.ones(2, device="meta")
    for value in (object(), {1, 2}, meta, sparse, {(1, 2): 3}, recursive):
        with pytest.raises(UserError, match=r"cannot save a\.0|contains itself"):
            Checkpoints(tmp_path).save(1, {"a": [value]})
    assert list(tmp_path.iterdir()) == []


# --------------------------------------------------------------------------------------- rotation


def save(checkpoints, *steps, size=3):
    for step in steps:
        checkpoints.save(step, {"x": torch.full((size,), float(step))})
    checkpoints.wait()


def corrupt(folder, step):
    (file,) = (folder / f"step-{step:08d}").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    return file


def steps_of(checkpoints):
    return [saved.step for saved in checkpoints.all()]


def test_the_newest_few_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, 10, 9, 20, 100_000_000)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000020", "step-100000000"]
    latest = checkpoints.latest()
    assert latest.step == 100_000_000
    assert not latest.skipped
    assert find(str(tmp_path / "step-00000020")).step == 20
    going_back = Checkpoints(tmp_path, keep=1)
    save(going_back, 5)  # the one just saved is never the one deleted
    assert steps_of(going_back) == [5]


def test_a_step_saved_again_replaces_the_first(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=3)
    save(checkpoints, 1, 2)
    for number in (7.0, 8.0):
        checkpoints.save(2, {"x": torch.tensor(number)})
    checkpoints.wait()
    assert steps_of(checkpoints) == [1, 2]
    assert load(find(tmp_path))["x"] == 8.0


def test_corrupt_newer_checkpoints_are_skipped_and_only_corrupt_ones_are_an_error(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.latest() is None
    save(checkpoints, 1, 2, 3)
    file = corrupt(tmp_path, 3)
    (tmp_path / "step-00000002" / "manifest.json").write_text("{")
    latest = checkpoints.latest()
    assert latest.step == 1
    first, second = latest.skipped.values()
    assert first.startswith(f"{file} is corrupt")
    assert "manifest.json is corrupt" in second
    corrupt(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*step-00000003.*\(and 2 older\)"):
        checkpoints.latest()


def test_rotation_does_not_count_corrupt_checkpoints(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, 1, 2)
    (tmp_path / "step-00000002" / "state.json").unlink()
    save(checkpoints, 3)
    assert steps_of(checkpoints) == [1, 3]
    corrupt(tmp_path, 3)
    assert checkpoints.latest().step == 1
    save(checkpoints, 4, 5)
    assert steps_of(checkpoints) == [3, 4, 5]
    save(checkpoints, 3)
    assert load(find(tmp_path / "step-00000003-2"))["x"].tolist() == [3, 3, 3]


# --------------------------------------------------------------------------------------- failures


def test_a_full_disk_leaves_the_checkpoints_before(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(UserError, match=r"no room on disk .* step 2: it needs 5.0 MiB .*--resume"):
            save(checkpoints, 2, size=1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_what_is_saved_is_the_state_at_the_time_of_the_call(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    state = {"x": torch.zeros(1 << 20), "list": [1]}
    checkpoints.save(1, state)
    state["x"].fill_(7)
    state["list"].append(2)
    checkpoints.close()
    found = load(find(tmp_path))
    assert found["x"].count_nonzero() == 0
    assert found["list"] == [1]


# -------------------------------------------------------------------------------------------- GPU


@pytest.mark.gpu
def test_gpu_tensors_changed_right_after_save_are_saved_as_they_were_without_gpu_memory(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    x = torch.randn(64 << 20, device="cuda").bfloat16()
    t = torch.randn(1000, 1000, device="cuda").t()
    expected, expected_t = x.cpu(), t.cpu()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for step in (1, 2):
        checkpoints.save(step, {"x": x, "t": t})
        x.add_(1)
        if step == 1:
            expected.add_(1)
    checkpoints.close()
    assert torch.cuda.max_memory_allocated() == before
    found = load(find(tmp_path), into={"x": torch.empty_like(x)})
    assert torch.equal(found["x"].cpu(), expected)
    assert found["x"].is_cuda
    assert torch.equal(found["t"], expected_t)


def test_a_kill_at_any_call_that_touches_a_file_leaves_complete_checkpoints_only(tmp_path):
    with warnings.catch_warnings():
        # Python 3.12 warns of every fork where there are threads, and numpy has some.
        warnings.simplefilter("ignore", DeprecationWarning)
        newest = newest_after_kills(tmp_path)
    assert len(newest) > 9
    # The old one until the new one is in place, the new one after.
    assert newest == sorted(newest)
    assert set(newest) == {1, 2}
