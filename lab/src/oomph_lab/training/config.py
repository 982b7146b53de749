"""Configs of the five systems: YAML files with overrides, validated as a whole.

The text of a config (YAML, `key=value`, `--key value`), its sections as pydantic models, and `load`, which
resolves aliases, merges overrides, validates all sections and fills in defaults. All problems of a config are
collected and reported together.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import PydanticCustomError

from oomph.errors import UserError
from oomph.records import FixUse
from oomph.units import parse_bytes
from oomph_lab.systems import SYSTEMS, System
from oomph_lab.training.metrics import METRICS

# ------------------------------------------------------------------------------------------------- as written

RUN_CONFIG, RUN_LOCK = "config.yaml", "lock"
_KEY = r"[A-Za-z_][A-Za-z0-9_.-]*"
_DEEPEST = 100
_OVERRIDE = re.compile(rf"({_KEY})=(.*)", re.DOTALL)


def is_run(folder: Path) -> bool:
    """Whether a run wrote to the folder. A config.yaml alone may be anybody's."""
    return (folder / RUN_CONFIG).exists() and any((folder / name).is_file() for name in (RUN_LOCK, METRICS))


def nearest(name: str, known: Iterable[str]) -> str | None:
    close = difflib.get_close_matches(name, list(known), n=1)
    return close[0] if close else None


# -------------------------------------------------------------------------------------------- YAML


class _Loader(yaml.SafeLoader):
    """Plain scalars by YAML 1.2. By 1.1, 1e-4 is a string and `no` is false."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012
    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Refuse what could overflow the stack: other packages raise Python's own limit."""
        self._depth += 1
        if self._depth > _DEEPEST:
            raise yaml.YAMLError("it is nested too deeply")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


class _Dumper(yaml.SafeDumper):
    """Quotes what is not a plain string by either version."""


for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?[0-9][0-9_]*", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9]+|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
):
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first)
        )


def _integer(loader: _Loader, node: yaml.ScalarNode) -> int:
    return int(str(node.value).replace("_", ""))  # 010 is ten


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    """Refuse duplicate keys, of which PyYAML silently takes the last."""
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        problem = None
        if not isinstance(key, str | int | float | bool | None):
            problem = "a key is not a word"
        elif key in seen:
            problem = f"the key {key!r} is given twice"
        if problem:
            raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
        seen.add(key)
    loader.flatten_mapping(node)
    return {
        loader.construct_object(key): loader.construct_object(value, deep=True) for key, value in node.value
    }


_Loader.add_constructor("tag:yaml.org,2002:int", _integer)
_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)


