"""Every tensor comes back bit for bit, everything else as it was."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oomph.errors import ArgumentError, UserError
from oomph.fixes.optimizers.low_bit import to_low_bit
from oomph.training.checkpoints import Checkpoints

DTYPES = [
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e8m0fnu),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32),
    *(torch.uint64, torch.bool),
]


def there_and_back(folder: Path, state: dict[str, Any], asynchronous: bool = True) -> dict[str, Any]:
    checkpoints = Checkpoints(folder, asynchronous=asynchronous)
    checkpoints.save(1, state)
    checkpoints.close()
    saved = checkpoints.latest()
    assert saved is not None
    return checkpoints.load(saved)


def same(one: Tensor, other: Tensor) -> bool:
    """Bit for bit, NaNs too."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(
        *(t.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8) for t in (one, other))
    )


def any_bits(dtype: torch.dtype, *shape: int) -> Tensor:
    size = math.prod(shape) * dtype.itemsize
    high = 2 if dtype is torch.bool else 256
    return torch.randint(high, (size,), dtype=torch.uint8).view(dtype).view(shape)


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype_come_back_bit_for_bit(
    tmp_path: Path, dtype: torch.dtype, asynchronous: bool
) -> None:
    state = {
        "matrix": any_bits(dtype, 5, 7),
        "scalar": any_bits(dtype),
        "empty": any_bits(dtype, 0, 3),
        "transposed": any_bits(dtype, 5, 7).t(),
        "every other": any_bits(dtype, 10, 6)[::2, 1::3],
        "expanded": any_bits(dtype, 1, 4).expand(3, 4),
    }
    if dtype.is_complex:
        state |= {"conjugate": state["matrix"].conj(), "negative": state["matrix"].conj().imag}
    found = there_and_back(tmp_path, state, asynchronous)
    assert list(found) == list(state)
    for name, tensor in state.items():
        assert same(found[name], tensor), name


def test_plain_data_comes_back_with_its_types(tmp_path: Path) -> None:
    state = {
        "none": None,
        "flags": [True, False],
        "numbers": (1, -(2**80), 0.1, 1e-300, math.inf, -math.inf, -0.0),
        "text": 'a "quoted" line\nand ü',
        "bytes": b"\x00\xff",
        "nested": {"$tensor": "not a tensor", 3: {"x": []}, (1, "a"): {}, None: "none", True: 1},
        "a": {"b": torch.ones(1)},
        "a.b": torch.zeros(1),
        "dtype": torch.bfloat16,
        "device": torch.device("cuda:1"),
        "size": torch.Size([2, 3]),
    }
    found = there_and_back(tmp_path, state)
    assert found.pop("a") == {"b": torch.ones(1)}
    assert found.pop("a.b") == torch.zeros(1)
    del state["a"], state["a.b"]
    assert found == state
    assert [type(item) for item in found["numbers"]] == [type(item) for item in state["numbers"]]  # type: ignore[attr-defined]
    assert math.isnan(there_and_back(tmp_path, {"loss": math.nan})["loss"])


def test_tied_tensors_are_written_once_and_are_one_again(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.randn(1000))
    found = there_and_back(tmp_path, {"model": {"embedding": weight, "head": weight}, "slice": weight[:10]})
    assert found["model"]["embedding"] is found["model"]["head"]
    assert torch.equal(found["slice"], weight[:10])
    assert (tmp_path / "step-00000001" / "tensors.safetensors").stat().st_size < 2 * 4000


def test_a_dense_layout_comes_back_because_quantised_state_is_by_blocks_of_memory(tmp_path: Path) -> None:
    tensor = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    found = there_and_back(tmp_path, {"x": tensor})["x"]
    assert found.stride() == tensor.stride()
    assert torch.equal(found, tensor)


