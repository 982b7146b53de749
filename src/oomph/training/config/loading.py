"""Load a config: resolve aliases, merge overrides, validate all sections, fill in defaults.

All problems of a config are collected and reported together.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from oomph.errors import UserError, warn_deprecated
from oomph.records import FixUse
from oomph.systems import SYSTEMS, System
from oomph.training.config.sections import (
    RUN_CONFIG,
    SECTIONS,
    CurriculumStage,
    DataConfig,
    OptimizerConfig,
    OutputConfig,
    ParallelConfig,
    TrainConfig,
    TrainingConfig,
    is_run,
    nearest,
    parse_override,
    read_mapping,
)

# The reports' own names -> ours. The first one that the system has is meant.
ALIASES: Mapping[str, tuple[str, ...]] = {
    "accumulation": ("training.accumulate",),
    "attention_type": ("model.attention",),
    "batch_size": ("data.batch_size",),
    "batch_tokens": ("data.batch_tokens",),
    "context_length": ("data.seq_len",),
    "curriculum": ("data.curriculum",),
    "dataset": ("data.source",),
    "gradient_accumulation_steps": ("training.accumulate",),
    "gradient_checkpointing": ("training.gradient_checkpointing",),
    "grad_clip": ("training.clip",),
    "learning_rate": ("optimizer.learning_rate",),
    "lr": ("optimizer.learning_rate",),
    "max_length": ("data.seq_len",),
    "memory_chunk_size": ("model.kda_memory_chunk_size",),
    "model_size": ("model.preset",),
    "num_epochs": ("training.epochs",),
    "optimization.mixed_precision": ("model.optimization.mixed_precision",),
    "optimization.use_8bit": ("model.optimization.use_8bit",),
    "optimization.use_cpu_offload": ("model.optimization.use_cpu_offload",),
    "seed": ("training.seed",),
    "seq_len": ("data.seq_len",),
    "use_sparse_attention": ("model.sparse",),
    "vocab_size": ("model.vocab_size", "data.vocab_size"),
}
_TOP = ("system", "form", "fixes")
_OLD_FORMS = {"sick": "naive", "healthy": "model"}
# An override of one of a pair replaces the file's other.
_EITHER = (("data.batch_size", "data.batch_tokens"), ("training.steps", "training.epochs"))
_TEXT_KEYS = ("tokenizer", "vocab_size", "seq_len", "batch_tokens", "curriculum")
_STEPS = 1000
_LARGEST_BPE = 8192  # more is not learned well from the little text that a default run reads
_BYTE_TOKENS = 260  # with tokens for unknown, padding, start and end
_NOT_CAPTURABLE = (
    *("activation_checkpointing", "activation_offloading"),
    *("optimizer_in_backward", "optimizer_cpu_offload", "set_to_none"),
)
AnySection = TypeVar("AnySection")


class ConfigError(UserError):
    """problems: one line each. The message is that line, or a heading and a list of them."""

    def __init__(self, source: str, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        if len(self.problems) == 1:
            message = f"{source}: {self.problems[0]}"
        else:
            message = "\n  ".join([f"{source} has {len(self.problems)} problems:", *self.problems])
        super().__init__(message)


def load(path: str | Path, overrides: Iterable[str] = ()) -> TrainConfig:
    """The config in a YAML file, with `key=value` overrides. All problems are one ConfigError.

    A run's own config.yaml means that run, wherever its folder is now."""
    file, mapping = Path(path), read_mapping(path)
    name = file.stem
    if file.name == RUN_CONFIG and is_run(file.parent):
        name, mapping["output"] = file.parent.resolve().name, {"dir": str(file.parent)}
    return load_dict(mapping, name, overrides, source=str(path))