def parse_yaml(text: str, what: str, *, with_line: bool = False) -> Any:
    """One YAML value; a syntax error is one line."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark and with_line else ""
        raise UserError(f"{what}{line} is not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{what} is not valid YAML: {str(error).splitlines()[0]}") from None


def to_yaml(values: dict[str, Any]) -> str:
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False)


def read_mapping(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file."""
    name = f"config {str(path)!r}"
    file = find_config(path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error.strerror or error
        raise UserError(f"{name} cannot be read: {why}") from None
    found = parse_yaml(text, name, with_line=True)
    if found is None:
        raise UserError(f"{name} is empty; it needs at least: system: pythia")
    if not isinstance(found, dict):
        kind = "a list" if isinstance(found, list) else f"one {type(found).__name__}"
        raise UserError(f"{name} holds {kind}; it should be a mapping, like `system: pythia`")
    return {str(key): value for key, value in found.items()}


CONFIGS = Path(__file__).resolve().parents[1] / "configs"  # of this package


def find_config(path: str | Path) -> Path:
    """The file, or the config of this package with its name: pythia_tiny, configs/pythia_tiny.yaml.

    Needs only the file system, so that a mistyped name is reported at once."""
    file = Path(path)
    if file.is_dir():
        raise UserError(f"config {str(path)!r} is a directory; give a .yaml file")
    if file.is_file():
        return file
    own = CONFIGS / f"{file.stem}.yaml"
    if own.is_file() and str(path) in (own.stem, own.name, f"configs/{own.name}"):
        return own
    known = {one.stem: Path("configs") / one.name for one in CONFIGS.glob("*.yaml")}
    if file.parent.is_dir():
        known |= {one.stem: one for one in file.parent.glob("*.y*ml") if one.is_file()}
    close = nearest(file.stem, known)
    hint = f"did you mean {str(known[close])!r}?" if close else "give a .yaml file, or a name, as pythia_tiny"
    raise UserError(f"config {str(path)!r} does not exist; {hint}")


# --------------------------------------------------------------------------------------- overrides


def is_override(word: str) -> bool:
    """Whether it is key=value. A fix with options, `activation_checkpointing:keep=matmuls`, is not."""
    return _OVERRIDE.fullmatch(word) is not None


def parse_override(word: str) -> tuple[str, Any]:
    """`data.seq_len=128` -> ("data.seq_len", 128). The value is YAML."""
    match = _OVERRIDE.fullmatch(word)
    if match is None:
        raise UserError(f"override {word!r} is not key=value, e.g. data.batch_size=8")
    key, text = match[1], match[2].strip()
    if not text:
        raise UserError(f"override {word!r} has no value; write {key}=null for none")
    value: Any = text
    if not text.startswith("*"):  # a glob, not an alias of YAML
        value = parse_yaml(text, f"override {word!r}")
        if isinstance(value, str) and " #" in text and text[0] not in "'\"":  # not a comment
            value = text
    return key.replace("-", "_"), value


def overrides_from_words(words: Iterable[str]) -> tuple[str, ...]:
    """The overrides among command-line words.

    `--vocab_size 10000`, `--vocab-size=10000` and `vocab_size=10000` are the same; a flag without a value,
    `--sparse`, is true.
    """
    found: list[str] = []
    flag: str | None = None  # the next word may be its value
    for word in words:
        starts_flag = word.startswith("--")
        if flag is not None and (starts_flag or is_override(word)):
            found.append(f"{flag}=true")
            flag = None
        if starts_flag:
            key, equals, value = word[2:].partition("=")
            if not re.fullmatch(_KEY, key):
                raise UserError(f"{word!r} is not a flag; give --key value, --flag, or key=value")
            if equals:
                found.append(f"{key}={value}")
            else:
                flag = key
        elif is_override(word):
            found.append(word)
        elif flag is not None:
            found.append(f"{flag}={word}")
            flag = None
        else:
            also = "; give one config" if word.endswith((".yaml", ".yml")) else ""
            raise UserError(f"{word!r} is not an override; give key=value, --key value, or --flag{also}")
    if flag is not None:
        found.append(f"{flag}=true")
    return tuple(found)


# --------------------------------------------------------------------------------------------------- sections

Count = Annotated[int, Field(ge=1)]
Length = Annotated[int, Field(ge=2)]  # a single token has nothing to be predicted from
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]

_SHORT = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
# Before a Literal of dtypes: the usual short names.
DtypeName = BeforeValidator(lambda value: _SHORT.get(value, value) if isinstance(value, str) else value)


def _check_size(value: str | None) -> str | None:
    if value is not None:
        try:
            parse_bytes(value)
        except UserError as error:
            raise PydanticCustomError("size", "{why}", {"why": str(error)}) from None
    return value


# "24GiB". A bare number passes as text, so that the error says that its unit is missing.
Size = Annotated[
    str | None,
    BeforeValidator(lambda value: str(value) if type(value) is int else value),
    AfterValidator(_check_size),
]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class CurriculumStage(Section):
    """steps: optimizer steps; only the last stage may leave it out. accumulate: training.accumulate by
    default. batch_size may be given instead of batch_tokens, which is divided by seq_len."""

    seq_len: Length
    batch_tokens: Count | None = None
    batch_size: Count | None = None
    steps: Count | None = None
    accumulate: Count | None = None


