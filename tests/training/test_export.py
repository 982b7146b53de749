"""Weights for other programs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from oomph.errors import UserError
from oomph.training.checkpoint_state import STORABLE
from oomph.training.export import export


def tied_model() -> nn.Module:
    model = nn.ModuleDict(
        {"embedding": nn.Embedding(10, 6), "norm": nn.LayerNorm(6), "head": nn.Linear(6, 10)}
    )
    model["head"].weight = model["embedding"].weight  # type: ignore[assignment]
    model["norm"].to(torch.bfloat16)
    model.register_buffer("steps", torch.tensor(3))
    return model


def test_one_file_opens_with_safetensors_and_loads_into_the_model(tmp_path: Path) -> None:
    state = tied_model().state_dict()
    files = export(state, tmp_path / "weights.safetensors", {"step": "7"})
    assert files == [tmp_path / "weights.safetensors"]
    found = load_file(files[0])
    assert found.keys() == state.keys() - {"head.weight"}
    assert all(torch.equal(tensor, state[name]) for name, tensor in found.items())
    with safe_open(files[0], "pt") as file:
        assert file.metadata() == {"format": "pt", "step": "7", "head.weight": "embedding.weight"}
    again = tied_model()
    again.load_state_dict(found, strict=False)
    assert torch.equal(again["head"].weight, state["head.weight"])  # type: ignore[index]


def test_every_storable_dtype_and_layout(tmp_path: Path) -> None:
    state = {str(dtype): torch.ones(3, dtype=torch.uint8).to(dtype) for dtype in STORABLE}
    whole = torch.arange(12.0).view(3, 4)
    state |= {"strided": whole.t(), "part": whole[1], "empty": torch.empty(0, 2)}
    (file,) = export(state, tmp_path)
    assert file.name == "model.safetensors"
    found = load_file(file)
    for name, tensor in state.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name], tensor)


def test_a_large_model_is_split_with_an_index(tmp_path: Path) -> None:
    state = {f"layer.{number}": torch.full((100,), float(number)) for number in range(5)}
    files = export(state, tmp_path / "out", shard=800)
    assert [file.name for file in files] == [
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        "model.safetensors.index.json",
    ]
    index = json.loads(files[-1].read_text())
    assert index["metadata"] == {"total_size": 2000}
    assert index["weight_map"].keys() == state.keys()
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "out" / file)[name], state[name])
    assert len(list((tmp_path / "out").iterdir())) == 4


def test_a_failed_export_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export({"x": torch.zeros(3)}, tmp_path)

    def fails(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patches:
        patches.setattr(os, "fsync", fails)
        with pytest.raises(UserError, match=r"could not export to .*: No space left on device"):
            export({"x": torch.ones(3)}, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert torch.equal(load_file(tmp_path / "model.safetensors")["x"], torch.zeros(3))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "cannot export x: it is a int"),
        (torch.ones(1, dtype=torch.complex128), "cannot export x: .*torch.complex128"),
        (torch.ones(1, device="meta"), "on meta"),
    ],
)
def test_what_cannot_be_exported_is_named(tmp_path: Path, value: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        export({"x": value}, tmp_path / "out")
    assert not (tmp_path / "out").exists()