def load_dict(
    mapping: Mapping[str, Any], name: str, overrides: Iterable[str] = (), *, source: str | None = None
) -> TrainConfig:
    """The same from a mapping, such as TrainConfig.to_dict()."""
    problems = _Problems(source or name)
    written = _flat(mapping, problems)
    changes: dict[str, Any] = {}
    for word in overrides:
        try:
            key, value = parse_override(word)
            changes.update(_flat({key: value}, problems))
        except UserError as error:
            problems.add(str(error), "")
    keys = ConfigKeys(_find_system({**written, **changes}, problems))
    values = _merge(keys.resolve(written, problems), keys.resolve(changes, problems))
    config = _build(name, keys, values, problems)
    problems.raise_any()
    return config


class _Problems:
    """Collects one line for each key."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.written: dict[str, str] = {}  # key -> the name it was given by
        self._lines: dict[str, str] = {}

    def add(self, key: str, what: str) -> None:
        """`what` follows the key: "is not a key; ..."."""
        name = self.written.get(key, key)
        shown = key if name == key else f"{name} (which is {key})"
        self._lines.setdefault(key, f"{shown} {what}".rstrip())

    def refuse(self, key: str, given: object, advice: str) -> None:
        text = repr(given)
        self.add(key, f"= {text if len(text) <= 60 else text[:57] + '...'} is not valid; {advice}")

    def fine(self, *keys: str) -> bool:
        return not any(key in self._lines for key in keys)

    def raise_any(self) -> None:
        if self._lines:
            raise ConfigError(self.source, self._lines.values())


# -------------------------------------------------------------------------------------------- keys


def _flat(mapping: Mapping[str, Any], problems: _Problems) -> dict[str, Any]:
    """Dotted keys. Below a section's keys, only `optimization` has keys of its own."""
    found: dict[str, Any] = {}

    def below(section: str, value: Any) -> None:
        if value is None:  # a heading with nothing under it
            return
        if not isinstance(value, Mapping):
            problems.refuse(section, value, "give a mapping of keys")
            return
        for key, inner in value.items():
            name = f"{section}.{key}"
            if key == "optimization":
                below(name, inner)
            else:
                found[name] = inner

    for key, value in mapping.items():
        if key in (*SECTIONS, "model", "optimization"):
            below(key, value)
        else:
            found[key] = value
    return found


def _find_system(values: Mapping[str, Any], problems: _Problems) -> System:
    """Without it no other key can be checked, so it is the only problem reported."""
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


class ConfigKeys:
    """The keys of a system's config."""

    def __init__(self, system: System) -> None:
        self.system = system
        sections = [f"{name}.{key}" for name, section in SECTIONS.items() for key in section.model_fields]
        self.all = (*_TOP, "model.preset", *_fields_of(system.config, "model."), *sections)

    def find(self, key: str) -> str | None:
        """The key that `key` means: itself, an alias, or the one key with that last part.

        An alias may be given by itself or in any section, since the reports had sections of their own."""
        if key in self.all:
            return key
        section, _, rest = key.partition(".")
        name = rest if section in (*SECTIONS, "model") and rest else key
        for target in ALIASES.get(name, ()):
            if target in self.all:
                return target
        ends = [known for known in self.all if _last(known) == name] if name == key else []
        return ends[0] if len(ends) == 1 else None

    def hint(self, key: str) -> str:
        """The nearest key, in its section or anywhere."""
        section, _, name = key.rpartition(".")
        inside = {_last(known): known for known in self.all if known.rpartition(".")[0] == section}
        anywhere = {alias: alias for alias in ALIASES if self.find(alias)}
        anywhere |= {_last(known): known for known in self.all}
        known = {**anywhere, **inside}  # of two with the same name, the one in the section
        if not section:
            known |= {one: one for one in ("model", *SECTIONS)}
        close = nearest(name, known)
        if close is not None:
            meant = self.find(known[close]) or known[close]
            return f"did you mean {meant!r}?"
        if inside and section:
            return f"the keys of {section!r} are {', '.join(inside)}"
        return f"the sections are model, {', '.join(SECTIONS)}; the other keys are {', '.join(_TOP)}"

    def resolve(self, written: Mapping[str, Any], problems: _Problems) -> dict[str, Any]:
        """Values by our own keys. Two names of one key must agree."""
        found: dict[str, Any] = {}
        names: dict[str, str] = {}
        for key, value in written.items():
            target = self.find(key)
            if target is None:
                problems.add(key, f"is not a key; {self.hint(key)}")
                continue
            value = _converted(target, value)
            if target in found and found[target] != value:
                both = f"as {names[target]} = {found[target]!r} and as {key} = {value!r}"
                problems.add(target, f"is given twice, {both}; give it once")
                continue
            found[target], names[target] = value, key
            problems.written[target] = key
        return found