class DataConfig(Section):
    """In a loaded config every default is filled in.

    source: "stdlib" (Python's own source files), "photographs" (of scikit-learn; ginr), a file, folder or
        glob of text, JSONL or parquet, or the name of a hub data set. field: the one that holds the text.
    tokenizer: "pretrained" is the one in the folder model.weights, the default where there is one.
    vocab_size: tokens that the tokenizer learns at most; the model's vocabulary may be larger.
    seq_len, batch_size: with a curriculum, those of its largest stage.
    shuffle_window: sequences that are shuffled with each other. validation: the fraction held out.
    workers: 1 reads in a process of its own, 0 in the training process; default 1 on a GPU.
    """

    source: str | None = None
    field: str = "text"
    tokenizer: Literal["words", "bpe", "bytes", "pretrained"] | None = None
    vocab_size: Count | None = None
    seq_len: Length | None = None
    batch_size: Count | None = None
    batch_tokens: Count | None = None
    curriculum: tuple[CurriculumStage, ...] | None = None
    shuffle: bool = True
    shuffle_window: Count = 1024
    seed: Seed | None = None
    validation: Fraction = 0.02
    workers: Annotated[int, Field(ge=0, le=1)] | None = None


class OptimizerConfig(Section):
    """AdamW. Other forms of it (8-bit, fused, in backward) are fixes."""

    learning_rate: Positive = 3e-4
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    eps: Positive = 1e-8


class TrainingConfig(Section):
    """In a loaded config either steps or epochs is set.

    steps: optimizer steps. accumulate: batches per step.
    dtype: of the parameters; by default as the model makes them, float32 (npt: model.optimization).
    warmup: steps until the learning rate is full. min_learning_rate: the end of the schedule, as a fraction.
    eval_every, save_every: steps; null is at the end only. eval_at_start: also before the first step.
    keep: checkpoints kept. save: false writes no checkpoints.
    device: by default a GPU if there is one. on_nan: what to do with a step whose loss is not finite.
    gradient_checkpointing: the fix "activation_checkpointing".
    cuda_graph: capture forward and backward as a CUDA graph; for models so small that kernel launches
        dominate.
    deterministic: bitwise reproducible; a GPU's attention backward is not by default.
    memory_limit: such as "23GiB"; this process uses no more of the GPU.
    """

    steps: Count | None = None
    epochs: Count | None = None
    accumulate: Count = 1
    dtype: Annotated[Literal["float32", "bfloat16"] | None, DtypeName] = None
    autocast: Annotated[Literal["bfloat16", "float16"] | None, DtypeName] = None
    clip: Positive | None = None
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup: Annotated[int, Field(ge=0)] = 0
    min_learning_rate: Annotated[float, Field(ge=0, le=1)] = 0.0
    eval_every: Count | None = 200
    eval_at_start: bool = False
    eval_batches: Count = 20
    save_every: Count | None = 500
    keep: Count = 3
    log_every: Count = 10
    seed: Seed = 0
    device: str | None = None
    on_nan: Literal["stop", "skip"] = "stop"
    gradient_checkpointing: bool = False
    save: bool = True
    cuda_graph: bool = False
    deterministic: bool = False
    memory_limit: Size = None


class ParallelConfig(Section):
    """Over the ranks that torchrun starts: see oomph.parallel.Parallel. data.batch_size is that of all ranks.

    data: data parallelism. tp, cp: ranks of a tensor-parallel and of a context-parallel group. The others are
    options of fsdp2: param_dtype and reduce_dtype are those of its mixed precision.
    """

    data: Literal["fsdp2", "ddp"] = "fsdp2"
    tp: Count = 1
    cp: Count = 1
    reshard_after_forward: bool = True
    param_dtype: Annotated[Literal["float32", "bfloat16"] | None, DtypeName] = None
    reduce_dtype: Annotated[Literal["float32", "bfloat16"] | None, DtypeName] = None
    cpu_offload: bool = False


