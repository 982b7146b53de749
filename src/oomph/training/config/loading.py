"""A config from a file: read, overridden, checked as a whole, completed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from oomph.errors import UserError
from oomph.systems import FORMS, SYSTEMS, System
from oomph.training.config.completing import completed_data, completed_training, lengths_given
from oomph.training.config.data import DataConfig
from oomph.training.config.fix_list import read_fixes
from oomph.training.config.given import canonical, flat, merged
from oomph.training.config.model import read_model
from oomph.training.config.overrides import parse_override
from oomph.training.config.problems import ConfigError, Problems, nearest
from oomph.training.config.reading import read_mapping
from oomph.training.config.schema import Schema
from oomph.training.config.section import AnySection, read_section
from oomph.training.config.train_config import TrainConfig
from oomph.training.config.training import OptimizerConfig, OutputConfig, TrainingConfig
from oomph.training.run_folder import CONFIG, is_run


def load(path: str | Path, overrides: Iterable[str] = ()) -> TrainConfig:
    """The config in a YAML file, with `key=value` overrides. All that is wrong with it is one UserError.

    A run's own config.yaml means that run, wherever its folder lies now."""
    file, mapping = Path(path), read_mapping(path)
    name = file.stem
    if file.name == CONFIG and is_run(file.parent):
        name, mapping["output"] = file.parent.resolve().name, {"dir": str(file.parent)}
    return load_dict(mapping, name, overrides, source=str(path))


def load_dict(
    mapping: Mapping[str, Any], name: str, overrides: Iterable[str] = (), *, source: str | None = None
) -> TrainConfig:
    """The same from what a file holds, e.g. TrainConfig.to_dict()."""
    problems = Problems(source or name)
    written = flat(mapping, problems)
    changes = _parsed(overrides, problems)
    schema = Schema(_system({**dict(written), **dict(changes)}, problems))
    values = merged(canonical(written, schema, problems), canonical(changes, schema, problems))
    config = _config(name, schema, values, problems)
    problems.raise_any()
    return config


def _parsed(overrides: Iterable[str], problems: Problems) -> list[tuple[str, Any]]:
    found: dict[str, Any] = {}
    for word in overrides:
        try:
            key, value = parse_override(word)
        except UserError as error:
            problems.add(str(error), "")
            continue
        # A mapping, `model={preset: tiny}`, is its keys.
        inner = {key[0]: value} if len(key) == 1 and isinstance(value, Mapping) else {".".join(key): value}
        found.update(flat(inner, problems))
    return list(found.items())


def _system(values: Mapping[str, Any], problems: Problems) -> System:
    """Without it no other key can be judged, so that a wrong one is the only problem told."""
    given = values.get("system")
    if isinstance(given, str) and given in SYSTEMS:
        return SYSTEMS[given]
    if given is None:
        what = f"system is missing; choose from {', '.join(SYSTEMS)}"
    else:
        close = nearest(str(given), SYSTEMS)
        hint = f"did you mean {close!r}? " if close else ""
        what = f"system = {given!r} is not valid; {hint}Choose from {', '.join(SYSTEMS)}"
    raise ConfigError(problems.source, [what])


def _config(name: str, schema: Schema, values: Mapping[str, Any], problems: Problems) -> TrainConfig:
    def section(kind: type[AnySection], place: str) -> AnySection:
        return read_section(kind, _below(values, place), place, problems)

    form = values.get("form", "model")
    if form not in FORMS:
        problems.refuse("form", form, f"choose from {', '.join(map(repr, FORMS))}")
    data, training = section(DataConfig, "data"), section(TrainingConfig, "training")
    output = section(OutputConfig, "output")
    model = _below(values, "model")
    preset, model_config = read_model(schema, {**lengths_given(schema, data, model), **model}, problems)
    training = completed_training(training, data, schema.system, problems)
    return TrainConfig(
        name=name,
        system=schema.system.name,
        form=str(form),
        preset=preset,
        model_config=model_config,
        data=completed_data(data, training, schema.system, model_config, problems),
        optimizer=section(OptimizerConfig, "optimizer"),
        training=training,
        fixes=read_fixes(values.get("fixes"), training, problems),
        output=output if output.dir is not None else OutputConfig(dir=f"runs/{name}"),
    )


def _below(values: Mapping[str, Any], section: str) -> dict[str, Any]:
    start = f"{section}."
    return {key.removeprefix(start): value for key, value in values.items() if key.startswith(start)}
