"""Files that are corrupt, foreign or planted: one clear line each, and nothing in them is executed."""

from __future__ import annotations

import json
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from oomph.errors import UserError
from oomph.training.checkpoints import Checkpoints, Saved, Unsound, find, load, manifest
from oomph.training.checkpoints.tensor_file import FileRecord, checksum

FILES = ["manifest.json", "state.json", "tensors.safetensors"]


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    checkpoints = Checkpoints(tmp_path / "run")
    model = {"weight": torch.randn(4, 3), "bias": torch.zeros(4), "scale": torch.ones(())}
    checkpoints.save(7, {"model": model, "optimizer": {0: torch.ones(2)}, "step": 7})
    checkpoints.close()
    found = checkpoints.latest()
    assert found is not None
    return found


def sign(folder: Path) -> None:
    """Make the manifest agree with the files, as whoever plants one would."""
    (folder / "manifest.json").unlink()
    files = [folder / "tensors.safetensors", folder / "state.json"]
    manifest.write_manifest(
        folder, 7, tuple(FileRecord(path.name, path.stat().st_size, checksum(path)) for path in files)
    )


class Planted:
    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return open, (str(self.witness), "w")


@pytest.mark.parametrize("name", FILES)
def test_a_pickle_planted_in_any_file_is_refused_and_not_executed(
    saved: Saved, tmp_path: Path, name: str
) -> None:
    witness = tmp_path / "executed"
    planted = pickle.dumps(Planted(witness))
    pickle.loads(planted).close()
    assert witness.exists()  # it would be, if it were unpickled
    witness.unlink()

    (saved.folder / name).write_bytes(planted)
    if name != "manifest.json":
        sign(saved.folder)
    with pytest.raises(UserError, match=r"is not JSON|safetensors") as caught:
        load(find(saved.folder))
    assert str(saved.folder) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not witness.exists()


def test_an_extra_pickle_beside_the_files_is_not_looked_at(saved: Saved, tmp_path: Path) -> None:
    witness = tmp_path / "executed"
    (saved.folder / ".metadata").write_bytes(pickle.dumps(Planted(witness)))
    assert load(find(saved.folder))["step"] == 7
    assert not witness.exists()


