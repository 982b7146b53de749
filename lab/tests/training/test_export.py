"""Weights for other programs."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from oomph.errors import UserError
from oomph_lab.training.checkpoint_state import STORABLE
from oomph_lab.training.export import export


def tied_model():
    model = nn.ModuleDict(
        {"embedding": nn.Embedding(10, 6), "norm": nn.LayerNorm(6), "head": nn.Linear(6, 10)}
    )
    model["head"].weight = model["embedding"].weight
    model["norm"].to(torch.bfloat16)
    model.register_buffer("steps", torch.tensor(3))
    return model


def test_one_file_opens_with_safetensors_and_loads_into_the_model(tmp_path):
    state = tied_model().state_dict()
    file = tmp_path / "weights.safetensors"
    export(state, file, {"step": "7"})
    found = load_file(file)
    assert found.keys() == state.keys() - {"head.weight"}
    assert all(torch.equal(tensor, state[name]) for name, tensor in found.items())
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt", "step": "7", "head.weight": "embedding.weight"}
    again = tied_model()
    again.load_state_dict(found, strict=False)
    assert torch.equal(again["head"].weight, state["head.weight"])


def test_every_storable_dtype_and_layout(tmp_path):
    state = {str(dtype): torch.ones(3, dtype=torch.uint8).to(dtype) for dtype in STORABLE}
    whole = torch.arange(12.0).view(3, 4)
    state |= {"strided": whole.t(), "part": whole[1], "empty": torch.empty(0, 2)}
    export(state, tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in state.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name], tensor)


def test_a_large_model_is_split_with_an_index(tmp_path):
    state = {f"layer.{number}": torch.full((100,), float(number)) for number in range(5)}
    export(state, tmp_path / "out", shard=800)
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        "model.safetensors.index.json",
    ]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 2000}
    assert index["weight_map"].keys() == state.keys()
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "out" / file)[name], state[name])
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_cannot_be_exported_is_named(tmp_path):
    for value in (3, torch.ones(1, dtype=torch.complex128), torch.ones(1, device="meta")):
        with pytest.raises(UserError, match="cannot export x"):
            export({"x": value}, tmp_path / "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="could not export to"):
        export({}, tmp_path / "file" / "w.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