class OutputConfig(Section):
    """dir: where a run writes; by default runs/<the config's name>."""

    dir: str | None = None


SECTIONS: Mapping[str, type[Section]] = {
    "data": DataConfig,
    "optimizer": OptimizerConfig,
    "training": TrainingConfig,
    "parallel": ParallelConfig,
    "output": OutputConfig,
}


# -------------------------------------------------------------------------------------- curriculum


@dataclass(frozen=True)
class Stage:
    """A part of the training with batches of one shape. seq_len None: images. steps None: to the end."""

    seq_len: int | None
    batch_size: int
    accumulate: int = 1
    steps: int | None = None

    @property
    def tokens(self) -> int:
        """Tokens (or images) of a batch."""
        return self.batch_size * (self.seq_len or 1)

    @property
    def batches(self) -> int | None:
        return None if self.steps is None else self.steps * self.accumulate


@dataclass(frozen=True)
class Curriculum:
    """Stages in order; the last one does not end."""

    stages: tuple[Stage, ...]

    def stage_number(self, step: int) -> int:
        """Which stage the step after `step` others belongs to."""
        for number, stage in enumerate(self.stages[:-1]):
            if stage.steps is None or step < stage.steps:
                return number
            step -= stage.steps
        return len(self.stages) - 1

    def at_step(self, step: int) -> Stage:
        return self.stages[self.stage_number(step)]

    def at_batch(self, batch: int) -> tuple[Stage, int | None]:
        """The stage of a batch number, and how many batches it has from there on; None: no end."""
        for stage in self.stages[:-1]:
            if stage.batches is None:
                return stage, None
            if batch < stage.batches:
                return stage, stage.batches - batch
            batch -= stage.batches
        return self.stages[-1], None

    @property
    def largest(self) -> Stage:
        """The stage with the most tokens in a batch; of several, the one with the longest sequences."""
        return max(self.stages, key=lambda stage: (stage.tokens, stage.seq_len or 0))

    def identity(self) -> list[list[int | None]]:
        """What a position in the data depends on. The length of the last stage is not part of it."""
        shapes = [[stage.seq_len, stage.batch_size, stage.batches] for stage in self.stages]
        shapes[-1][2] = None
        return shapes


# ----------------------------------------------------------------------------------- whole config


@dataclass(frozen=True)
class TrainConfig:
    """A complete, validated config. name: of its file. preset: what model_config started from."""

    name: str
    system: str
    form: str
    preset: str
    model_config: Any
    data: DataConfig
    optimizer: OptimizerConfig
    training: TrainingConfig
    fixes: tuple[FixUse, ...]
    parallel: ParallelConfig
    output: OutputConfig

    @cached_property
    def curriculum(self) -> Curriculum:
        """One stage if the config has no curriculum."""
        data, accumulate = self.data, self.training.accumulate
        if data.curriculum is None:
            assert data.batch_size is not None
            return Curriculum((Stage(data.seq_len, data.batch_size, accumulate),))
        return Curriculum(
            tuple(
                Stage(stage.seq_len, stage.batch_size or 1, stage.accumulate or accumulate, stage.steps)
                for stage in data.curriculum
            )
        )

    @property
    def stages(self) -> tuple[Stage, ...]:
        return self.curriculum.stages

    @property
    def largest_stage(self) -> Stage:
        return self.curriculum.largest

    def to_dict(self) -> dict[str, Any]:
        """All keys and values, for JSON or YAML; `load_dict` makes the same config of it."""
        sections = {name: getattr(self, name).model_dump(mode="json") for name in SECTIONS}
        values = {
            "system": self.system,
            "form": self.form,
            "model": {"preset": self.preset, **asdict(self.model_config)},
            **sections,
            "fixes": [{"fix": use.fix, "options": dict(use.options)} for use in self.fixes],
        }
        plain: dict[str, Any] = json.loads(json.dumps(values))  # tuples become lists
        return plain


# ------------------------------------------------------------------------------------------ loading

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
    """The report's sparse attention is on or off."""
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
