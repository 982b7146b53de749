"""Held out: Hugging Face models that nobody tuned the predictor on.

Measure and predict these to judge the predictor; do not change the predictor to please one of them
without moving it to another file first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformers as tr
from torch import nn

from benchmarks.accuracy.workloads.entry import (
    Entry,
    adamw,
    clipped,
    from_config,
    images,
    library_entry,
    tokens,
)
from oomph.workload import Workload

Step = Callable[[], None]

_QWEN2_SMALL = partial(
    tr.Qwen2Config,
    vocab_size=76032,
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=14,
    num_attention_heads=14,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)
_FALCON_SMALL = partial(
    tr.FalconConfig,
    vocab_size=65024,
    hidden_size=1088,
    num_hidden_layers=10,
    num_attention_heads=17,
    hidden_dropout=0.1,
    multi_query=True,
    parallel_attn=True,
)
_GEMMA_SMALL = partial(
    tr.GemmaConfig,
    vocab_size=256000,
    hidden_size=1024,
    intermediate_size=8192,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=256,
)
_PHI3_SMALL = partial(
    tr.Phi3Config,
    hidden_size=1536,
    intermediate_size=4096,
    num_hidden_layers=10,
    num_attention_heads=16,
    num_key_value_heads=16,
)
_OLMO2_SMALL = partial(
    tr.Olmo2Config,
    vocab_size=50304,
    hidden_size=768,
    intermediate_size=2752,
    num_hidden_layers=9,
    num_attention_heads=12,
    attention_dropout=0.1,
)
_BART_BASE = partial(
    tr.BartConfig,
    d_model=768,
    encoder_layers=6,
    decoder_layers=6,
    encoder_attention_heads=12,
    decoder_attention_heads=12,
    encoder_ffn_dim=3072,
    decoder_ffn_dim=3072,
    attention_dropout=0.1,
)
# Time masking draws spans on the host; layer drop skips layers at random. Neither has one peak to predict.
_WAV2VEC2_BASE = partial(tr.Wav2Vec2Config, mask_time_prob=0.0, layerdrop=0.0, ctc_loss_reduction="mean")
_STABLELM_SMALL = partial(
    tr.StableLmConfig,
    vocab_size=50304,
    hidden_size=1280,
    intermediate_size=3456,
    num_hidden_layers=10,
    num_attention_heads=20,
    num_key_value_heads=20,
    use_qkv_bias=True,
)
_GPTJ_SMALL = partial(
    tr.GPTJConfig, vocab_size=50400, n_positions=1024, n_embd=1024, n_layer=8, n_head=16, rotary_dim=32
)
_TINY_LLAMA = partial(
    tr.LlamaConfig,
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=12,
    num_attention_heads=32,
    num_key_value_heads=4,
)


def _phi3_reentrant() -> nn.Module:
    model = from_config(_PHI3_SMALL, tr.Phi3ForCausalLM)()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})  # type: ignore[operator]
    return model


def _mobilenet_channels_last() -> nn.Module:
    config = partial(tr.MobileNetV2Config, num_labels=1000)
    model = from_config(config, tr.MobileNetV2ForImageClassification, attention="eager")()
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _images_channels_last(device: torch.device) -> dict[str, Any]:
    batch = images(96, 192)(device)
    batch["pixel_values"] = batch["pixel_values"].to(memory_format=torch.channels_last)
    return batch


def _translated(device: torch.device) -> dict[str, Any]:
    """Source and target of different lengths; the sources are padded."""
    mask = torch.ones(10, 640, dtype=torch.long, device=device)
    mask[::2, 500:] = 0
    return {
        "input_ids": torch.randint(4, 50265, (10, 640), device=device),
        "attention_mask": mask,
        "labels": torch.randint(4, 50265, (10, 192), device=device),
    }


def _segmented(device: torch.device) -> dict[str, Any]:
    return {
        "pixel_values": torch.randn(12, 3, 384, 384, device=device),
        "labels": torch.randint(0, 19, (12, 384, 384), device=device),
    }


def _unlabelled(device: torch.device) -> dict[str, Any]:
    return {"pixel_values": torch.randn(72, 3, 224, 224, device=device)}


def _transcribed(device: torch.device) -> dict[str, Any]:
    return {
        "input_values": torch.randn(6, 96000, device=device),
        "labels": torch.randint(1, 32, (6, 70), device=device),
    }


class _Adapter(nn.Module):
    """A frozen bf16 layer with a trainable fp32 correction beside it."""

    def __init__(self, base: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base = base
        self.dropout = nn.Dropout(0.05)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + 2.0 * self.up(self.down(self.dropout(x.float()))).to(x.dtype)


def _adapted_llama() -> nn.Module:
    model = from_config(_TINY_LLAMA, tr.LlamaForCausalLM)().to(torch.bfloat16).requires_grad_(False)
    for layer in model.model.layers:  # type: ignore[union-attr]
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, _Adapter(getattr(layer.self_attn, name)))
    return model


def distillation() -> Step:
    """A frozen fp16 teacher without gradients teaches a smaller fp32 student."""
    teacher = tr.BertForMaskedLM(tr.BertConfig()).half().cuda().eval()
    student = tr.DistilBertForMaskedLM(tr.DistilBertConfig()).cuda().train()
    optimizer = torch.optim.AdamW(student.parameters(), lr=5e-5)
    ids = torch.randint(0, 30522, (12, 320), device="cuda")
    warmth = 2.0

    def step() -> None:
        with torch.no_grad():
            taught = teacher(input_ids=ids, output_hidden_states=True)
        learnt = student(input_ids=ids, labels=ids, output_hidden_states=True)
        soft = F.kl_div(
            F.log_softmax(learnt.logits / warmth, dim=-1),
            F.softmax(taught.logits.float() / warmth, dim=-1),
            reduction="batchmean",
        )
        near = F.cosine_similarity(learnt.hidden_states[-1], taught.hidden_states[-1].float(), dim=-1)
        loss = learnt.loss + warmth**2 * soft / ids.shape[1] + (1 - near).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def stepped_in_backward() -> Step:
    """Each parameter has an optimizer of its own, which steps as soon as its gradient is there."""
    model = from_config(_STABLELM_SMALL, tr.StableLmForCausalLM)().to("cuda", torch.bfloat16).train()
    optimizers = {p: torch.optim.Adam([p], lr=1e-4, foreach=False) for p in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    batch = tokens(50304, 6, 512)(torch.device("cuda"))

    def step() -> None:
        model(**batch).loss.backward()

    return step


def master_weights() -> Step:
    """A bf16 model whose fp32 master copy is stepped; eight micro-batches, clipping, a schedule."""
    model = from_config(_GPTJ_SMALL, tr.GPTJForCausalLM, attention="eager")().to("cuda", torch.bfloat16)
    model.train()
    low = list(model.parameters())
    high = [p.detach().float().requires_grad_() for p in low]
    optimizer = torch.optim.AdamW(high, lr=2e-4, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    batches = torch.randint(0, 50400, (8, 2, 512), device="cuda")

    def step() -> None:
        for ids in batches:
            (model(input_ids=ids, labels=ids).loss / len(batches)).backward()
        for master, p in zip(high, low, strict=True):
            if master.grad is None:
                master.grad = torch.empty_like(master)
            assert p.grad is not None
            master.grad.copy_(p.grad)
        model.zero_grad(set_to_none=False)
        torch.nn.utils.clip_grad_norm_(high, 1.0)
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            torch._foreach_copy_(low, high)  # type: ignore[arg-type]

    return step


HELD_OUT_LIBRARY = {
    "held-qwen2-amsgrad": library_entry(
        "Qwen2 (small), bf16, biased projections, GQA 14:2, tied head, AMSGrad",
        _QWEN2_SMALL,
        tr.Qwen2ForCausalLM,
        tokens(76032, 3, 1792),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4, amsgrad=True),
        dtype="bfloat16",
    ),
    "held-falcon-multi-query": library_entry(
        "Falcon (small), bf16 autocast, one key head for 17, parallel blocks, dropout",
        _FALCON_SMALL,
        tr.FalconForCausalLM,
        tokens(65024, 4, 1000),
        autocast="bfloat16",
    ),
    "held-gemma-vocabulary": library_entry(
        "Gemma (small), bf16, 256,000 tokens in a tied head, NAdam",
        _GEMMA_SMALL,
        tr.GemmaForCausalLM,
        tokens(256000, 2, 1024),
        optimizer=lambda params: torch.optim.NAdam(params, lr=1e-4),
        dtype="bfloat16",
    ),
    "held-phi3-reentrant": Entry(
        Workload(
            _phi3_reentrant,
            tokens(32064, 4, 2048),
            optimizer=lambda params: torch.optim.RAdam(params, lr=1e-4),
            dtype="bfloat16",
        ),
        "Phi-3 (small), bf16, fused projections, head size 96, reentrant checkpointing, RAdam",
    ),
    "held-olmo2-dropout": library_entry(
        "OLMo-2 (small), fp32, norms after the blocks, dropout in SDPA, Nesterov momentum",
        _OLMO2_SMALL,
        tr.Olmo2ForCausalLM,
        tokens(50304, 3, 768),
        optimizer=lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9, nesterov=True),
    ),
    "held-bart-translate": library_entry(
        "BART base, fp16 autocast, padded sources, shorter targets, dropout in SDPA, Adamax",
        _BART_BASE,
        tr.BartForConditionalGeneration,
        _translated,
        optimizer=lambda params: torch.optim.Adamax(params, lr=1e-4),
        autocast="float16",
    ),
    "held-llama-fp32-adapters": Entry(
        Workload(_adapted_llama, tokens(32000, 4, 1024), optimizer=adamw),
        "Llama 0.6B frozen in bf16, fp32 low-rank adapters with dropout",
    ),
    "held-distillation": Entry(
        distillation, "BERT in fp16 teaches DistilBERT in fp32: logits and hidden states"
    ),
    "held-step-in-backward": Entry(
        stepped_in_backward, "StableLM (small), bf16, an optimizer per parameter that steps in backward"
    ),
    "held-master-weights": Entry(
        master_weights,
        "GPT-J (small), bf16 with fp32 master weights, eight micro-batches, clipping, schedule",
    ),
    "held-mobilenet-channels-last": Entry(
        Workload(
            _mobilenet_channels_last,
            _images_channels_last,
            optimizer=lambda params: torch.optim.RMSprop(params, lr=1e-3, momentum=0.9),
            autocast="float16",
        ),
        "MobileNetV2, fp16 autocast, channels last, depthwise convolutions, RMSprop",
        convolutions=True,
    ),
    "held-segformer": library_entry(
        "SegFormer B0, fp32, a class for each pixel, logits resized to the image",
        partial(tr.SegformerConfig, num_labels=19),
        tr.SegformerForSemanticSegmentation,
        _segmented,
        attention="eager",
        convolutions=True,
    ),
    "held-vit-mae": library_entry(
        "ViT-MAE base, bf16 autocast, three patches in four hidden by sorting noise, clipped gradients",
        tr.ViTMAEConfig,
        tr.ViTMAEForPreTraining,
        _unlabelled,
        optimizer=clipped(adamw),
        autocast="bfloat16",
        convolutions=True,
    ),
    "held-wav2vec2-ctc": library_entry(
        "Wav2Vec2 base, fp32, seven 1-D convolutions over raw sound, CTC loss",
        _WAV2VEC2_BASE,
        tr.Wav2Vec2ForCTC,
        _transcribed,
        convolutions=True,
    ),
}
