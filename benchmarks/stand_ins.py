"""Public programs that import flash_attn, xformers, mamba_ssm or causal_conv1d, predicted without them.

    python -m benchmarks.stand_ins FOLDER

FOLDER holds the repositories below, each under its name; their other requirements are installed. A program is
a public model with its own code, and a training step of ours: AdamW, in bf16 or under its autocast. No GPU
measured these rows: they show that the programs run with the stand-ins, what they then need, and which
packages stood in. Written to results/stand_ins.csv.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import oomph
from benchmarks import ROOT, rows

RESULTS = ROOT / "benchmarks" / "results" / "stand_ins.csv"
GPU = "a100-40gb"
Step = Callable[[], Any]


@dataclass
class Row:
    program: str
    source: str  # a repository, or a distribution and its version
    stand_ins: str  # that the prediction notes
    gpu: str
    outcome: str  # "predicted", or the error
    allocated: int | None
    reserved: int | None
    seconds: float
    torch: str
    commit: str
    date: str


def _trained(model: torch.nn.Module, loss: Callable[[], torch.Tensor]) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _tokens(batch: int, length: int, vocabulary: int) -> torch.Tensor:
    return torch.randint(0, vocabulary, (batch, length), device="cuda")


def _dinov2() -> Step:
    """Two global and six local crops, in one forward pass of nested tensors."""
    from dinov2.models.vision_transformer import vit_small

    model = vit_small(patch_size=14, img_size=224, ffn_layer="swiglufused", drop_path_rate=0.3)
    model = model.cuda().bfloat16().train()
    crops = [
        torch.randn(count * 8, 3, size, size, device="cuda", dtype=torch.bfloat16)
        for count, size in ((2, 224), (6, 98))
    ]

    def loss() -> torch.Tensor:
        found = model(crops, masks=[None, None], is_training=True)
        return sum(each["x_norm_patchtokens"].float().square().mean() for each in found)

    return _trained(model, loss)


def _lingua() -> Step:
    from apps.main.transformer import LMTransformer, LMTransformerArgs

    args = LMTransformerArgs(dim=512, n_layers=4, n_heads=8, n_kv_heads=4, vocab_size=32000, seed=0)
    model = LMTransformer(args).cuda().bfloat16()
    model.init_weights()
    tokens = _tokens(4, 1024, 32000)
    return _trained(model, lambda: model(tokens, tokens, attn_impl="fmha"))


_DIFFUSION = {"hidden_size": 512, "n_heads": 8, "cond_dim": 128, "n_blocks": 4, "dropout": 0.1}


def _masked_diffusion(make: Callable[[dict[str, Any]], torch.nn.Module]) -> Step:
    model = make({**_DIFFUSION, "scale_by_sigma": False}).cuda()
    tokens = _tokens(4, 1024, 1000)
    sigma = torch.rand(4, device="cuda")
    return _trained(model, lambda: F.cross_entropy(model(tokens, sigma).flatten(0, 1), tokens.flatten()))


def _mdlm() -> Step:
    from models.dit import DIT

    return _masked_diffusion(lambda config: DIT({"model": config}, vocab_size=1001))


def _mdlm_mamba() -> Step:
    from models.dimamba import DiMamba
    from omegaconf import OmegaConf

    of_mamba = {"scale_by_sigma": False, "tie_word_embeddings": False, "temb_strategy": "adaln"}
    config = OmegaConf.create({"model": {**_DIFFUSION, **of_mamba}})
    model = DiMamba(config, vocab_size=1001, pad_token_id=0).cuda()
    tokens, sigma = _tokens(2, 1024, 1000), torch.rand(2, device="cuda")

    def loss() -> torch.Tensor:
        found = model(tokens, sigma)
        logits = found[0] if isinstance(found, tuple) else getattr(found, "logits", found)
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())

    return _trained(model, loss)


def _sedd() -> Step:
    from model import SEDD

    def make(config: dict[str, Any]) -> torch.nn.Module:
        return SEDD({"graph": {"type": "absorb"}, "tokens": 1000, "model": config})

    return _masked_diffusion(make)


def _caduceus() -> Step:
    """The model without its head, which ties weights as transformers no longer does."""
    from caduceus import Caduceus, CaduceusConfig

    config = CaduceusConfig(
        d_model=256,
        n_layer=4,
        vocab_size=16,
        ssm_cfg={"d_state": 16},
        rcps=True,
        complement_map={index: index for index in range(16)},
    )
    model = Caduceus(config).cuda().bfloat16()
    tokens = _tokens(4, 4096, 16)
    return _trained(model, lambda: model(tokens, return_dict=True)[0].float().square().mean())


def _mamba_lm(layer: str) -> Step:
    from mamba_ssm.models.config_mamba import MambaConfig
    from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel

    config = MambaConfig(d_model=768, n_layer=24, vocab_size=50277, ssm_cfg={"layer": layer})
    model = MambaLMHeadModel(config, device="cuda", dtype=torch.bfloat16)
    tokens = _tokens(4, 2048, 50277)
    return _trained(
        model, lambda: F.cross_entropy(model(tokens).logits.flatten(0, 1).float(), tokens.flatten())
    )


def _llama() -> Step:
    """Batches with padding: sequences are joined, and attention takes their starts."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=4,
        attn_implementation="flash_attention_2",
    )
    model = LlamaForCausalLM(config).cuda().bfloat16()
    tokens = _tokens(4, 2048, 32000)
    mask = torch.ones_like(tokens)
    mask[:, :200] = 0
    return _trained(model, lambda: model(tokens, attention_mask=mask, labels=tokens).loss)


