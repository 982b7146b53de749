"""Images: crops of real photographs, held-out parts that training never touches, exact resume."""

import pytest
import torch
from corpora import drawn, opened

from oomph.errors import UserError
from oomph_lab.training.config import Curriculum, Stage
from oomph_lab.training.data.images import Photographs

pytest.importorskip("PIL")


def opened_images(folder, source="photographs", **changes):
    stages = Curriculum((Stage(None, 6, steps=4), Stage(None, 3)))
    return opened(source, folder, **({"curriculum": stages, "image_size": 32} | changes))


def test_batches_are_real_images_between_zero_and_one(tmp_path):
    run = opened_images(tmp_path)
    batches = [next(run.train)["images"] for _ in range(6)]
    assert [batch.shape for batch in batches] == [(6, 3, 32, 32)] * 4 + [(3, 3, 32, 32)] * 2
    joined = torch.cat(batches)
    assert joined.dtype == torch.float32
    assert 0 <= joined.min() < 0.3 < 0.7 < joined.max() <= 1
    assert len({tuple(image.flatten().tolist()) for image in joined}) == len(joined)
    assert run.tokenizer is None
    assert run.description.startswith("photographs: 8192 images of 32 x 32")


def test_images_resume_exactly_with_and_without_a_worker(tmp_path):
    whole = drawn(opened_images(tmp_path), 12)
    for before, after in ((0, 1), (1, 0)):
        run = opened_images(tmp_path, workers=before)
        assert drawn(run, 5) == whole[:5]
        resumed = opened_images(tmp_path, workers=after)
        resumed.train.load_state_dict(run.train.state_dict())
        assert drawn(resumed, 7) == whole[5:]
        for each in (run, resumed):
            each.train.close()


def test_training_crops_and_validation_crops_never_share_a_pixel(tmp_path):
    pillow = pytest.importorskip("PIL.Image")
    for name in ("china.jpg", "flower.jpg"):  # black where training may look, white where it may not
        image = pillow.new("RGB", (640, 427), "black")
        image.paste("white", (512, 0, 640, 427))
        image.save(tmp_path / name, format="PNG")
    photographs = Photographs(32, folder=tmp_path)
    assert not any(photographs.training(0, index).any() for index in range(300))
    assert all((photographs.validation(index) == 1).all() for index in range(100))


def test_validation_is_the_same_for_every_seed_and_training_is_not(tmp_path):
    one, two = (opened_images(tmp_path, seed=seed) for seed in (1, 2))
    held = [torch.cat([batch["images"] for batch in run.validation()]) for run in (one, two)]
    assert torch.equal(held[0], held[1])
    assert len(held[0]) == 512
    assert drawn(one, 1) != drawn(two, 1)


def test_a_folder_gives_crops_of_its_images(tmp_path):
    pillow = pytest.importorskip("PIL.Image")
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "notes.txt").write_text("no image")
    with pytest.raises(UserError, match=r"there is no image in .*; its files must end with \.jpg"):
        opened_images(tmp_path, str(folder))
    for number, name in enumerate(("a.png", "b.JPG", "c.webp")):
        pillow.new("RGB", (200, 100), (80 * number, 0, 0)).save(folder / name)
    run = opened_images(tmp_path, str(folder))
    reds = torch.cat([next(run.train)["images"] for _ in range(6)])[:, 0].mean(dim=(1, 2)) * 255
    assert {round(red / 80) for red in reds.tolist()} == {0, 1, 2}
    with pytest.raises(UserError, match=r"image_size=64 is too large for a.png; give at most 40"):
        opened_images(tmp_path, str(folder), image_size=64)
    (folder / "d.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"d.png cannot be read as a image"):
        opened_images(tmp_path, str(folder))


def test_rows_of_a_table_are_each_seen_once_an_epoch(monkeypatch, tmp_path):
    pillow = pytest.importorskip("PIL.Image")
    rows = [{"img": pillow.new("RGB", (32, 32), (number, 0, 0)), "label": 0} for number in range(50)]
    monkeypatch.setattr("oomph_lab.training.data.loader.load_hub", lambda name, entry: rows)
    changes = {
        "source": "cifar10",
        "image_size": 16,
        "curriculum": Curriculum((Stage(None, 9),)),
        "validation": 0.1,
    }
    run = opened_images(tmp_path, epochs=1, **changes)
    seen = [round(float(image[0, 0, 0]) * 255) for batch in run.train for image in batch["images"]]
    held = [round(float(image[0, 0, 0]) * 255) for batch in run.validation() for image in batch["images"]]
    assert sorted(seen + held) == list(range(50))
    assert seen != sorted(seen)
    with pytest.raises(UserError, match=r"^batch_size=99 is larger than the data: cifar10 has 45 images"):
        opened_images(tmp_path, epochs=1, **(changes | {"curriculum": Curriculum((Stage(None, 99),))}))
