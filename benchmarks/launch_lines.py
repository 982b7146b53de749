"""Launch lines as the documentation of frameworks has them: which are predicted, and what others are told.

    python -m benchmarks.launch_lines [--packages FOLDER] [NUMBER ...]

Names of models and data sets on the hub are replaced by folders with a small model and a few rows, which the
benchmark writes. `--packages`: a folder of `pip install --target` with frameworks that are not installed.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from benchmarks import RESULTS, SOURCES
from benchmarks.rows import revision, stored, write

ROWS = RESULTS / "launch_lines.csv"
_SECONDS = 900


class Case(NamedTuple):
    number: int
    framework: str  # the name of its distribution
    source: str  # where such a line stands
    line: str


_SFT = "--torch_dtype bfloat16 --max_length 512 --per_device_train_batch_size 1 --learning_rate 1e-4"
CASES = tuple(
    Case(number, *row)
    for number, row in enumerate(
        (
            ("torch", "examples: mnist", "python main.py --batch-size 64 --epochs 1"),
            (
                "torch",
                "nanoGPT's README",
                "torchrun --standalone --nproc_per_node=4 train.py --batch_size=8 --compile=False",
            ),
            (
                "torch",
                "torchrun's documentation",
                "torchrun --nnodes=2 --nproc-per-node=8 --rdzv-id=100 --rdzv-backend=c10d "
                "--rdzv-endpoint=10.0.0.1:29400 train.py --batch_size=8",
            ),
            (
                "torch",
                "torch.distributed.launch",
                "CUDA_VISIBLE_DEVICES=0,1 python -m torch.distributed.launch --nproc_per_node=2 --use_env "
                "train.py --batch_size 8",
            ),
            ("accelerate", "quick tour", "accelerate launch --mixed_precision bf16 nlp_example.py"),
            (
                "accelerate",
                "documentation of accelerate launch",
                "accelerate launch --multi_gpu --mixed_precision=fp16 --num_processes=2 nlp_example.py",
            ),
            ("accelerate", "FSDP guide", "accelerate launch --config_file fsdp.yaml nlp_example.py"),
            (
                "transformers",
                "examples: language modeling",
                "python run_clm.py --model_name_or_path tiny --per_device_train_batch_size 8 --do_train "
                "--output_dir out",
            ),
            (
                "transformers",
                "FSDP guide",
                'torchrun --nproc_per_node 2 run_clm.py --model_name_or_path tiny --fsdp "full_shard '
                'auto_wrap" --bf16 --per_device_train_batch_size 8 --do_train --output_dir out',
            ),
            ("trl", "README", "trl sft --model_name_or_path tiny --dataset_name chat --output_dir tiny-SFT"),
            (
                "trl",
                "README",
                "trl dpo --model_name_or_path tiny --dataset_name preferences --output_dir tiny-DPO",
            ),
            (
                "trl",
                "command line interfaces",
                "trl sft --model_name_or_path tiny --dataset_name chat --accelerate_config fsdp2 "
                "--num_processes 4 --output_dir tiny-SFT",
            ),
            (
                "litgpt",
                "README",
                "litgpt finetune_lora checkpoints/tiny --data JSON --data.json_path alpaca.json "
                "--data.val_split_fraction 0.1 --out_dir out/custom-model",
            ),
            (
                "litgpt",
                "README",
                "litgpt pretrain pythia-14m --tokenizer_dir checkpoints/tiny --data TextFiles "
                "--data.train_data_path texts --train.max_tokens 10_000_000 --out_dir out/custom-model",
            ),
            ("torchtune", "README", "tune run full_finetune_single_device --config full.yaml"),
            (
                "torchtune",
                "README",
                "tune run --nproc_per_node 2 full_finetune_distributed --config full.yaml",
            ),
            ("llamafactory", "README", "llamafactory-cli train lora_sft.yaml"),
            (
                "llamafactory",
                "examples: several GPUs",
                "FORCE_TORCHRUN=1 NNODES=1 NPROC_PER_NODE=2 llamafactory-cli train lora_sft.yaml",
            ),
            (
                "ms-swift",
                "README",
                "CUDA_VISIBLE_DEVICES=0 swift sft --model tiny --model_type qwen2 --template qwen2_5 "
                f"--tuner_type lora --dataset chat/train.jsonl {_SFT} --output_dir out",
            ),
            ("axolotl", "README", "axolotl train lora.yml"),
            (
                "ultralytics",
                "README",
                "yolo detect train data=shapes.yaml model=yolo11n.yaml epochs=100 imgsz=640",
            ),
            (
                "lightning",
                "Fabric's launch guide",
                "fabric run --accelerator=cuda --strategy=ddp --devices=2 --precision=bf16-mixed "
                "fabric_train.py",
            ),
            (
                "lightning",
                "LightningCLI",
                "python cli.py fit --trainer.max_epochs 1 --trainer.precision bf16-mixed",
            ),
            (
                "deepspeed",
                "integration of transformers",
                "deepspeed --num_gpus=1 run_clm.py --deepspeed ds_config.json --model_name_or_path tiny "
                "--per_device_train_batch_size 8 --do_train --output_dir out",
            ),
            (
                "Slurm",
                "cluster guides",
                "srun --ntasks-per-node=4 --nodes=2 --gpus-per-node=4 python train.py --batch_size=8",
            ),
        ),
        1,
    )
)

# ---------------------------------------------------------------------------------- what the lines name


def _mnist() -> None:
    import argparse

    import torch
    from torch import nn

    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=14)
    given = parser.parse_args()
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36864, 10)
    ).to("cuda")
    optimizer = torch.optim.Adadelta(model.parameters())
    data = torch.utils.data.TensorDataset(torch.randn(1024, 1, 28, 28), torch.randint(10, (1024,)))
    for _ in range(given.epochs):
        for images, labels in torch.utils.data.DataLoader(data, given.batch_size):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images.to("cuda")), labels.to("cuda")).backward()
            optimizer.step()


def _ddp() -> None:
    import argparse
    import os

    import torch
    from torch import nn

    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=12)
    parser.add_argument("--compile", default="True")
    given = parser.parse_args()
    torch.distributed.init_process_group("nccl")
    device = f"cuda:{os.environ['LOCAL_RANK']}"
    torch.cuda.set_device(device)
    layer = nn.TransformerEncoderLayer(512, 8, batch_first=True)
    model = nn.parallel.DistributedDataParallel(nn.TransformerEncoder(layer, 4).to(device))
    optimizer = torch.optim.AdamW(model.parameters())
    while True:
        with torch.autocast("cuda", torch.bfloat16):
            model(torch.randn(given.batch_size, 256, 512, device=device)).mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def _accelerated() -> None:
    import torch
    from accelerate import Accelerator
    from torch import nn

    accelerator = Accelerator()
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.utils.data.DataLoader(torch.randn(512, 1024), 16)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    for batch in data:
        accelerator.backward(model(batch).float().square().mean())
        optimizer.step()
        optimizer.zero_grad()


def _trainer() -> None:
    from dataclasses import dataclass

    import torch
    from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments

    @dataclass
    class ModelArguments:
        model_name_or_path: str = ""

    names, arguments = HfArgumentParser((ModelArguments, TrainingArguments)).parse_args_into_dataclasses()
    model = AutoModelForCausalLM.from_pretrained(names.model_name_or_path)
    rows = [dict.fromkeys(("input_ids", "labels"), torch.arange(256)) for _ in range(64)]
    Trainer(model=model, args=arguments, train_dataset=rows).train()


def _fabric() -> None:
    import torch
    from lightning.fabric import Fabric
    from torch import nn

    fabric = Fabric()
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    for _ in range(5):
        fabric.backward(model(torch.randn(16, 1024, device=fabric.device)).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def _lightning_cli() -> None:
    from lightning.pytorch.cli import LightningCLI
    from lightning.pytorch.demos.boring_classes import BoringDataModule, DemoModel

    LightningCLI(DemoModel, BoringDataModule)


_PROGRAMS = {
    "main.py": _mnist,
    "train.py": _ddp,
    "nlp_example.py": _accelerated,
    "run_clm.py": _trainer,
    "fabric_train.py": _fabric,
    "cli.py": _lightning_cli,
}
_CONFIGS = {
    "fsdp.yaml": """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: SIZE_BASED_WRAP, fsdp_min_num_params: 1000,
  fsdp_state_dict_type: SHARDED_STATE_DICT}
