"""What a config leaves open, and what its sections must agree upon."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oomph.errors import UserError
from oomph.systems import System
from oomph.training.config.data import CurriculumStage, DataConfig
from oomph.training.config.problems import Problems
from oomph.training.config.schema import Schema
from oomph.training.config.training import TrainingConfig

_STEPS = 1000
_LARGEST_BPE = 8192  # more is not learnt well from the little text that a default run reads
_BYTES = 260  # with tokens for unknown, padding, start and end
# Of text only.
_TEXT_KEYS = ("tokenizer", "vocab_size", "seq_len", "batch_tokens", "curriculum")


def lengths_given(schema: Schema, data: DataConfig, model: Mapping[str, Any]) -> dict[str, Any]:
    """The length that a model is made for follows the data's, unless it is given itself."""
    field = schema.system.length
    longest = _longest(data)
    if field is None or longest is None or field in model:
        return {}
    name = model.get("preset", schema.system.preset)
    preset = schema.system.presets.get(name) if isinstance(name, str) else None
    # Learned positions are as many as there are tokens; elsewhere a longer context costs nothing.
    least = 0 if field == "seq_len" or preset is None else getattr(preset, field)
    return {field: max(longest, least)}


def completed_training(
    training: TrainingConfig, data: DataConfig, system: System, problems: Problems
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
        lasting = [stage.steps for stage in data.curriculum or ()]
        known = [steps for steps in lasting if steps is not None]
        steps = sum(known) if known and len(known) == len(lasting) else _STEPS
        training = training.model_copy(update={"steps": steps})
    return training


def completed_data(
    data: DataConfig, training: TrainingConfig, system: System, model: Any, problems: Problems
) -> DataConfig:
    if data.seed is None:
        data = data.model_copy(update={"seed": training.seed})
    if not system.has_text:
        for key in _TEXT_KEYS:
            if getattr(data, key) is not None:
                problems.refuse(f"data.{key}", getattr(data, key), f"{system.name} reads images")
        return data.model_copy(
            update={"source": data.source or "photographs", "batch_size": data.batch_size or 1}
        )
    data = _with_shapes(data, training, system, model, problems)
    _check_length(data, system, model, problems)
    return _with_words(data, system, model, problems)


def _with_shapes(
    data: DataConfig, training: TrainingConfig, system: System, model: Any, problems: Problems
) -> DataConfig:
    if data.curriculum is None:
        seq_len = data.seq_len or (getattr(model, system.length) if system.length else system.seq_len)
        rows = _rows(data.batch_size, data.batch_tokens, seq_len, "data", problems) or 1
        return data.model_copy(update={"seq_len": seq_len, "batch_size": rows})
    if not data.curriculum:
        problems.refuse("data.curriculum", [], "give at least one stage, or null")
        return data.model_copy(update={"seq_len": 1, "batch_size": 1})
    stages = tuple(
        _stage(stage, training, f"data.curriculum.{number}", problems)
        for number, stage in enumerate(data.curriculum)
    )
    for number, stage in enumerate(stages[:-1]):
        if stage.steps is None:
            problems.add(
                f"data.curriculum.{number}.steps", "is missing; only the last stage lasts to the end"
            )
    largest = max(stages, key=lambda stage: (stage.seq_len * (stage.batch_size or 1), stage.seq_len))
    shape = {"seq_len": largest.seq_len, "batch_size": largest.batch_size}
    for key, value in {**shape, "batch_tokens": None}.items():
        given = getattr(data, key)
        if given is not None and given != value:
            advice = "the curriculum says that: change its stages, or give data.curriculum=null too"
            problems.refuse(f"data.{key}", given, advice)
    return data.model_copy(update={"curriculum": stages, **shape, "batch_tokens": None})


def _stage(
    stage: CurriculumStage, training: TrainingConfig, place: str, problems: Problems
) -> CurriculumStage:
    rows = _rows(stage.batch_size, stage.batch_tokens, stage.seq_len, place, problems)
    if rows is None:
        problems.add(f"{place}.batch_tokens", "is missing; give batch_tokens or batch_size")
    accumulate = stage.accumulate or training.accumulate
    rows = rows or 1
    tokens = stage.batch_tokens or rows * stage.seq_len
    return stage.model_copy(update={"batch_size": rows, "batch_tokens": tokens, "accumulate": accumulate})


def _rows(size: int | None, tokens: int | None, seq_len: int, place: str, problems: Problems) -> int | None:
    """Sequences in a batch, given as such or as tokens."""
    if tokens is None:
        return size
    if tokens < seq_len:
        problems.refuse(f"{place}.batch_tokens", tokens, f"one sequence has {seq_len} tokens")
        return 1
    if size is not None and size != tokens // seq_len:
        advice = f"with batch_tokens={tokens} it is {tokens // seq_len}: give one of them"
        problems.refuse(f"{place}.batch_size", size, advice)
    return tokens // seq_len


def _check_length(data: DataConfig, system: System, model: Any, problems: Problems) -> None:
    longest = _longest(data) or 0
    if system.length is None or getattr(model, "positions", "learned") != "learned":
        return
    most = getattr(model, system.length)
    if longest > most and problems.fine(f"model.{system.length}", "data.seq_len"):
        advice = f"the model is made for model.{system.length} = {most}: give no more, or change that too"
        problems.refuse("data.seq_len", longest, advice)


def _with_words(data: DataConfig, system: System, model: Any, problems: Problems) -> DataConfig:
    tokenizer = data.tokenizer or system.tokenizer
    try:
        known = int(model.vocab_size)
    except UserError as error:  # npt asks a folder of weights
        problems.add("model.weights", f"do not say how many tokens the model knows; {error}")
        return data
    default = {"words": known, "bpe": min(known, _LARGEST_BPE), "bytes": min(known, _BYTES)}[str(tokenizer)]
    if data.vocab_size is not None and data.vocab_size > known:
        problems.refuse("data.vocab_size", data.vocab_size, f"the model knows {known} tokens")
    if tokenizer != "words" and min(known, data.vocab_size or known) < _BYTES:
        what = f"it has {_BYTES} tokens at least, and the model or data.vocab_size fewer; give 'words'"
        problems.refuse("data.tokenizer", tokenizer, what)
    return data.model_copy(
        update={
            "source": data.source or "stdlib",
            "tokenizer": tokenizer,
            "vocab_size": data.vocab_size or default,
        }
    )


def _longest(data: DataConfig) -> int | None:
    if data.curriculum:
        return max(stage.seq_len for stage in data.curriculum)
    return data.seq_len