def _converted(target: str, value: Any) -> Any:
    """Older words, and the report's sparse attention, which is on or off."""
    if target == "form" and isinstance(value, str) and value in _OLD_FORMS:
        warn_deprecated(f"form: {value}", f"form: {_OLD_FORMS[value]}")
        return _OLD_FORMS[value]
    if target == "model.sparse" and isinstance(value, bool):
        return "local" if value else None
    return value


def _merge(file: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    left = dict(file)
    for pair in _EITHER:
        if any(overrides.get(key) is not None for key in pair):
            for key in pair:
                left.pop(key, None)
    if "form" in overrides and overrides["form"] != file.get("form", "model"):
        left.pop("fixes", None)  # they are for the file's own form
    return {**left, **overrides}


def _fields_of(config: type[Any], prefix: str) -> Iterable[str]:
    """Fields of a model's config dataclass; those of a dataclass inside it by dotted names."""
    hints = get_type_hints(config)
    for field in fields(config):
        inner = hints[field.name]
        if is_dataclass(inner) and isinstance(inner, type):
            yield from _fields_of(inner, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}"


def _last(key: str) -> str:
    return key.rpartition(".")[2]


# ---------------------------------------------------------------------------------------- sections


def _build(name: str, keys: ConfigKeys, values: Mapping[str, Any], problems: _Problems) -> TrainConfig:
    def below(section: str) -> dict[str, Any]:
        start = f"{section}."
        return {key.removeprefix(start): value for key, value in values.items() if key.startswith(start)}

    def section(kind: type[AnySection], place: str) -> AnySection:
        return _read(kind(), below(place), place, problems)

    form = values.get("form", "model")
    if form not in (forms := keys.system.forms):
        problems.refuse("form", form, f"choose from {', '.join(map(repr, forms))}")
    data, training = section(DataConfig, "data"), section(TrainingConfig, "training")
    output = section(OutputConfig, "output")
    model = below("model")
    preset, model_config = _read_model(keys, {**_model_length(keys.system, data, model), **model}, problems)
    training = _complete_training(training, data, keys.system, problems)
    return TrainConfig(
        name=name,
        system=keys.system.name,
        form=str(form),
        preset=preset,
        model_config=model_config,
        data=_complete_data(data, training, keys.system, model_config, problems),
        optimizer=section(OptimizerConfig, "optimizer"),
        training=training,
        fixes=_read_fixes(values.get("fixes"), training, problems),
        parallel=section(ParallelConfig, "parallel"),
        output=output if output.dir is not None else OutputConfig(dir=f"runs/{name}"),
    )


def _read(base: AnySection, values: Mapping[str, Any], name: str, problems: _Problems) -> AnySection:
    """A section, or a model's config, as `base` with these values; without those that have problems.

    values: keys of a dataclass inside it are dotted.
    """
    kind = TypeAdapter(type(base))
    known = kind.dump_python(base, mode="json")
    good = dict(known)
    for key, value in values.items():
        field, dot, inner = key.partition(".")
        good[field] = {**good[field], inner: value} if dot else value
    for _ in range(3):  # without what was refused: first by itself, then together with others
        try:
            # As JSON: strict about numbers and strings, while a list may become a tuple.
            return kind.validate_json(json.dumps(good, default=repr), strict=True)
        except ValidationError as error:
            for place, found in _errors_by_place(error, good).items():
                key = ".".join(map(str, (name, *place)))
                if found[0]["type"] == "missing":
                    problems.add(key, "is missing")
                elif found[0]["type"] == "extra_forbidden":
                    known_keys = CurriculumStage.model_fields  # keys of sections were looked up before
                    close = nearest(str(place[-1]), known_keys)
                    hint = f"did you mean {close!r}?" if close else f"valid: {', '.join(known_keys)}"
                    problems.add(key, f"is not a key; {hint}")
                else:
                    problems.refuse(key, found[0]["input"], _advice(found))
                good[place[0]] = known[place[0]]
    return base


def _errors_by_place(error: ValidationError, given: Any) -> dict[tuple[Any, ...], list[Any]]:
    """Where they are in what was given; of a union, there is one for each of its types."""
    found: dict[tuple[Any, ...], list[Any]] = {}
    for one in error.errors(include_url=False):
        place: tuple[Any, ...] = one["loc"]
        if not place:  # of several fields
            place = (one["ctx"]["field"],)
            one = {**one, "input": given[place[0]], "msg": one["ctx"]["advice"]}  # type: ignore[assignment]
        elif one["type"] != "missing":
            value = given
            for depth, part in enumerate(place):
                if not (part in value if isinstance(value, dict) else isinstance(value, list)):
                    place = place[:depth]
                    break
                value = value[part]
        found.setdefault(place, []).append(one)
    return found


def _advice(errors: Iterable[Any]) -> str:
    """What is valid, from pydantic's "Input should be ..."; for a union of types, all of them."""
    messages = dict.fromkeys(str(error["msg"]) for error in errors)
    kinds = [message.removeprefix("Input should be ") for message in messages]
    return " or ".join(kinds) if kinds[0] in messages else f"it should be {' or '.join(kinds)}"


def _read_model(keys: ConfigKeys, values: Mapping[str, Any], problems: _Problems) -> tuple[str, Any]:
    """The preset's name and the model's config. values: dotted keys below `model`."""
    system = keys.system
    name = values.get("preset", system.preset)
    if not isinstance(name, str) or name not in system.presets:
        close = nearest(name, system.presets) if isinstance(name, str) else None
        hint = f"did you mean {close!r}? " if close else ""
        problems.refuse("model.preset", name, f"{hint}{system.name} has {', '.join(system.presets)}")
        name = system.preset
    given = {key: value for key, value in values.items() if key != "preset"}
    return name, _read(system.presets[name], given, "model", problems)


# ---------------------------------------------------------------------------- defaults and checks


def _model_length(system: System, data: DataConfig, model: Mapping[str, Any]) -> dict[str, Any]:
    """The length that a model is made for follows the data's, unless it is given."""
    field, longest = system.length, _longest(data)
    if field is None or longest is None or field in model:
        return {}
    name = model.get("preset", system.preset)
    preset = system.presets.get(name) if isinstance(name, str) else None
    # Learned positions are as many as there are tokens; elsewhere a longer context costs nothing.
    least = 0 if field == "seq_len" or preset is None else getattr(preset, field)
    return {field: max(longest, least)}


def _complete_training(
    training: TrainingConfig, data: DataConfig, system: System, problems: _Problems
) -> TrainingConfig:
    if training.steps is not None and training.epochs is not None:
        problems.refuse("training.epochs", training.epochs, f"training.steps is {training.steps}: give one")
    if system.name == "npt" and training.dtype is not None:
        advice = "npt's base has its own: give model.optimization.mixed_precision"
        problems.refuse("training.dtype", training.dtype, advice)
    if training.dtype == "bfloat16" and training.autocast == "float16":
        advice = 'the parameters are bfloat16: give one of the two, or autocast="bfloat16"'
        problems.refuse("training.autocast", training.autocast, advice)
    if training.steps is None and training.epochs is None:
        lengths = [stage.steps for stage in data.curriculum or ()]
        known = [steps for steps in lengths if steps is not None]
        steps = sum(known) if known and len(known) == len(lengths) else _STEPS
        training = training.model_copy(update={"steps": steps})
    return training


def _complete_data(
    data: DataConfig, training: TrainingConfig, system: System, model: Any, problems: _Problems
) -> DataConfig:
    if data.seed is None:
        data = data.model_copy(update={"seed": training.seed})
    if not system.has_text:
        for key in _TEXT_KEYS:
            if getattr(data, key) is not None:
                problems.refuse(f"data.{key}", getattr(data, key), f"{system.name} reads images")
        update = {"source": data.source or "photographs", "batch_size": data.batch_size or 1}
        return data.model_copy(update=update)
    if data.curriculum is None:
        seq_len = data.seq_len or (getattr(model, system.length) if system.length else system.seq_len)
        rows = _checked_rows(data, seq_len, "data", problems) or 1
        data = data.model_copy(update={"seq_len": seq_len, "batch_size": rows})
    else:
        data = _complete_curriculum(data, training, problems)
    longest = _longest(data) or 0
    if system.length is not None and getattr(model, "positions", "learned") == "learned":
        most = getattr(model, system.length)
        if longest > most and problems.fine(f"model.{system.length}", "data.seq_len"):
            advice = f"the model is made for model.{system.length} = {most}: give no more, or change that too"
            problems.refuse("data.seq_len", longest, advice)
    return _complete_tokenizer(data, system, model, problems)


def _complete_curriculum(data: DataConfig, training: TrainingConfig, problems: _Problems) -> DataConfig:
    if not data.curriculum:
        problems.refuse("data.curriculum", [], "give at least one stage, or null")
        return data.model_copy(update={"seq_len": 2, "batch_size": 1})
    stages = []
    for number, stage in enumerate(data.curriculum):
        place = f"data.curriculum.{number}"
        if data.batch_tokens is not None:  # for all stages, instead of their own
            stage = stage.model_copy(update={"batch_tokens": data.batch_tokens, "batch_size": None})
        rows = _checked_rows(stage, stage.seq_len, place, problems)
        if rows is None:
            problems.add(f"{place}.batch_tokens", "is missing; give batch_tokens or batch_size")
        if stage.steps is None and number < len(data.curriculum) - 1:
            problems.add(f"{place}.steps", "is missing; only the last stage lasts to the end")
        update = {"batch_size": rows or 1, "batch_tokens": stage.batch_tokens or (rows or 1) * stage.seq_len}
        update["accumulate"] = stage.accumulate or training.accumulate
        stages.append(stage.model_copy(update=update))
    largest = max(stages, key=lambda stage: (stage.seq_len * (stage.batch_size or 1), stage.seq_len))
    shape = {"seq_len": largest.seq_len, "batch_size": largest.batch_size}
    for key, value in shape.items():
        given = getattr(data, key)
        if given is not None and given != value:
            advice = "the curriculum says that: change its stages, or give data.curriculum=null too"
            problems.refuse(f"data.{key}", given, advice)
    return data.model_copy(update={"curriculum": tuple(stages), "batch_tokens": None, **shape})


def _checked_rows(
    shape: DataConfig | CurriculumStage, seq_len: int, place: str, problems: _Problems
) -> int | None:
    """Sequences in a batch, None if it is not given."""
    size, tokens = shape.batch_size, shape.batch_tokens
    if tokens is not None and tokens < seq_len:
        problems.refuse(f"{place}.batch_tokens", tokens, f"one sequence has {seq_len} tokens")
        return 1
    rows = size if tokens is None else tokens // seq_len
    if size is not None and size != rows:
        advice = f"with batch_tokens={tokens} it is {rows}: give one of them"
        problems.refuse(f"{place}.batch_size", size, advice)
    return rows


def _complete_tokenizer(data: DataConfig, system: System, model: Any, problems: _Problems) -> DataConfig:
    weights = getattr(model, "weights", None)
    own = weights is not None and (Path(weights) / "tokenizer.json").is_file()
    tokenizer = data.tokenizer or ("pretrained" if own else system.tokenizer)
    if tokenizer == "pretrained" and not own:
        problems.refuse("data.tokenizer", tokenizer, "model.weights names no folder with a tokenizer.json")
    try:
        vocabulary = int(model.vocab_size)
    except UserError as error:  # npt reads it from a folder of weights
        problems.add("model.weights", f"do not give the size of the vocabulary; {error}")
        return data
    default = {"bpe": min(vocabulary, _LARGEST_BPE), "bytes": min(vocabulary, _BYTE_TOKENS)}
    if data.vocab_size is not None and data.vocab_size > vocabulary:
        problems.refuse("data.vocab_size", data.vocab_size, f"the model has {vocabulary} tokens")
    if (
        tokenizer not in ("words", "pretrained")
        and min(vocabulary, data.vocab_size or vocabulary) < _BYTE_TOKENS
    ):
        advice = (
            f"it has at least {_BYTE_TOKENS} tokens, and the model or data.vocab_size fewer; give 'words'"
        )
        problems.refuse("data.tokenizer", tokenizer, advice)
    update = {
        "source": data.source or "stdlib",
        "tokenizer": tokenizer,
        "vocab_size": data.vocab_size or default.get(str(tokenizer), vocabulary),
    }
    return data.model_copy(update=update)


def _longest(data: DataConfig) -> int | None:
    return max(stage.seq_len for stage in data.curriculum) if data.curriculum else data.seq_len


# ------------------------------------------------------------------------------------------- fixes


def _read_fixes(given: Any, training: TrainingConfig, problems: _Problems) -> tuple[FixUse, ...]:
    """A list of names with options, as after `--fix`, or of {fix: ..., options: ...}."""
    # Imports torch, which a config that does not exist need not wait for.
    from oomph.fixes import uses_of
    from oomph.fixes.registry import conflict, same_use

    uses: list[FixUse] = []
    for number, one in enumerate([] if given is None else given if isinstance(given, list) else [given]):
        try:
            uses += uses_of([one])
        except UserError as error:
            problems.add(f"fixes.{number}", f"= {one!r} is not valid; {error}")
    if training.gradient_checkpointing and not any(use.fix == "activation_checkpointing" for use in uses):
        uses.append(FixUse("activation_checkpointing"))
    for use, other in combinations(uses, 2):
        if not same_use(use, other) and (why := conflict(use, other)):
            both = use.fix if use.fix == other.fix else f"{use.fix}.{other.fix}"
            problems.add(f"fixes.{both}", f"cannot be combined; {why}")
    names = {use.fix for use in uses}
    if "optimizer_in_backward" in names:
        why = "with the fix 'optimizer_in_backward' no gradient is left at the end of backward"
        if training.clip is not None:
            problems.refuse("training.clip", training.clip, f"{why}; give null")
        if training.accumulate > 1:
            problems.refuse("training.accumulate", training.accumulate, f"{why}; give 1")
    if training.cuda_graph:
        # These synchronize, copy to the host or free the gradients that a replay adds to.
        for name in (name for name in _NOT_CAPTURABLE if name in names):
            advice = f"a step with the fix {name!r} cannot be captured: give false, or leave the fix out"
            problems.refuse("training.cuda_graph", True, advice)
        if training.autocast == "float16":
            advice = "float16 changes the loss scale at every step: give bfloat16"
            problems.refuse("training.cuda_graph", True, advice)
    return tuple(uses)
