"""Small corpora for the tests, and how a run over them is opened."""

from types import SimpleNamespace

from oomph_lab.training.config import (
    Curriculum,
    DataConfig,
    OptimizerConfig,
    OutputConfig,
    ParallelConfig,
    Stage,
    TrainConfig,
    TrainingConfig,
)
from oomph_lab.training.data import open_data

ONE_STAGE = Curriculum((Stage(16, 4),))
CURRICULUM = Curriculum((Stage(8, 3, steps=7), Stage(32, 2, steps=5), Stage(16, 4)))


def numbered_lines(path, lines):
    """Every line is different, so that a token that is lost or seen twice shows."""
    path.write_text("".join(f"line {number} of {path.stem}\n" for number in range(lines)), encoding="utf-8")
    return path


def opened(source, folder, *, curriculum=ONE_STAGE, epochs=None, image_size=None, workers=0, **data):
    """A run's data. image_size: of ginr; else text. data: of that section."""
    section = {"tokenizer": "bytes", "shuffle_window": 12, "seed": 0, **data}
    config = TrainConfig(
        name="test",
        system="pythia" if image_size is None else "ginr",
        form="model",
        preset="tiny",
        model_config=SimpleNamespace(image_size=image_size),
        data=DataConfig(source=str(source), **section),
        optimizer=OptimizerConfig(),
        training=TrainingConfig(epochs=epochs),
        fixes=(),
        parallel=ParallelConfig(),
        output=OutputConfig(),
    )
    vars(config)["curriculum"] = curriculum  # also one of single tokens, which no config may have
    return open_data(config, folder, workers)


def drawn(data, number):
    """The next batches, as lists that compare."""
    return [listed(next(data.train)) for _ in range(number)]


def listed(batch):
    (first, *_) = batch.values()
    return first.tolist()
