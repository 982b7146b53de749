"""Checkpoints that are corrupt, foreign or planted: one clear line each, and nothing in them is executed."""

import json
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp

from oomph.errors import UserError
from oomph_lab.training import checkpoint
from oomph_lab.training.checkpoint import CheckpointError, Checkpoints, find, load

TENSORS = "model-00001-of-00001.safetensors"
FILES = ["manifest.json", "state.json", TENSORS]


@pytest.fixture
def saved(tmp_path):
    checkpoints = Checkpoints(tmp_path / "run")
    model = {"weight": torch.randn(4, 3), "bias": torch.zeros(4), "scale": torch.ones(())}
    checkpoints.save(7, {"model": model, "optimizer": {0: torch.ones(2)}, "step": 7})
    checkpoints.close()
    return find(tmp_path / "run")


def sign(folder):
    """Make the manifest agree with the files, as whoever plants one would."""
    (folder / "manifest.json").unlink()
    checkpoint._write_manifest(folder, 7)


class Planted:
    def __init__(self, witness):
        self.witness = witness

    def __reduce__(self):
        return open, (str(self.witness), "w")


@pytest.mark.parametrize("name", FILES)
def test_a_pickle_planted_in_any_file_is_refused_and_not_executed(saved, tmp_path, name, monkeypatch):
    witness = tmp_path / "executed"
    planted = pickle.dumps(Planted(witness))
    pickle.loads(planted).close()
    assert witness.exists()  # it would be, if it were unpickled
    witness.unlink()

    (saved.folder / ".metadata").write_bytes(planted)
    with monkeypatch.context() as patches:  # an extra file is not read
        patches.setattr(pickle, "Unpickler", None)
        patches.setattr(pickle, "loads", None)
        patches.setattr(torch, "load", None)
        assert load(find(saved.folder))["step"] == 7
    (saved.folder / ".metadata").unlink()
    (saved.folder / name).write_bytes(planted)
    if name != "manifest.json":
        sign(saved.folder)
    with pytest.raises(CheckpointError, match=r"is corrupt|is malformed") as caught:
        load(find(saved.folder))
    assert str(saved.folder) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not witness.exists()


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_or_a_truncated_file_is_found(saved, name):
    file = saved.folder / name
    whole = file.read_bytes()
    for position in range(0, len(whole), max(len(whole) // 40, 1)):
        changed = bytearray(whole)
        changed[position] ^= 4
        file.write_bytes(changed)
        with pytest.raises(CheckpointError, match=f"{name} "):
            find(saved.folder)
    for length in (0, 1, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=f"{name} is corrupt"):
            find(saved.folder)
    file.unlink()
    with pytest.raises(UserError, match=rf"{name} is missing; delete|is not a checkpoint"):
        find(saved.folder)


@pytest.mark.parametrize(
    "structure",
    [
        [],
        3,
        {"x": {"$tensor": "model.other"}},
        {"x": {"$code": "print()"}},
        {"x": {"$dtype": "load"}},
        {"x": {"$dict": [[["a", "b"], 1]]}},
        {"x": {"$dict": [[1, 2, 3]]}},
        {"x": {"$tensor": "model.weight", "dtype": "float32", "shape": [4, 3], "strides": [90, 1]}},
        {"x": {"$tensor": "model.weight", "dtype": "complex128", "shape": [1 << 50], "strides": [1]}},
    ],
    ids=str,
)
def test_a_structure_that_save_did_not_write_is_refused(saved, structure):
    if isinstance(structure, dict):
        names = ["model.bias", "model.scale", "optimizer.0", "model.weight"]
        structure = {**structure, "all": [{"$tensor": name} for name in names]}
    (saved.folder / "state.json").write_text(json.dumps(structure))
    sign(saved.folder)
    with pytest.raises(CheckpointError, match="is malformed"):
        load(find(saved.folder))


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header["model.weight"].update(data_offsets=[0, 1 << 40]),
        lambda header: header["model.weight"].update(shape=[4, -3]),
        lambda header: header["model.weight"].update(dtype="PICKLE"),
        lambda header: header.pop("model.weight"),
        lambda header: header["__metadata__"].update(DCP_SHARDING_INFO="{}"),
    ],
)
def test_a_header_that_lies_is_refused(saved, change):
    file = saved.folder / TENSORS
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    sign(saved.folder)
    with pytest.raises(CheckpointError, match="is malformed"):
        load(find(saved.folder))


def test_no_file_that_the_manifest_does_not_name_is_read(saved):
    path = saved.folder / "manifest.json"
    text = path.read_text()
    manifest = json.loads(text)
    manifest["files"]["../../secret"] = manifest["files"].pop("state.json")
    del manifest["sha256"]
    path.write_text(json.dumps({**manifest, "sha256": checkpoint._own_hash(manifest)}))
    with pytest.raises(CheckpointError, match=r"manifest\.json is corrupt"):
        find(saved.folder)
    path.write_text(text)
    (saved.folder / "other.safetensors").write_bytes((saved.folder / TENSORS).read_bytes())
    with pytest.raises(CheckpointError, match=r"manifest\.json is corrupt"):
        find(saved.folder)


def test_another_models_checkpoint_names_what_differs_and_fills_nothing(saved):
    own = {"weight": torch.full((4, 5), 9.0), "bias": torch.full((4,), 9.0).half()}
    own |= {f"layer.{number}": torch.ones(1) for number in range(5)}
    with pytest.raises(UserError) as caught:
        load(saved, into={"model": own})
    message = str(caught.value)
    assert "missing from it: model.layer.0, model.layer.1, model.layer.2 and 2 more" in message
    assert "model.scale" in message
    assert "model.weight is [4, 3] float32 there and [4, 5] float32 here" in message
    assert "model.bias is [4] float32 there and [4] float16 here" in message
    assert own["weight"].eq(9).all()


def test_other_versions_files_and_folders_are_refused(saved, tmp_path):
    torch.save({"x": torch.ones(1)}, tmp_path / "model.pt")
    dcp.save({"x": torch.ones(1)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for name in ("model.pt", "dcp", "", "nowhere"):
        with pytest.raises(UserError, match=r"is not a checkpoint of oomph, .* pickles"):
            find(tmp_path / name)
    path = saved.folder / "manifest.json"
    text = path.read_text()
    path.write_text(text.replace('"version": 2', '"version": 1'))
    with pytest.raises(CheckpointError, match=r"version 1 of the format, and .* reads 2"):
        find(saved.folder)
    path.write_text('{"name": "an app"}')
    with pytest.raises(CheckpointError, match="is not the manifest of a checkpoint of oomph"):
        find(saved.folder)
