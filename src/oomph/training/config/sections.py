"""What a config says: its text (YAML, `key=value`, `--key value`) and its sections as pydantic models."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from oomph.errors import UserError
from oomph.records import FixUse
from oomph.training.metrics import METRICS
from oomph.units import parse_bytes

# ------------------------------------------------------------------------------------------------- as written

RUN_CONFIG, RUN_LOCK = "config.yaml", "lock"
_KEY = r"[A-Za-z_][A-Za-z0-9_.-]*"
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
    except RecursionError:
        raise UserError(f"{what} is not valid YAML: it is nested too deeply") from None


def to_yaml(values: dict[str, Any]) -> str:
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False)


def read_mapping(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file."""
    name = f"config {str(path)!r}"
    file = check_file(path)
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


def check_file(path: str | Path) -> Path:
    """Needs only the file system, so that a mistyped name is reported at once."""
    file = Path(path)
    if file.is_dir():
        raise UserError(f"config {str(path)!r} is a directory; give a .yaml file")
    if not file.is_file():
        folder = file.parent
        names = [one.name for one in folder.glob("*.y*ml") if one.is_file()] if folder.is_dir() else []
        close = nearest(file.name, names)
        hint = f"did you mean {str(folder / close)!r}?" if close else "give a .yaml file, e.g. in configs/"
        raise UserError(f"config {str(path)!r} does not exist; {hint}")
    return file


# --------------------------------------------------------------------------------------- overrides


def is_override(word: str) -> bool:
    """Whether it is key=value. A fix with options, `activation_checkpointing:keep=products`, is not."""
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
