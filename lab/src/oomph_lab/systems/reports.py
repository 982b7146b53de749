"""The field reports as data: what failed, the report's commands and ours, and the forms to predict.

`oomph systems NAME` predicts the forms. The claims of the reports are the rows of claims.csv, which
`python -m lab.benchmarks.systems figures` writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class ReportedRun:
    """The run that failed, as the report gives it. preset: of the system's config."""

    gpu: str
    preset: str
    batch: int
    tokens: int


@dataclass(frozen=True)
class FormRun:
    """A form of the system at the report's shape: `oomph predict configs/CONFIG.yaml OVERRIDES --gpu GPU`."""

    what: str
    config: str
    overrides: tuple[str, ...] = ()

    def command(self, gpu: str) -> str:
        return " ".join(["oomph predict", f"configs/{self.config}.yaml", *self.overrides, "--gpu", gpu])


@dataclass(frozen=True)
class Report:
    """failed: what ran out of memory, where. commands: the report's own -> the one that does it here."""

    failed: str
    gpu: str
    commands: Mapping[str, str]
    forms: tuple[FormRun, ...]


# The report's shape of each system.
_HATCHLING = ("data.curriculum=null", "data.seq_len=256", "data.batch_size=16", "training.accumulate=1")
_PYTHIA = ("data.batch_size=8", "data.seq_len=512", "training.steps=1")
_LONGCTX = ("training.accumulate=1",)
_NPT = ("data.batch_size=4", "data.max_length=512", "training.accumulate=1")
_GINR = ("training.autocast=null", "training.cuda_graph=false")  # the report trains in fp32
REPORTS: Mapping[str, Report] = {
    "hatchling": Report(
        failed="transitions = decay_diag - forget_rank1: a 64 x 64 matrix for every token and head",
        gpu="rtx3090",
        commands={
            "bash scripts/run_pretrain.sh configs/hn_xs.yaml": "bash scripts/run_pretrain.sh configs/hn_xs.yaml",
            "kda_memory_chunk_size: 64": "oomph predict configs/hn_xs.yaml form=chunked_updates "
            "kda_memory_chunk_size=64 curriculum=null seq_len=256 batch_size=16 accumulate=1 --gpu rtx3090",
            # Tracing a loop over tokens takes long: as many tokens in shorter rows.
            "kda_mode: sequential": "oomph predict configs/hn_xs.yaml kda_mode=sequential curriculum=null "
            "seq_len=32 batch_size=128 accumulate=1 --gpu rtx3090",
            "batch_tokens": "oomph train configs/hn_xs.yaml batch_tokens=2048",
        },
        forms=(
            FormRun("naive", "hn_xs", ("form=naive", *_HATCHLING)),
            FormRun("the report's fix, chunks of 64", "hn_xs", ("form=chunked_updates", *_HATCHLING)),
            FormRun("model", "hn_xs", _HATCHLING),
        ),
    ),
    "pythia": Report(
        failed="matrix products by broadcasting, [8, 8, 512, 512, 64], two per layer; one-hot vectors from a V x V identity",
        gpu="a100-80gb",
        commands={
            "python apps/train_pythia.py --dataset wikitext-2 --vocab_size 10000 --batch_size 32 --seq_len 128 "
            "--epochs 10 --sparse": "oomph train configs/pythia_70m.yaml --dataset wikitext-2 --vocab_size 10000 "
            "--batch_size 32 --seq_len 128 --epochs 10 --sparse",
            "python apps/train_pythia.py --dataset wikitext-2 --vocab_size 10000 --batch_size 32 --device cuda "
            "--sparse": "oomph train configs/pythia_70m.yaml --dataset wikitext-2 --vocab_size 10000 --batch_size 32 "
            "--device cuda --sparse",
            "create_pythia_70m(vocab_size=10000, ...)[1].get_total_params()": "python -m lab.benchmarks.systems.report_checks pythia",
            "make clean; make": "python -m lab.benchmarks.systems.matmul  # the kernels compared; Triton builds them on first use",
        },
        forms=(
            FormRun("naive", "pythia_70m", ("form=naive", "model.vocab_size=50304", *_PYTHIA)),
            FormRun("naive with the report's cap", "pythia_70m", ("form=naive", *_PYTHIA)),
            FormRun("all words, nothing else", "pythia_70m", ("form=all_words", *_PYTHIA)),
            FormRun("all batches on the GPU, nothing else", "pythia_70m", ("form=all_batches", *_PYTHIA)),
            FormRun("model", "pythia_70m", ("model.vocab_size=50304", *_PYTHIA)),
        ),
    ),
    "longctx": Report(
        failed="logits = self.lm_head(hidden_states): 131,072 x 151,936 logits, then a cast to fp32 and its log-softmax",
        gpu="rtx-pro-6000",  # the report names 94.97 GiB
        commands={
            "python profile_memory.py --model_size 4B --context_length 131072": "oomph predict --stages "
            "configs/longctx_4b.yaml --model_size 4B --context_length 131072",
            "python profile_memory.py --model_size 4B --context_length 131072 --attention_type nsa": "oomph predict "
            "--stages configs/longctx_4b.yaml --model_size 4B --context_length 131072 --attention_type nsa",
            "python verify_chunked_loss.py": "python -m lab.benchmarks.systems.report_checks longctx",
            "torchrun --nproc_per_node=2 train.py --model_size 4B --context_length 131072 --gradient_checkpointing "
            "--batch_size 1 --gradient_accumulation_steps 4": "torchrun --nproc_per_node=2 -m oomph train "
            "configs/longctx_4b.yaml --model_size 4B --context_length 131072 --gradient_checkpointing --batch_size 2 "
            "--gradient_accumulation_steps 4  # FSDP2; --batch_size is that of both GPUs",
            "sequence parallelism (future work)": "torchrun --nproc_per_node=2 -m oomph train "
            "configs/longctx_4b.yaml --batch_size 1 parallel.cp=2",
            "batch size 1, gradient checkpointing": "oomph train configs/longctx_4b_24gb.yaml  # one GPU of 24 GiB",
        },
        forms=(
            FormRun("naive", "longctx_4b", ("form=naive", *_LONGCTX)),
            FormRun("the report's chunked loss", "longctx_4b", ("form=chunked_loss", *_LONGCTX)),
            FormRun("the report's RoPE bug", "longctx_4b", ("form=rope_on_cpu", *_LONGCTX)),
            FormRun("model", "longctx_4b", _LONGCTX),
        ),
    ),
    "npt": Report(
        failed="delta_w = einsum('bsr,dr,rf->bsdf', ...): a weight matrix for each of 2,048 tokens, in 16 layers",
        gpu="79GiB",
        commands={
            "python memory_efficiency_test.py": "python -m lab.benchmarks.systems.report_checks npt",
            "./launch_optimized.sh small": "scripts/launch_optimized.sh small",
            "./launch_optimized.sh optimized": "scripts/launch_optimized.sh optimized",
            "python3 train_npt_optimized.py --config config_optimized.yaml": "oomph train configs/npt_optimized.yaml",
            "optimization: use_cpu_offload, mixed_precision, use_8bit": "oomph train configs/npt_default.yaml "
            "use_cpu_offload=true mixed_precision=fp16 use_8bit=true",
        },
        forms=(
            FormRun("naive", "npt_default", ("form=naive", *_NPT)),
            FormRun(
                "the report's fix, token by token; 8 of its 512 tokens",
                "npt_default",
                ("form=per_token", "data.batch_size=4", "data.max_length=8", "training.accumulate=1"),
            ),
            FormRun("the report's fix, tokens in chunks", "npt_default", ("form=per_chunk", *_NPT)),
            FormRun("model", "npt_default", _NPT),
        ),
    ),
    "ginr": Report(
        failed="Attention(512, heads=8) over 1,024 positions in nine places: a [512, 1024, 1024] matrix each",
        gpu="40GiB",
        commands={
            "solution 1, feed-forwards": "oomph predict configs/ginr_solution_1.yaml form=naive --gpu 40GiB",
            "solution 2, cross-attention": "oomph predict configs/ginr_solution_2.yaml form=naive --gpu 40GiB",
            "solution 3, batch 16": "oomph predict configs/ginr_solution_3.yaml form=naive --gpu 40GiB",
            "solution 4, checkpointing": "oomph predict configs/ginr_solution_4.yaml form=naive --gpu 40GiB "
            "--fix activation_checkpointing",
            "solution 5, resolution": "oomph predict configs/ginr_solution_5.yaml form=naive --gpu 40GiB",
            "SCENT: fewer queries": "oomph train configs/ginr_scent_queries.yaml",
            "the original's ResidualBlocks": "oomph train configs/ginr_residual.yaml",
        },
        forms=(
            FormRun("naive", "ginr", ("form=naive", *_GINR)),
            *(
                FormRun(f"solution {number}", f"ginr_solution_{number}", ("form=naive",))
                for number in (1, 2, 3)
            ),
            FormRun("solution 4", "ginr_solution_4", ("form=naive", "fixes=[activation_checkpointing]")),
            FormRun("solution 5", "ginr_solution_5", ("form=naive",)),
            FormRun("model", "ginr", _GINR),
        ),
    ),
}
