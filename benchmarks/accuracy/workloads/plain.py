"""Hand-written PyTorch: no library's model code, and the ways people save memory by hand."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from benchmarks.accuracy.workloads.blocks import (
    EncoderClassifier,
    LanguageModel,
    LSTMLanguageModel,
    SquaredReLUNet,
    id_batch,
    low_rank_model,
    next_token_loss,
)
from benchmarks.accuracy.workloads.convolutional import BatchNormNet, UNet, class_loss, denoising_loss
from benchmarks.accuracy.workloads.entry import Entry, adamw
from oomph.workload import Workload

_aten = torch.ops.aten
_KEPT = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
}


def _keep_matmuls(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def _selective(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(
        block,
        x,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(_keep_matmuls),
    )


def _reentrant(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(block, x, use_reentrant=True)


def _on_the_host(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu(pin_memory=False):
        return block(x)


def _regression(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def _mlp() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(2048, 2048), nn.BatchNorm1d(2048), nn.LeakyReLU(0.2, inplace=True)]
    return nn.Sequential(*layers, nn.Linear(2048, 2048))


def _vectors(device: torch.device, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    x = torch.randn(16384, 2048, device=device, dtype=dtype)
    return {"x": x, "y": torch.randn_like(x)}


def _padded_sequences(device: torch.device) -> dict[str, torch.Tensor]:
    padding = torch.zeros(16, 512, dtype=torch.bool, device=device)
    padding[::2, 384:] = True
    return {
        "x": torch.randn(16, 512, 512, device=device),
        "padding": padding,
        "labels": torch.randint(0, 100, (16,), device=device),
    }


def _noisy_images(device: torch.device) -> dict[str, torch.Tensor]:
    clean = torch.randn(16, 3, 128, 128, device=device)
    return {"clean": clean, "noisy": clean + torch.randn_like(clean)}


def _noisy_images_channels_last(device: torch.device) -> dict[str, torch.Tensor]:
    return {k: v.to(memory_format=torch.channels_last) for k, v in _noisy_images(device).items()}


def _channels_last_unet() -> nn.Module:
    return UNet().to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _labelled_images(device: torch.device) -> dict[str, torch.Tensor]:
    return {
        "x": torch.randn(128, 3, 64, 64, device=device),
        "labels": torch.randint(0, 100, (128,), device=device),
    }


def _language(model: Any, about: str, batch: int = 8, **options: Any) -> Entry:
    options.setdefault("optimizer", adamw)
    return Entry(Workload(model, id_batch(32000, batch, 1024), next_token_loss, **options), about)


PLAIN = {
    "nanogpt-autocast": _language(LanguageModel, "small GPT, bf16 autocast", autocast="bfloat16"),
    "tied-weights": _language(
        lambda: LanguageModel(tied=True), "small GPT, fp32, head tied to the embedding", batch=4
    ),
    "bias-attention-fp32": _language(
        lambda: LanguageModel(layers=4, bias=True), "small GPT, fp32, learned bias in SDPA", batch=4
    ),
    "bias-attention-bf16": _language(
        lambda: LanguageModel(layers=4, bias=True),
        "small GPT, bf16, learned bias in SDPA",
        batch=4,
        dtype="bfloat16",
    ),
    "checkpoint-reentrant": _language(
        lambda: LanguageModel(run=_reentrant), "small GPT, bf16, reentrant checkpoints", dtype="bfloat16"
    ),
    "checkpoint-selective": _language(
        lambda: LanguageModel(run=_selective),
        "small GPT, bf16, checkpoints that keep matmuls",
        dtype="bfloat16",
    ),
    "save-on-cpu": _language(
        lambda: LanguageModel(layers=4, run=_on_the_host),
        "small GPT, fp32, activations kept on the host",
        batch=4,
    ),
    "lora": _language(low_rank_model, "frozen small GPT with low-rank corrections, bf16", dtype="bfloat16"),
    "custom-function": Entry(
        Workload(SquaredReLUNet, _vectors, _regression, adamw),
        "MLP of custom autograd Functions, fp32",
    ),
    "custom-function-autocast": Entry(
        Workload(SquaredReLUNet, _vectors, _regression, adamw, autocast="bfloat16"),
        "MLP of custom autograd Functions, bf16 autocast",
    ),
    "mlp-batchnorm-adagrad": Entry(
        Workload(_mlp, _vectors, _regression, lambda params: torch.optim.Adagrad(params)),
        "MLP with batch norm and in-place activations, fp32, Adagrad",
    ),
    "transformer-encoder": Entry(
        Workload(
            EncoderClassifier,
            _padded_sequences,
            lambda model, batch: F.cross_entropy(model(batch["x"], batch["padding"]), batch["labels"]),
            adamw,
        ),
        "nn.TransformerEncoder, fp32, dropout, padding mask",
    ),
    "transformer-encoder-autocast": Entry(
        Workload(
            EncoderClassifier,
            _padded_sequences,
            lambda model, batch: F.cross_entropy(model(batch["x"], batch["padding"]), batch["labels"]),
            adamw,
            autocast="bfloat16",
        ),
        "nn.TransformerEncoder, bf16 autocast, dropout, padding mask",
    ),
    "lstm": Entry(
        Workload(
            LSTMLanguageModel,
            id_batch(20000, 32, 256),
            next_token_loss,
            lambda params: torch.optim.RMSprop(params, lr=1e-4, momentum=0.9),
        ),
        "three-layer LSTM language model, fp32, RMSprop",
    ),
    "unet": Entry(
        Workload(UNet, _noisy_images, denoising_loss, adamw),
        "UNet, fp32",
        convolutions=True,
    ),
    "unet-channels-last": Entry(
        Workload(
            _channels_last_unet, _noisy_images_channels_last, denoising_loss, adamw, autocast="bfloat16"
        ),
        "UNet, channels last, bf16 autocast",
        convolutions=True,
    ),
    "batchnorm-convnet": Entry(
        Workload(
            BatchNormNet,
            _labelled_images,
            class_loss,
            lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-4),
        ),
        "convolutional classifier with batch norm and max pooling, fp32",
        convolutions=True,
    ),
}
