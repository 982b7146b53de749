"""Configs of the five systems: YAML files with overrides, validated as a whole."""

from oomph.training.config.loading import ConfigError, load, load_dict
from oomph.training.config.sections import (
    Curriculum,
    CurriculumStage,
    DataConfig,
    OptimizerConfig,
    OutputConfig,
    ParallelConfig,
    Stage,
    TrainConfig,
    TrainingConfig,
    overrides_from_words,
)

__all__ = [
    "ConfigError",
    "Curriculum",
    "CurriculumStage",
    "DataConfig",
    "OptimizerConfig",
    "OutputConfig",
    "ParallelConfig",
    "Stage",
    "TrainConfig",
    "TrainingConfig",
    "load",
    "load_dict",
    "overrides_from_words",
]
