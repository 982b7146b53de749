"""How long predictions take beyond imports, and how much host memory, in a fresh process each.

python -m benchmarks.accuracy.speed [names...]    # prints a row each and writes results/speed.csv

`seconds` are those of the CPU, of the predicting process and of its child, after the imports: on a machine
that does nothing else, they are the time that passes. nanogpt is predicted if NANOGPT names a clone of
karpathy/nanoGPT, with its data/openwebtext/train.bin and val.bin; its train.py runs with its defaults.
"""

from __future__ import annotations

import os
import resource
import sys
from functools import partial
from typing import Any

from benchmarks import RESULTS
from benchmarks.rows import in_process, send, stored, write

OUT = RESULTS / "speed.csv"
FIELDS = ("case", "cores", "seconds", "threshold_seconds", "host_gib", "events", "predicted_peak_gib")
LLAMA = {"vocab_size": 128256, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA_1B = {"hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192, **LLAMA}
LLAMA_8B = {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336, **LLAMA}
QWEN3 = {"hidden_size": 1024, "num_hidden_layers": 28, "intermediate_size": 3072, "num_attention_heads": 16}
QWEN3 |= {"num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True}
MAMBA = {"hidden_size": 768, "num_hidden_layers": 24, "vocab_size": 50280}


def transformer(
    name: str, batch: int, length: int, accumulate: int = 1, dtype: str | None = "bfloat16", **sizes: int
) -> Any:
    import transformers

    from benchmarks.accuracy.workloads.entry import from_config, tokens
    from oomph import Workload

    config = getattr(transformers, f"{name}Config")
    attention = "eager" if name == "Mamba" else "sdpa"
    head = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    model = from_config(partial(config, **sizes), getattr(transformers, name + head), attention=attention)
    ids = tokens(config(**sizes).vocab_size, batch, length)
    return Workload(model, ids, dtype=dtype, accumulate=accumulate)


def of_config(path: str, *overrides: str) -> Any:
    from oomph_lab.training.config import load
    from oomph_lab.training.step import predicted_workload

    return predicted_workload(load(path, overrides))


def _nanogpt() -> Any:
    from oomph.prediction import Script

    os.chdir(os.environ["NANOGPT"])
    return Script("train.py")


# What is predicted, and the seconds that it may take.
CASES: dict[str, tuple[partial[Any], float]] = {
    "gpt2": (partial(transformer, "GPT2", 8, 1024, dtype=None), 2),
    "llama-1b": (partial(transformer, "Llama", 2, 2048, **LLAMA_1B), 3),
    "llama-8b": (partial(transformer, "Llama", 1, 4096, **LLAMA_8B), 4),
    "longctx-4b-nsa-131072": (
        partial(of_config, "configs/longctx_4b.yaml", "model.attention=nsa", "data.context_length=131072"),
        20,
    ),
    # The threshold was set when 28 s were needed: those of 2 x 16 tokens with the code of that day.
    "mamba-130m": (partial(transformer, "Mamba", 2, 32, **MAMBA), 8),
    "qwen3-0.6b": (partial(transformer, "Qwen3", 2, 2048, **QWEN3), 0),
    "qwen3-0.6b-4-batches": (partial(transformer, "Qwen3", 2, 2048, accumulate=4, **QWEN3), 0),
    "nanogpt": (partial(_nanogpt), 60),
}
MOST_FOR_FOUR_BATCHES = 1.3  # times one batch


def cpu_seconds() -> float:
    used = (resource.getrusage(of) for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def predict_case(name: str) -> None:
    import oomph
    from oomph.torch_internals import FakeTensorMode

    FakeTensorMode()  # its imports are imports, too
    target = CASES[name][0]()
    before = cpu_seconds()
    prediction = oomph.predict(target, gpu="h200")
    seconds = cpu_seconds() - before
    most = (resource.getrusage(of).ru_maxrss for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    send([f"{seconds:.2f}", max(most) * 1024, len(prediction.events), prediction.peak.allocated])


def main() -> None:
    rows = {row["case"]: row for row in stored(OUT)}
    for name in sys.argv[1:] or [name for name in CASES if name != "nanogpt" or "NANOGPT" in os.environ]:
        seconds, host, events, peak = in_process("benchmarks.accuracy.speed", SPEED_CASE=name)
        threshold = CASES[name][1]
        if name == "qwen3-0.6b-4-batches":
            threshold = MOST_FOR_FOUR_BATCHES * float(rows["qwen3-0.6b"]["seconds"])
        found = (
            name,
            os.cpu_count(),
            seconds,
            f"{threshold:.1f}" if threshold else "",
            f"{host / 2**30:.2f}",
        )
        rows[name] = dict(zip(FIELDS, (*found, events, f"{peak / 2**30:.2f}"), strict=True))
        print(" ".join(map(str, rows[name].values())), flush=True)
    write(OUT, [rows[name] for name in CASES if name in rows], FIELDS)


if __name__ == "__main__":
    if "SPEED_CASE" in os.environ:
        predict_case(os.environ["SPEED_CASE"])
    else:
        main()
