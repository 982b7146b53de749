"""The two photographs inside scikit-learn, as a data set of small crops: real images without a network."""

from __future__ import annotations

import random
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from oomph.errors import UserError
from oomph.training.data.images import pixels
from oomph.training.data.needs import need
from oomph.training.data.permutation import mixed

_FILES = ("china.jpg", "flower.jpg")
# The right-hand fifth of each photograph is for validation; training never touches a pixel of it.
_HELD_OUT = 0.2
_SCALES = (1, 2, 3, 4)  # sides of a crop, in sides of the image it becomes


class Photographs:
    """Square crops at several scales, half of them mirrored, shrunk to size x size; new ones each epoch."""

    name = "photographs"
    training_size = 8192
    validation_size = 512

    def __init__(self, size: int, seed: int = 0, folder: Path | None = None) -> None:
        self.size = size
        self.seed = seed
        self._folder = folder or _images_of_sklearn()
        widths = [picture.width for picture in self._pictures]
        smallest = min(min(int(width * _HELD_OUT) for width in widths), *(p.height for p in self._pictures))
        if size > smallest:
            raise UserError(f"image_size={size} is too large for the photographs; give at most {smallest}")

    def training(self, epoch: int, index: int) -> torch.Tensor:
        return pixels(self._crop(random.Random(mixed(self.seed, epoch, index)), held_out=False))

    def validation(self, index: int) -> torch.Tensor:
        # Not of the run's seed: every run is measured on the same crops.
        return pixels(self._crop(random.Random(mixed(1 << 40, index)), held_out=True))

    def region(self, picture: Any, held_out: bool) -> tuple[int, int]:
        """The columns, from and up to, that a crop may touch."""
        border = picture.width - int(picture.width * _HELD_OUT)
        return (border, picture.width) if held_out else (0, border)

    def _crop(self, draw: random.Random, held_out: bool) -> Any:
        picture = self._pictures[draw.randrange(len(self._pictures))]
        first, last = self.region(picture, held_out)
        fitting = [scale for scale in _SCALES if scale * self.size <= min(last - first, picture.height)]
        side = self.size * draw.choice(fitting)
        left = draw.randint(first, last - side)
        top = draw.randint(0, picture.height - side)
        # Cut before it is shrunk: a filter over the border would bring in pixels of the other side.
        crop = picture.crop((left, top, left + side, top + side))
        image = need("PIL.Image", "the photographs")
        if side != self.size:
            crop = crop.resize((self.size, self.size), image.Resampling.BOX)
        return crop.transpose(image.Transpose.FLIP_LEFT_RIGHT) if draw.random() < 0.5 else crop

    @cached_property
    def _pictures(self) -> list[Any]:
        image = need("PIL.Image", "the photographs")
        pictures = []
        for name in _FILES:
            with image.open(self._folder / name) as file:
                pictures.append(file.convert("RGB"))
        return pictures


def _images_of_sklearn() -> Path:
    """Where its images lie. Found without importing it: its compiled parts are neither needed nor quick."""
    spec = find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            "the photographs are inside the package scikit-learn, which is not installed; "
            "pip install 'oomph[train]'"
        )
    folder = Path(spec.submodule_search_locations[0], "datasets", "images")
    missing = [name for name in _FILES if not (folder / name).is_file()]
    if missing:
        raise UserError(f"this scikit-learn has no photograph {missing[0]} in {folder}")
    return folder