def _transformers_mamba() -> Step:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(hidden_size=768, num_hidden_layers=4, use_cache=False)
    model = MambaForCausalLM(config).cuda().bfloat16().train()
    tokens = _tokens(4, 1024, 50280)
    return _trained(model, lambda: model(tokens, labels=tokens).loss)


def _unet() -> Step:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=64, block_out_channels=(128, 256, 512, 512), cross_attention_dim=768
    )
    model = model.cuda().bfloat16()
    model.enable_xformers_memory_efficient_attention()
    like = {"device": "cuda", "dtype": torch.bfloat16}
    latents, states = torch.randn(4, 4, 64, 64, **like), torch.randn(4, 77, 768, **like)
    steps = torch.randint(0, 1000, (4,), device="cuda")
    return _trained(model, lambda: model(latents, steps, states).sample.float().square().mean())


# Program: where its code is, and its training step.
PROGRAMS: dict[str, tuple[str, Step]] = {
    "DINOv2 ViT-S/14, SwiGLU": ("facebookresearch/dinov2", _dinov2),
    "lingua transformer": ("facebookresearch/lingua", _lingua),
    "MDLM DiT": ("kuleshov-group/mdlm", _mdlm),
    "MDLM DiMamba": ("kuleshov-group/mdlm", _mdlm_mamba),
    "SEDD": ("louaaron/Score-Entropy-Discrete-Diffusion", _sedd),
    "Caduceus": ("kuleshov-group/caduceus", _caduceus),
    "Mamba 130m": ("state-spaces/mamba", partial(_mamba_lm, "Mamba1")),
    "Mamba 2 130m": ("state-spaces/mamba", partial(_mamba_lm, "Mamba2")),
    "Llama, flash_attention_2, padded": ("transformers", _llama),
    "Mamba of transformers": ("transformers", _transformers_mamba),
    "UNet, xformers": ("diffusers", _unet),
}


def measure(folder: Path, program: str) -> Row:
    source, step = PROGRAMS[program]
    checkout = folder / source.partition("/")[2]

    def setup() -> Step:
        if "/" in source:
            sys.path.insert(0, str(checkout))
        return step()

    allocated = reserved = None
    stand_ins, seconds = "", 0.0
    try:
        found = oomph.predict(setup, gpu=GPU)
        outcome, seconds = "predicted", round(found.seconds, 1)
        allocated, reserved = found.peak.allocated, found.peak.reserved
        notes = (note.text for note in found.notes if "a stand-in has its" in note.text)
        stand_ins = " ".join(sorted(text.partition(" ")[0] for text in notes))
    except oomph.OomphError as error:
        outcome = str(error).splitlines()[0]
    if "/" not in source:
        source = f"{source} {importlib.metadata.version(source)}"
    version = torch.__version__.partition("+")[0]
    return Row(
        program,
        source,
        stand_ins,
        GPU,
        outcome,
        allocated,
        reserved,
        seconds,
        version,
        **rows.revision(),
    )


def main() -> Iterator[Row]:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("programs", nargs="*", choices=[[], *PROGRAMS])
    given = parser.parse_args()
    for program in given.programs or PROGRAMS:
        row = measure(given.folder, program)
        print(row.program, row.outcome, row.stand_ins, row.allocated, row.reserved, sep="  ", flush=True)
        yield row


if __name__ == "__main__":
    rows.write(RESULTS, list(main()))