def test_nothing_is_unpickled_on_the_way(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, never)
    monkeypatch.setattr(torch, "load", never)
    assert load(find(saved.folder))["step"] == 7


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_anywhere_is_found(saved: Saved, name: str) -> None:
    file = saved.folder / name
    whole = file.read_bytes()
    for position in range(0, len(whole), max(len(whole) // 40, 1)):
        changed = bytearray(whole)
        changed[position] ^= 4
        file.write_bytes(changed)
        with pytest.raises(Unsound, match=f"{name} "):
            find(saved.folder)
    file.write_bytes(whole)
    find(saved.folder)


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_or_missing_file_is_named(saved: Saved, name: str) -> None:
    file = saved.folder / name
    whole = file.read_bytes()
    for length in (0, 1, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(Unsound, match=f"{name} is corrupt"):
            find(saved.folder)
    file.unlink()
    with pytest.raises(UserError, match=rf"{name} is missing; delete|holds no checkpoint"):
        find(saved.folder)


@pytest.mark.parametrize(
    "structure",
    [
        [],
        3,
        {"x": {"$tensor": "model.other"}},
        {"x": {"$code": "print()"}},
        {"x": {"$float": "1e5"}},
        {"x": {"$dtype": "load"}},
        {"x": {"$dict": [[["a", "b"], 1]]}},
        {"x": {"$dict": [[1, 2, 3]]}},
        {"x": {"$dict": [[{"$tensor": "model.weight"}, 1]]}},
        {"x": {"$wrapped": {"kind": "os.system", "tensors": {}, "context": []}}},
        {"x": {"$wrapped": {"kind": "torchao.optim.subclass_8bit.OptimState8bit"}}},
        {"x": {"$size": [-1]}},
        {"x": {"$tensor": "model.weight", "strides": [1, 1]}},
        {"x": {"$tensor": "model.weight", "dtype": "complex128", "shape": [1 << 50]}},
    ],
    ids=str,
)
def test_a_structure_that_we_did_not_write_is_refused(saved: Saved, structure: Any) -> None:
    if isinstance(structure, dict):
        names = ["model.bias", "model.scale", "optimizer.0", "model.weight"]
        structure = {**structure, "all": [{"$tensor": name} for name in names]}
    (saved.folder / "state.json").write_text(json.dumps(structure))
    sign(saved.folder)
    with pytest.raises(Unsound, match=r"is not a sound checkpoint: a file .*; delete that folder"):
        load(find(saved.folder))


def test_endless_nesting_is_refused(saved: Saved) -> None:
    (saved.folder / "state.json").write_text("[" * 100_000 + "]" * 100_000)
    sign(saved.folder)
    with pytest.raises(Unsound, match="is not JSON"):
        load(find(saved.folder))


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header["model.weight"].update(data_offsets=[0, 1 << 40]),
        lambda header: header["model.weight"].update(data_offsets=[-48, 0]),
        lambda header: header["model.weight"].update(shape=[4, -3]),
        lambda header: header["model.weight"].update(dtype="PICKLE"),
        lambda header: header["model.weight"].update(data_offsets=header["model.bias"]["data_offsets"]),
        lambda header: header.pop("model.weight"),
        lambda header: header.update({"model.weight": 3}),
    ],
)
def test_a_header_that_lies_is_refused(saved: Saved, change: Callable[[Any], Any]) -> None:
    file = saved.folder / "tensors.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    sign(saved.folder)
    with pytest.raises(Unsound, match="has a header that is not one of safetensors"):
        load(find(saved.folder))


def test_a_manifest_cannot_lead_out_of_its_folder(saved: Saved) -> None:
    path = saved.folder / "manifest.json"
    said = json.loads(path.read_text())
    said["files"][0]["name"] = "../../secret"
    del said["crc32"]
    said["crc32"] = zlib.crc32(json.dumps(said, sort_keys=True).encode())
    path.write_text(json.dumps(said))
    with pytest.raises(Unsound, match="does not name a step and its files"):
        find(saved.folder)


def test_a_later_format_names_the_version_that_wrote_it(saved: Saved) -> None:
    path = saved.folder / "manifest.json"
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(
        Unsound, match=r"version 2 of the format, this oomph reads 1; it was written by oomph"
    ):
        find(saved.folder)


def test_foreign_files_and_folders_are_called_what_they_are(tmp_path: Path) -> None:
    torch.save({"x": torch.ones(1)}, tmp_path / "model.pt")
    (tmp_path / "old.pt").write_bytes(pickle.dumps({}))
    (tmp_path / "model.safetensors").write_bytes(bytes(8))
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"x": torch.ones(1)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    (tmp_path / "json").mkdir()
    (tmp_path / "json" / "manifest.json").write_text('{"name": "an app"}')
    for name, message in {
        "model.pt": "is a file of torch.save or pickle, which may execute code when it is loaded",
        "old.pt": "is a file of torch.save or pickle",
        "model.safetensors": "is weights without an optimizer or a data position; a checkpoint",
        "notes.txt": "is a file; a checkpoint of oomph is a folder like step-00000100",
        "dcp": "is a checkpoint of torch.distributed.checkpoint itself, whose .metadata is a pickle",
        "json": "is not the manifest of a checkpoint of oomph",
        "": "holds no checkpoint of oomph: no manifest.json, and no folder like step-00000100",
        "nowhere": "does not exist; a checkpoint is a folder like step-00000100",
    }.items():
        with pytest.raises(UserError, match=message) as caught:
            find(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)


def test_another_models_checkpoint_names_what_differs_and_fills_nothing(saved: Saved) -> None:
    own = {"weight": torch.full((4, 5), 9.0), "bias": torch.full((4,), 9.0).half()}
    own |= {f"layer.{number}": torch.ones(1) for number in range(5)}
    with pytest.raises(UserError) as caught:
        load(saved, into={"model": own})
    assert str(caught.value) == (
        f"{saved.folder} does not fit this model: missing from it: model.layer.0, model.layer.1, "
        "model.layer.2 and 2 more; not known here: model.scale; model.weight is [4, 3] float32 there and "
        "[4, 5] float32 here, model.bias is [4] float32 there and [4] float16 here; resume with the config "
        "it was saved with, or save into another folder"
    )
    assert own["weight"].eq(9).all()
