"""Configs of the five systems: YAML files, typed and checked as a whole, with overrides."""

from oomph.training.config.data import CurriculumStage, DataConfig
from oomph.training.config.loading import load, load_dict
from oomph.training.config.overrides import overrides_from_words
from oomph.training.config.problems import ConfigError
from oomph.training.config.train_config import Stage, TrainConfig
from oomph.training.config.training import OptimizerConfig, OutputConfig, TrainingConfig

__all__ = [
    "ConfigError",
    "CurriculumStage",
    "DataConfig",
    "OptimizerConfig",
    "OutputConfig",
    "Stage",
    "TrainConfig",
    "TrainingConfig",
    "load",
    "load_dict",
    "overrides_from_words",
]