mixed_precision: bf16
num_machines: 1
num_processes: 2
""",
    "ds_config.json": """
{"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
 "zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}}
""",
    "full.yaml": """
output_dir: out
tokenizer: {_component_: torchtune.models.qwen2.qwen2_tokenizer, path: tiny/vocab.json,
  merges_file: tiny/merges.txt, max_seq_len: 256}
dataset: {_component_: torchtune.datasets.alpaca_dataset, source: json, data_files: alpaca.json, split: train,
  packed: False}
model: {_component_: torchtune.models.qwen2.qwen2, vocab_size: 152064, num_layers: 2, num_heads: 4,
  num_kv_heads: 2, embed_dim: 256, intermediate_dim: 512, max_seq_len: 1024, attn_dropout: 0.0,
  norm_eps: 1.0e-6, rope_base: 1000000.0, tie_word_embeddings: True}
checkpointer: {_component_: torchtune.training.FullModelTorchTuneCheckpointer, checkpoint_dir: tuned,
  checkpoint_files: [model.pt], recipe_checkpoint: null, output_dir: out, model_type: QWEN2}
resume_from_checkpoint: False
seed: null
shuffle: True
batch_size: 2
epochs: 1
optimizer: {_component_: torch.optim.AdamW, lr: 2.0e-5, fused: True}
optimizer_in_bwd: False
loss: {_component_: torchtune.modules.loss.CEWithChunkedOutputLoss}
max_steps_per_epoch: null
gradient_accumulation_steps: 1
clip_grad_norm: null
compile: False
device: cuda
enable_activation_checkpointing: False
enable_activation_offloading: False
dtype: bf16
metric_logger: {_component_: torchtune.training.metric_logging.DiskLogger, log_dir: logs}
log_every_n_steps: 1
log_peak_memory_stats: False
""",
    "lora_sft.yaml": """
model_name_or_path: tiny
stage: sft
do_train: true
finetuning_type: lora
lora_target: all
dataset: alpaca
dataset_dir: .
template: qwen
cutoff_len: 256
preprocessing_num_workers: 1
dataloader_num_workers: 0
output_dir: saves
per_device_train_batch_size: 1
learning_rate: 1.0e-4
num_train_epochs: 1.0
bf16: true
report_to: none
""",
    "dataset_info.json": '{"alpaca": {"file_name": "alpaca.json"}}',
    "lora.yml": """
base_model: tiny
datasets: [{path: alpaca.json, type: alpaca}]
output_dir: out
sequence_len: 256
adapter: lora
lora_r: 16
lora_alpha: 32
lora_target_linear: true
micro_batch_size: 2
gradient_accumulation_steps: 1
num_epochs: 1
optimizer: adamw_torch
learning_rate: 0.0002
bf16: true
""",
    "shapes.yaml": "path: {folder}/shapes\ntrain: images\nval: images\nnames: {0: square}\n",
}


def _write_all(folder: Path) -> None:
    for name, program in _PROGRAMS.items():
        body = ast.unparse(ast.parse(inspect.getsource(program)).body[0].body)  # type: ignore[attr-defined]
        (folder / name).write_text(body + "\n")
    for name, text in _CONFIGS.items():
        (folder / name).write_text(text.replace("{folder}", str(folder)).lstrip())
    rows = [
        {"instruction": f"Count to {n}.", "input": "", "output": " ".join(map(str, range(1, n + 1)))}
        for n in range(1, 101)
    ]
    (folder / "alpaca.json").write_text(json.dumps(rows))
    says = [_turns(row["instruction"], row["output"]) for row in rows]
    _write_rows(folder / "chat", [{"messages": each} for each in says])
    _write_rows(
        folder / "preferences",
        [{"prompt": each[:1], "chosen": each[1:], "rejected": _turns("", "No.")[1:]} for each in says],
    )
    (folder / "texts").mkdir()
    for index in range(2):
        (folder / "texts" / f"{index}.txt").write_text("\n".join(row["output"] for row in rows) * 40)
    _write_images(folder / "shapes")
    _write_model(folder / "tiny")


def _turns(asked: str, answered: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]


def _write_rows(folder: Path, rows: list[dict[str, object]]) -> None:
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _write_images(folder: Path) -> None:
    import numpy
    from PIL import Image

    for name in ("images", "labels"):
        (folder / name).mkdir(parents=True)
    for index in range(64):
        pixels = numpy.full((320, 320, 3), 40 * (index % 6), dtype=numpy.uint8)
        Image.fromarray(pixels).save(folder / "images" / f"{index}.jpg")
        (folder / "labels" / f"{index}.txt").write_text("0 0.5 0.5 0.25 0.25\n")


def _write_model(folder: Path) -> None:
    """Qwen2 with a byte-level vocabulary; also as litgpt and torchtune keep it."""
    import torch
    import transformers
    from tokenizers import ByteLevelBPETokenizer

    folder.mkdir()
    words = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator([Path(__file__).read_text()] * 4, vocab_size=600, special_tokens=words)
    trained.save_model(str(folder))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=trained._tokenizer, eos_token=words[2], pad_token=words[0]
    )
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    config = transformers.Qwen2Config(
        vocab_size=640,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        eos_token_id=2,
        pad_token_id=0,
    )
    transformers.Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    _write_litgpt(folder, folder.parent / "checkpoints" / "tiny")
    _write_torchtune(folder.parent / "tuned")


def _write_litgpt(tokenizer: Path, folder: Path) -> None:
    """pythia-14m with a smaller vocabulary."""
    import torch

    try:
        from litgpt import GPT, Config
        from litgpt.utils import save_config
    except ImportError:
        return
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder)
    config = Config.from_name("pythia-14m")
    save_config(config, folder)
    torch.save(GPT(config).state_dict(), folder / "lit_model.pth")


def _write_torchtune(folder: Path) -> None:
    import torch
    import yaml

    try:
        from torchtune.models.qwen2 import qwen2
    except ImportError:
        return
    folder.mkdir()
    given = yaml.safe_load(_CONFIGS["full.yaml"])["model"]
    given.pop("_component_")
    torch.save(qwen2(**given).to(torch.bfloat16).state_dict(), folder / "model.pt")


def _write_console_scripts(packages: Path) -> None:
    """`pip install --target` keeps those of the last package alone."""
    folder = packages / "bin"
    folder.mkdir(exist_ok=True)
    for distribution in metadata.distributions(path=[str(packages)]):
        for point in distribution.entry_points:
            if point.group == "console_scripts":
                module, _, name = point.value.partition(":")
                text = f"import sys\nfrom {module} import {name}\nsys.exit({name}())\n"
                (folder / point.name).write_text(f"#!{sys.executable}\n{text}")
                (folder / point.name).chmod(0o755)


# ------------------------------------------------------------------------------------------- the rows


def predicted(case: Case, folder: Path, environment: dict[str, str]) -> dict[str, object]:
    command = f"{sys.executable} -m oomph predict --gpu a100-40gb --json -- {case.line}"
    began = time.monotonic()
    try:
        done = subprocess.run(
            command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=_SECONDS
        )
        status, output, errors = str(done.returncode), done.stdout, done.stderr
    except subprocess.TimeoutExpired:
        status, output, errors = "timeout", "", f"no answer in {_SECONDS} s"
    seconds = round(time.monotonic() - began, 1)
    found = json.loads(output) if status in ("0", "1") else None
    answer = "" if found else next((one for one in reversed(errors.strip().splitlines())), "")
    outcome = "predicted" if found else {"2": "answered", "3": "program failed"}.get(status, "failed")
    return {
        **case._asdict(),
        "outcome": outcome,
        "answer": answer.replace(str(folder), ".").replace(sys.prefix, "ENV"),
        "peak_mib": round(found["peak"]["allocated"] / 2**20, 1) if found else "",
        "ranks": (found["launch"]["ranks"] or "") if found else "",
        "seconds": seconds,
        "version": _version(case.framework),
        "torch": _version("torch"),
    }, errors


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("numbers", nargs="*", type=int)
    parser.add_argument("--packages", type=Path)
    parser.add_argument("--keep", type=Path, help="write the programs here, and what each line printed")
    given = parser.parse_args()
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (*SOURCES, environment.get("PYTHONPATH"))))
    if given.packages is not None:
        sys.path.append(str(given.packages))
        _write_console_scripts(given.packages)
        environment["PATH"] = f"{given.packages / 'bin'}{os.pathsep}{environment['PATH']}"
        environment["PYTHONPATH"] += f"{os.pathsep}{given.packages}"
    with tempfile.TemporaryDirectory() as made:
        folder = given.keep or Path(made)
        if not (folder / "tiny").exists():
            folder.mkdir(exist_ok=True)
            _write_all(folder)
        for case in CASES:
            if given.numbers and case.number not in given.numbers:
                continue
            row, errors = predicted(case, folder, environment)
            if given.keep:
                (folder / f"{case.number}.txt").write_text(errors)
            print(
                *(row[name] for name in ("number", "framework", "outcome", "peak_mib", "answer")), flush=True
            )
            rows: dict[str, dict[str, object]] = {each["number"]: each for each in stored(ROWS)}  # type: ignore[misc]
            rows[str(case.number)] = {**row, **revision()}
            write(ROWS, [rows[key] for key in sorted(rows, key=int)])
    outcomes = [row["outcome"] for row in stored(ROWS)]
    print(f"{outcomes.count('predicted')} of {len(outcomes)} predicted")


if __name__ == "__main__":
    main()
