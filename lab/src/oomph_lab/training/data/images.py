"""Batches of images, drawn by number, so that a position in the data is one number.

Shapes: B batch size, C channels, S side.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset

from oomph.errors import UserError
from oomph_lab.training.config import Curriculum
from oomph_lab.training.data.sources import Split, shuffled
from oomph_lab.training.libraries import need

_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
_DECODED = 64  # images of a folder that stay in memory
_HELD_OUT = 0.2  # the right-hand part of each photograph; training never reads a pixel of it
_CROP_SCALES = (1, 2, 3, 4)  # sides of a crop, in sides of the image it becomes


class ImageBatches(IterableDataset[dict[str, torch.Tensor]]):
    """Batches {"images": float32 [B, C, S, S]}, endless unless `epochs` is given. It is its own iterator."""

    def __init__(
        self,
        images: TableImages | Photographs,
        curriculum: Curriculum,
        shuffle: bool,
        seed: int,
        epochs: int | None,
    ) -> None:
        self.images, self.curriculum, self.shuffle = images, curriculum, shuffle
        self.seed, self.epochs = seed, epochs
        self._batch = self._image = 0

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        stage, _ = self.curriculum.at_batch(self._batch)
        last = self._image + stage.batch_size
        if self.epochs is not None and last > self.epochs * self.images.training_size:
            raise StopIteration
        images_BCSS = torch.stack([self._image_of(number) for number in range(self._image, last)])
        self._batch, self._image = self._batch + 1, last
        return {"images": images_BCSS}

    def state_dict(self) -> dict[str, int]:
        return {"batch": self._batch, "image": self._image}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._batch, self._image = int(state["batch"]), int(state["image"])
        if min(self._batch, self._image) < 0:
            raise ValueError("a position in the data is not valid")

    def _image_of(self, number: int) -> torch.Tensor:
        epoch, index = divmod(number, self.images.training_size)
        if self.shuffle:
            index = shuffled(self.images.training_size, self.seed, epoch)[index]
        return self.images.training(epoch, index)


def validation_images(
    images: TableImages | Photographs, batch_size: int
) -> Iterator[dict[str, torch.Tensor]]:
    for first in range(0, images.validation_size, batch_size):
        last = min(first + batch_size, images.validation_size)
        yield {"images": torch.stack([images.validation(index) for index in range(first, last)])}


@dataclass(frozen=True)
class TableImages:
    """Images by number, [C, S, S] float32 in [0, 1]: rows of a table with a PIL image in `column`."""

    name: str
    table: Any
    size: int
    split: Split
    column: str = "img"

    @property
    def training_size(self) -> int:
        return self.split.size - self.split.held_out

    @property
    def validation_size(self) -> int:
        return self.split.held_out

    def training(self, epoch: int, index: int) -> torch.Tensor:
        return self._pixels(self.split.training(index))

    def validation(self, index: int) -> torch.Tensor:
        return self._pixels(self.split.validation(index))

    def _pixels(self, row: int) -> torch.Tensor:
        image = self.table[row][self.column]
        if image.size != (self.size, self.size):
            image = image.resize((self.size, self.size), need("PIL.Image", "images").Resampling.BOX)
        return pixels(image)


def pixels(image: Any) -> torch.Tensor:
    """[3, S, S] float32 in [0, 1] of a PIL image."""
    image = image.convert("RGB")
    bytes_SSC = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return bytes_SSC.view(image.height, image.width, 3).permute(2, 0, 1).to(torch.float32) / 255


class Photographs:
    """Crops of the images in a folder; by default of the two inside scikit-learn, which need no network.

    Square crops at several scales, half of them mirrored, shrunk to size x size; new ones each epoch."""

    training_size = 8192
    validation_size = 512

    def __init__(self, size: int, seed: int = 0, folder: Path | None = None) -> None:
        self.size, self.seed = size, seed
        self.name = "photographs" if folder is None else str(folder)
        self.files = _image_files(folder or _sklearn_images())
        for file in self.files:
            width, height = _read(file, lambda image: image.size)
            largest = min(int(width * _HELD_OUT), height)
            if size > largest:
                raise UserError(f"image_size={size} is too large for {file.name}; give at most {largest}")

    def training(self, epoch: int, index: int) -> torch.Tensor:
        return pixels(self._crop(random.Random(repr((self.seed, epoch, index))), held_out=False))

    def validation(self, index: int) -> torch.Tensor:
        # Independent of the run's seed: every run is measured on the same crops.
        return pixels(self._crop(random.Random(repr(index)), held_out=True))

    def region(self, image: Any, held_out: bool) -> tuple[int, int]:
        """The columns, from and up to, that a crop may touch."""
        border = image.width - int(image.width * _HELD_OUT)
        return (border, image.width) if held_out else (0, border)

    def _crop(self, draw: random.Random, held_out: bool) -> Any:
        image = _decoded(self.files[draw.randrange(len(self.files))])
        first, last = self.region(image, held_out)
        fitting = [scale for scale in _CROP_SCALES if scale * self.size <= min(last - first, image.height)]
        side = self.size * draw.choice(fitting)
        left = draw.randint(first, last - side)
        top = draw.randint(0, image.height - side)
        # Cut before it is shrunk: a filter over the border would read pixels of the other side.
        crop = image.crop((left, top, left + side, top + side))
        pillow = need("PIL.Image", "the photographs")
        if side != self.size:
            crop = crop.resize((self.size, self.size), pillow.Resampling.BOX)
        return crop.transpose(pillow.Transpose.FLIP_LEFT_RIGHT) if draw.random() < 0.5 else crop


def _image_files(folder: Path) -> list[Path]:
    files = sorted(file for file in folder.iterdir() if file.suffix.lower() in _SUFFIXES)
    if not files:
        raise UserError(f"there is no image in {folder}; its files must end with {', '.join(_SUFFIXES)}")
    return files


@lru_cache(_DECODED)
def _decoded(file: Path) -> Any:
    return _read(file, lambda image: image.convert("RGB"))


def _read(file: Path, read: Callable[[Any], Any]) -> Any:
    try:
        with need("PIL.Image", "photographs").open(file) as image:
            return read(image)
    except OSError as error:
        raise UserError(f"{file} cannot be read as a image: {error}") from error


def _sklearn_images() -> Path:
    """Found without importing scikit-learn, which takes seconds."""
    spec = find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            "the photographs are inside the package scikit-learn, which is not installed; "
            "pip install oomph-lab"
        )
    return Path(spec.submodule_search_locations[0], "datasets", "images")
