"""Whether a config fits the GPU it is about to run on and, if not, a change that does."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from oomph import gpus
from oomph.errors import UserError
from oomph.records import FixUse, Prediction
from oomph.units import format_bytes

if TYPE_CHECKING:
    import torch

    from oomph.training.config import TrainConfig

Report = Callable[[str, float | None], None]

# Added one by one until the step fits; cheapest first.
_EXACT = ("fused_linear_cross_entropy", "activation_checkpointing", "tiled_mlp", "activation_offloading")


def predict_config(config: TrainConfig, device: torch.device, report: Report) -> Prediction:
    """Predict the step at the config's largest shape, on this GPU and within training.memory_limit."""
    from oomph.prediction import predict
    from oomph.training.workloads import predicted_workload

    return predict(
        predicted_workload(config),
        gpu=gpu_of(device),
        max=config.training.memory_limit,
        progress=report,
    )


def refusal(config: TrainConfig, prediction: Prediction, device: torch.device, report: Report) -> str:
    """What the step needs, what there is, and the first change found that fits."""
    problem = (
        f"oomph: {config.name} does not fit: a step needs {format_bytes(prediction.peak.reserved)}, and "
        f"{_limit(config, device)}"
    )
    found = _what_fits(config, device, report)
    if found is None:
        return (
            f"{problem}; {', '.join(_EXACT)} and smaller batches are not enough. See `oomph fixes`; "
            "--force runs it anyway"
        )
    words, fits = found
    return (
        f"{problem}. What fits: {words} ({format_bytes(fits.peak.reserved)}). Add that to the command, or "
        "--force to run it anyway"
    )


def _what_fits(config: TrainConfig, device: torch.device, report: Report) -> tuple[str, Prediction] | None:
    tried, also = list(config.fixes), ""
    if config.training.cuda_graph:  # recomputation and offloading cannot be captured
        config = replace(config, training=config.training.model_copy(update={"cuda_graph": False}))
        also = "training.cuda_graph=false"
        prediction = _predicted(config, device, report, "trying without CUDA graphs")
        if prediction is not None and prediction.fits:
            return also, prediction
    for name in _EXACT:
        if any(use.fix == name for use in tried):
            continue
        tried.append(FixUse(name))
        prediction = _predicted(replace(config, fixes=tuple(tried)), device, report, f"trying {name}")
        if prediction is None:
            tried.pop()
        elif prediction.fits:
            return f"{_override(tried)} {also}".strip(), prediction
    smaller = _smaller_batch(replace(config, fixes=tuple(tried)), device, report)
    return None if smaller is None else (f"{smaller[0]} {also}".strip(), smaller[1])


def _smaller_batch(
    config: TrainConfig, device: torch.device, report: Report
) -> tuple[str, Prediction] | None:
    if config.data.curriculum is not None:
        return None
    size, accumulate = config.data.batch_size or 1, config.training.accumulate
    words = _override(config.fixes)
    while size % 2 == 0:  # the tokens of an optimizer step stay the same
        size, accumulate = size // 2, accumulate * 2
        smaller = replace(
            config,
            data=config.data.model_copy(update={"batch_size": size}),
            training=config.training.model_copy(update={"accumulate": accumulate}),
        )
        prediction = _predicted(smaller, device, report, f"trying batches of {size}")
        if prediction is not None and prediction.fits:
            return f"{words} data.batch_size={size} training.accumulate={accumulate}", prediction
    return None


def _predicted(config: Any, device: torch.device, report: Report, what: str) -> Prediction | None:
    """None if the change does not apply to this model."""
    try:
        return predict_config(config, device, lambda _, fraction: report(what, fraction))
    except UserError:
        return None


def _override(fixes: Sequence[FixUse]) -> str:
    """Quoted for a shell; a fix with options also has quotes of its own."""
    return shlex.quote(f"fixes=[{', '.join(map(_word, fixes))}]")


def _word(use: FixUse) -> str:
    given = {
        key: value if isinstance(value, str) else json.dumps(value) for key, value in use.options.items()
    }
    options = ",".join(f"{key}={value}" for key, value in given.items())
    return json.dumps(f"{use.fix}:{options}") if options else use.fix


def _limit(config: TrainConfig, device: torch.device) -> str:
    import torch

    if config.training.memory_limit is not None:
        return f"training.memory_limit is {config.training.memory_limit}"
    name, total = torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory
    return f"{name} has {format_bytes(total)}"


def gpu_of(device: torch.device) -> gpus.GPU:
    """The GPU itself, with the catalogue's figures for its kind."""
    import torch

    found = torch.cuda.get_device_properties(device)
    return gpus.for_device(found.name, found.total_memory, (found.major, found.minor))
