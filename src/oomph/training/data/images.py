"""Batches of images: drawn by number, so that a place in the order is one number.

Shapes: B batch size, C channels, S side.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.data import IterableDataset

from oomph.errors import UserError
from oomph.training.data.needs import need
from oomph.training.data.packing import Batch
from oomph.training.data.permutation import Permutation, Split
from oomph.training.data.stages import Schedule


class Images(Protocol):
    """Images by number, [C, S, S] float32 in [0, 1]; those of training and of validation share nothing."""

    @property
    def name(self) -> str: ...
    @property
    def training_size(self) -> int:
        """Images of one epoch."""
        ...

    @property
    def validation_size(self) -> int: ...
    def training(self, epoch: int, index: int) -> torch.Tensor: ...
    def validation(self, index: int) -> torch.Tensor: ...


class ImageBatches(IterableDataset[Batch]):
    """{"images": float32 [B, C, S, S]}, endless unless `epochs` is given. It is its own iterator."""

    def __init__(
        self, images: Images, schedule: Schedule, shuffle: bool, seed: int, epochs: int | None
    ) -> None:
        self.images = images
        self.schedule = schedule
        self.shuffle = shuffle
        self.seed = seed
        self.epochs = epochs
        self._batch = self._image = 0

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        stage, _ = self.schedule.at(self._batch)
        last = self._image + stage.batch_size
        if self.epochs is not None and last > self.epochs * self.images.training_size:
            raise StopIteration
        images_BCSS = torch.stack([self._drawn(number) for number in range(self._image, last)])
        self._batch, self._image = self._batch + 1, last
        return {"images": images_BCSS}

    def state_dict(self) -> dict[str, int]:
        return {"batch": self._batch, "image": self._image}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._batch, self._image = int(state["batch"]), int(state["image"])

    def _drawn(self, number: int) -> torch.Tensor:
        epoch, index = divmod(number, self.images.training_size)
        if self.shuffle:
            index = Permutation(self.images.training_size, self.seed, epoch)[index]
        return self.images.training(epoch, index)


def validation_batches(images: Images, batch_size: int) -> Iterator[Batch]:
    for first in range(0, images.validation_size, batch_size):
        last = min(first + batch_size, images.validation_size)
        yield {"images": torch.stack([images.validation(index) for index in range(first, last)])}


@dataclass(frozen=True)
class TableImages:
    """Rows of a table, each with a picture of PIL's in `column`."""

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
        picture = self.table[row][self.column]
        if picture.size != (self.size, self.size):
            picture = picture.resize((self.size, self.size), need("PIL.Image", "images").Resampling.BOX)
        return pixels(picture)


def pixels(picture: Any) -> torch.Tensor:
    """[3, S, S] float32 in [0, 1] of a picture of PIL's."""
    picture = picture.convert("RGB")
    bytes_SSC = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
    return bytes_SSC.view(picture.height, picture.width, 3).permute(2, 0, 1).to(torch.float32) / 255


def check_enough(images: Images, schedule: Schedule, epochs: int | None) -> None:
    most = max(stage.batch_size for stage in schedule.stages)
    if epochs is not None and most > epochs * images.training_size:
        raise UserError(
            f"batch_size={most} is larger than the data: {images.name} has {images.training_size} images for "
            f"training, {epochs} epochs of them; give a smaller batch or more epochs"
        )
