"""The program behind a model's name: the step as transformers, peft and bitsandbytes run it.

Run as a script, and predicted as one. No weights are read: those of the model are what memory holds.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

import torch
import transformers.utils

# scikit-learn, which transformers would import for generation with an assistant, takes seconds.
transformers.utils.is_sklearn_available = lambda: False

from transformers.initialization import no_init_weights  # noqa: E402
from transformers.pytorch_utils import Conv1D  # noqa: E402
from transformers.training_args import OptimizerNames  # noqa: E402

from oomph.errors import UserError  # noqa: E402
from oomph.models import configuration  # noqa: E402
from oomph.models.finetuning import FineTuning, parse  # noqa: E402

STEPS = 3  # the optimizer's state appears in the first; from the second on, steps repeat
_ALPHA = 2  # times the rank of LoRA
_DROPOUT = 0.05
_IMAGE = 224  # pixels, where the configuration names no size
_INPUTS = ("input_ids", "input_features", "pixel_values")


def main(asked: FineTuning) -> None:
    transformers.utils.logging.disable_progress_bar()  # of weights that are not there
    config, kind = _config(asked)
    _check(asked, config, kind)
    model = _quantized(kind, config) if asked.method == "qlora" else _model(kind, config, asked.method)
    if asked.method == "generate":
        _generate(model, asked)
        return
    if asked.method in ("lora", "qlora"):
        model = _with_adapters(model, asked)
    _train(model, asked)


# ------------------------------------------------------------------------------------------- the model


def _config(asked: FineTuning) -> tuple[Any, Any]:
    """The configuration, and the class of the model, as the installed transformers has them."""
    found = dict(configuration.find(asked.model, allow_network=False))
    release = f"the installed transformers {transformers.__version__}"
    name = found["model_type"]
    if name not in transformers.CONFIG_MAPPING:
        raise UserError(
            f"{asked.model}: {release} knows no architecture {name!r}; pip install -U transformers"
        )
    config = transformers.AutoConfig.for_model(**found)
    config.use_cache = asked.method == "generate"
    classes = [getattr(transformers, each, None) for each in found.get("architectures", ())]
    if not classes or classes[0] is None:
        given = found.get("architectures", [name])[0]
        raise UserError(f"{asked.model}: {release} knows no model {given!r}; pip install -U transformers")
    return config, classes[0]


def _check(asked: FineTuning, config: Any, kind: Any) -> None:
    """Raise for a method or optimizer that does not apply."""
    if kind.main_input_name not in _INPUTS:
        raise UserError(f"{asked.model}: a batch of {kind.main_input_name!r} is not known; give a script")
    optimizers = [each.value for each in OptimizerNames]
    if asked.optimizer not in optimizers:
        raise UserError(f"optimizer {asked.optimizer!r} is not valid; valid: {', '.join(optimizers)}")
    if asked.method == "generate" and not (kind.can_generate() and kind.main_input_name == "input_ids"):
        raise UserError(f"{asked.model} generates no text, so method 'generate' does not apply")
    if asked.method in ("lora", "qlora"):
        with torch.device("meta"):
            model = kind._from_config(config)
        if not any(type(each) in (torch.nn.Linear, Conv1D) for each in model.base_model.modules()):
            raise UserError(
                f"{asked.model} has no linear layers, so method {asked.method!r} does not apply; valid: "
                "full, full-fp32"
            )


def _model(kind: Any, config: Any, method: str) -> torch.nn.Module:
    """On the host, as from_pretrained leaves it; the Trainer moves it to the GPU."""
    dtype = torch.float32 if method == "full-fp32" else torch.bfloat16
    with no_init_weights():
        model: Any = kind._from_config(config, dtype=dtype)
    model.tie_weights()  # which is a part of initialization
    return model  # type: ignore[no-any-return]


class _Weight:
    """A tensor of a checkpoint file, of which only the shape and dtype are known."""

    def __init__(self, of: torch.Tensor) -> None:
        self._shape, self._dtype = of.shape, of.dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        return torch.nn.Parameter(torch.empty(self._shape, dtype=self._dtype), requires_grad=False)


def _quantized(kind: Any, config: Any) -> torch.nn.Module:
    """In 4 bits, quantized one weight after the other while it is loaded."""
    quantization = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    with torch.device("meta"):
        model = kind._from_config(config, dtype=torch.bfloat16)
    saved: dict[torch.Tensor, str] = {}  # a checkpoint has tied weights once
    for name, each in model.state_dict(keep_vars=True).items():
        saved.setdefault(each, name)
    return kind.from_pretrained(
        None,
        config=config,
        state_dict={name: _Weight(each) for each, name in saved.items()},
        dtype=torch.bfloat16,
        device_map={"": 0},
        quantization_config=quantization,
    )


def _has_experts(config: Any) -> bool:
    """Held in one parameter, of which peft adapts every expert, and takes no dropout."""
    return any(getattr(config, name, 0) for name in ("num_experts", "num_local_experts"))


def _with_adapters(model: Any, asked: FineTuning) -> torch.nn.Module:
    import peft

    if asked.method == "qlora":
        model = peft.prepare_model_for_kbit_training(
            model,
            use_gradient_checkpointing=asked.checkpointing,
            gradient_checkpointing_kwargs={"use_reentrant": False},
        )
    adapters = peft.LoraConfig(
        r=asked.lora_rank,
        lora_alpha=_ALPHA * asked.lora_rank,
        lora_dropout=0.0 if _has_experts(model.config) else _DROPOUT,
        target_modules="all-linear",
    )
    return peft.get_peft_model(model, adapters)


# ------------------------------------------------------------------------------------------- the step


def _train(model: Any, asked: FineTuning) -> None:
    checkpointing = asked.checkpointing and model.supports_gradient_checkpointing
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    arguments = transformers.TrainingArguments(
        tempfile.mkdtemp(),
        fsdp=ranks > 1 and asked.parallel == "fsdp2",
        per_device_train_batch_size=asked.batch,
        gradient_accumulation_steps=asked.accumulate,
        gradient_checkpointing=checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False} if checkpointing else None,
        bf16=True,
        optim=asked.optimizer,
        max_steps=STEPS,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    samples = [_sample(model, asked)] * (STEPS * asked.batch * asked.accumulate * ranks)
    transformers.Trainer(model, arguments, train_dataset=samples).train()


def _sample(model: Any, asked: FineTuning) -> Mapping[str, torch.Tensor]:
    """One row of the data set: labels for every token; or an image, or speech as Whisper takes it."""
    config, tokens = model.config, torch.zeros(asked.length, dtype=torch.long)
    if model.main_input_name == "input_features":
        return {
            "input_features": torch.zeros(config.num_mel_bins, 2 * config.max_source_positions),
            "labels": tokens,
        }
    if model.main_input_name == "pixel_values":
        size = getattr(config, "image_size", _IMAGE)
        image = torch.zeros(getattr(config, "num_channels", 3), size, size)
        return {"pixel_values": image, "labels": tokens[0]}
    return {"input_ids": tokens, "labels": tokens}


def _generate(model: Any, asked: FineTuning) -> None:
    model.to("cuda").eval()
    prompt = torch.zeros(asked.batch, asked.length, dtype=torch.long, device="cuda")
    model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=asked.new,
        min_new_tokens=asked.new,
        do_sample=False,
    )


if __name__ == "__main__":
    main(parse(sys.argv[1:]))