def test_training_resumes_bit_for_bit_with_our_8_bit_optimizer(tmp_path: Path) -> None:
    def made() -> tuple[nn.Module, Any]:
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

    model, optimizer = made()
    steps(model, optimizer, range(3))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    assert any(t.dtype is torch.uint8 for t in state["optimizer"]["state"][0].values() if t is not None)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, state)
    steps(model, optimizer, range(3, 6))
    checkpoints.close()

    again, other = made()
    saved = checkpoints.latest()
    assert saved is not None
    found = checkpoints.load(saved, into={"model": again.state_dict()})
    other.load_state_dict(found["optimizer"])
    steps(again, other, range(3, 6))
    for one, two in zip(model.parameters(), again.parameters(), strict=True):
        assert same(one.detach(), two.detach())


def test_what_is_saved_is_the_state_at_the_time_of_the_call(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    state = {"x": torch.zeros(2_000_000), "list": [1]}
    checkpoints.save(1, state)
    state["x"].fill_(7)  # type: ignore[attr-defined]
    state["list"].append(2)  # type: ignore[attr-defined]
    checkpoints.close()
    saved = checkpoints.latest()
    assert saved is not None
    found = checkpoints.load(saved)
    assert found["x"].count_nonzero() == 0
    assert found["list"] == [1]


def test_loading_into_a_state_fills_its_own_tensors(tmp_path: Path) -> None:
    shared = torch.randn(4)
    state = {"model": {"a": shared, "b": shared, "c": torch.randn(2, dtype=torch.complex128)}, "step": 3}
    there_and_back(tmp_path, state)
    checkpoints = Checkpoints(tmp_path)
    saved = checkpoints.latest()
    assert saved is not None
    # Apart here, though they were one when saved; and one of them strided.
    own = {
        "a": nn.Parameter(torch.zeros(4)),
        "b": torch.zeros(8)[::2],
        "c": torch.zeros(4, dtype=torch.complex128)[::2],
    }
    found = checkpoints.load(saved, into={"model": own})
    assert found["model"]["a"] is own["a"]
    assert torch.equal(own["a"], shared)
    assert torch.equal(own["b"], shared)
    assert torch.equal(own["c"], state["model"]["c"])  # type: ignore[index]
    assert found["step"] == 3


def test_torchao_optimizer_state_comes_back_as_it_was(tmp_path: Path) -> None:
    module = pytest.importorskip("torchao.optim.subclass_8bit")
    codes = torch.randint(256, (4, 256), dtype=torch.uint8)
    state = module.OptimState8bit(codes, torch.rand(4), torch.rand(256), True, torch.float32)
    found = there_and_back(tmp_path, {"state": {0: {"exp_avg": state}}})["state"][0]["exp_avg"]
    assert type(found) is type(state)
    assert (found.signed, found.dtype, found.shape) == (True, torch.float32, state.shape)
    for name in ("codes", "scale", "qmap"):
        assert torch.equal(getattr(found, name), getattr(state, name))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), "cannot save a.0: it is a object; a checkpoint holds tensors"),
        ({1, 2}, "cannot save a.0: it is a set"),
        (torch.ones(2, device="meta"), "cannot save a.0: it is on the meta device"),
        (torch.eye(2).to_sparse(), "cannot save a.0: it is torch.sparse_coo"),
    ],
)
def test_what_cannot_be_saved_is_named(tmp_path: Path, value: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Checkpoints(tmp_path).save(1, {"a": [value]})
    assert list(tmp_path.iterdir()) == []


def test_a_state_that_contains_itself_is_refused(tmp_path: Path) -> None:
    state: dict[str, Any] = {}
    state["self"] = state
    with pytest.raises(UserError, match="contains itself"):
        Checkpoints(tmp_path).save(1, state)


@pytest.mark.parametrize("step", [-1, True, 1.0, "1"])
def test_a_step_is_a_number_of_steps(tmp_path: Path, step: Any) -> None:
    with pytest.raises(ArgumentError, match="number of steps done"):
        Checkpoints(tmp_path).save(step, {})


def test_an_empty_state_and_a_missing_folder_are_fine(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "none").latest() is None
    assert there_and_back(tmp_path / "a" / "b", {}) == {}
