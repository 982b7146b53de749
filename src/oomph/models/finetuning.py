"""The options of a fine-tuning step of a model that is given by its name, and the program that runs it.

The program is `python .../oomph/models/program.py NAME --method lora ...`: a Script like any other, which
predict, diagnose, fit and measure accept.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oomph.errors import UserError
from oomph.models import configuration

if TYPE_CHECKING:
    from oomph.prediction import Script

PROGRAM = str(Path(__file__).with_name("program.py"))
METHODS = {
    "full": "all weights in bf16",
    "full-fp32": "all weights in float32, with bf16 autocast",
    "lora": "LoRA adapters on a model in bf16 (peft)",
    "qlora": "LoRA adapters on a model in 4 bits (peft, bitsandbytes)",
    "generate": "no training: the prompt, then one token at a time, with a KV cache",
}
PARALLEL = ("fsdp2", "ddp")
_PACKAGES = {
    "full": ("transformers", "accelerate"),
    "full-fp32": ("transformers", "accelerate"),
    "lora": ("transformers", "accelerate", "peft"),
    "qlora": ("transformers", "accelerate", "peft", "bitsandbytes"),
    "generate": ("transformers",),
}
# Of a configuration, also of its text_config: the keys that limit the length of a sequence.
_POSITIONS = ("max_position_embeddings", "n_positions", "max_target_positions")
_TABLES = (
    "gpt2",
    "bert",
    "roberta",
    "xlm-roberta",
    "distilbert",
    "opt",
    "whisper",
    "gpt_neo",
    "electra",
    "camembert",
)
_OFFSET = ("roberta", "xlm-roberta", "camembert")  # their first two positions stand for padding


@dataclass(frozen=True)
class FineTuning:
    """A step that the Trainer of transformers makes. Without an optimizer: the usual one of the method."""

    model: str
    method: str = "full"
    batch: int = 1
    length: int = 2048
    new: int = 128  # tokens that `generate` adds
    lora_rank: int = 16
    checkpointing: bool = True
    optimizer: str = ""
    accumulate: int = 1
    parallel: str = "fsdp2"  # where there are several ranks; `batch` is that of one

    def __post_init__(self) -> None:
        if self.parallel not in PARALLEL:
            raise UserError(f"--parallel {self.parallel!r} is not valid; valid: {', '.join(PARALLEL)}")
        if self.method not in METHODS:
            raise UserError(f"method {self.method!r} is not valid; valid: {', '.join(METHODS)}")
        for name in ("batch", "length", "new", "lora_rank", "accumulate"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UserError(f"{name} {value!r} is not valid; give a whole number >= 1")
        if not self.optimizer:
            chosen = "paged_adamw_8bit" if self.method == "qlora" else "adamw_torch_fused"
            object.__setattr__(self, "optimizer", chosen)

    def check(self) -> dict[str, Any]:
        """Its configuration. Raises for what shows without torch and transformers; may ask the hub."""
        config = configuration.find(self.model)
        packages = (*_PACKAGES[self.method], *(["bitsandbytes"] if "8bit" in self.optimizer else []))
        if missing := [name for name in dict.fromkeys(packages) if importlib.util.find_spec(name) is None]:
            raise UserError(
                f"method {self.method!r} with optimizer {self.optimizer!r} runs {' and '.join(missing)}, "
                f"not installed: pip install {' '.join(missing)}"
            )
        if "architectures" not in config and "auto_map" in config:
            raise UserError(f"model {self.model!r} brings code of its own, which is not run; give a script")
        _check_length(self, config)
        return config

    def check_parallel(self) -> None:
        """Raise for a method that several ranks do not run."""
        if self.method == "generate":
            raise UserError("method 'generate' runs in one process; give it without --ranks")
        if self.method == "qlora" and self.parallel == "fsdp2":
            raise UserError("method 'qlora' with FSDP2 is not predicted; oomph predict --parallel ddp is")

    def positions(self) -> int | None:
        """The tokens of a row that the model is made for."""
        return _positions(configuration.find(self.model, allow_network=False))

    def script(self) -> Script:
        """The program. All of its steps are alike, from the second on."""
        from oomph.prediction import Script

        repeats = self.method != "generate"
        return Script(PROGRAM, self.words(), repeat_last_step=repeats, model=self.model)

    def words(self) -> tuple[str, ...]:
        """Itself as arguments of the program."""
        given = asdict(self)
        given.pop("model")
        checkpointing = given.pop("checkpointing")
        words = [
            word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))
        ]
        return (self.model, *words, *(() if checkpointing else ("--no-checkpointing",)))


def parse(words: Sequence[str]) -> FineTuning:
    """The reverse of `FineTuning.words`."""
    import argparse

    parser = argparse.ArgumentParser(PROGRAM)
    parser.add_argument("model")
    for field in fields(FineTuning)[1:]:
        name = f"--{field.name.replace('_', '-')}"
        if isinstance(field.default, bool):
            parser.add_argument(name, action=argparse.BooleanOptionalAction, default=field.default)
        else:
            parser.add_argument(name, type=type(field.default), default=field.default)
    return FineTuning(**vars(parser.parse_args(words)))


def finetune(model: str, method: str = "full", **options: Any) -> Script:
    """A fine-tuning step of a model on the hub, by its name, as a program for predict, diagnose and fit.

    `model`: a name on the hub, or a folder with its config.json; weights are neither read nor needed.
    `method`: full, full-fp32, lora, qlora, or generate. Options: batch, length, lora_rank (16),
    checkpointing (True), optimizer (a name that the Trainer knows), accumulate, new (tokens to generate).
    """
    known = {field.name for field in fields(FineTuning)} - {"model", "method"}
    if unknown := sorted(set(options) - known):
        raise UserError(f"finetune has no option {unknown[0]!r}; valid: {', '.join(sorted(known))}")
    asked = FineTuning(model, method, **options)
    asked.check()
    return asked.script()


def _positions(config: dict[str, Any]) -> int | None:
    text = config.get("text_config") or config
    most = next((text[key] for key in _POSITIONS if key in text), None)
    return None if most is None else most - (2 if text.get("model_type") in _OFFSET else 0)


def _check_length(asked: FineTuning, config: dict[str, Any]) -> None:
    """Raise where a position would be outside of the table that the model was built with."""
    most, kind = _positions(config), (config.get("text_config") or config).get("model_type", "")
    if most is None or kind not in _TABLES:  # rotary positions are computed, for any length
        return
    length = asked.length + (asked.new if asked.method == "generate" else 0)
    if length > most:
        raise UserError(
            f"length {length} is beyond the {most} positions of {asked.model}; give --length {most} or less"
        )
