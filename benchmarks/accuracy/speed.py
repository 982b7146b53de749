"""How long a prediction takes and how much host memory, in a fresh process each, after import.

python -m benchmarks.accuracy.speed [names...]    # prints a row each and writes results/speed.csv
"""

from __future__ import annotations

import csv
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable

from benchmarks import RESULTS

OUT = RESULTS / "speed.csv"
LLAMA_8B = {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336, "vocab_size": 128256}
LLAMA_8B |= {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072}
LONG_4B = {"hidden_size": 2560, "num_hidden_layers": 36, "intermediate_size": 9216, "vocab_size": 151936}
LONG_4B |= {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 80,
    "max_position_embeddings": 131072,
}
LLAMA_1B = {"hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192, "vocab_size": 128256}
LLAMA_1B |= {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192}


def _llama(sizes: dict[str, int], batch: int, length: int, checkpointing: bool) -> Callable[[], object]:
    def build() -> object:
        import transformers as tr

        from benchmarks.accuracy.workloads.entry import from_config, tokens
        from oomph import Workload

        model = from_config(lambda: tr.LlamaConfig(**sizes), tr.LlamaForCausalLM, checkpointing=checkpointing)
        return Workload(model, tokens(sizes["vocab_size"], batch, length), dtype="bfloat16")

    return build


def _gpt2() -> object:
    import transformers as tr

    from benchmarks.accuracy.workloads.entry import from_config, tokens
    from oomph import Workload

    return Workload(from_config(tr.GPT2Config, tr.GPT2LMHeadModel), tokens(50257, 8, 1024))


CASES: dict[str, Callable[[], object]] = {
    "gpt2": _gpt2,
    "llama-1b": _llama(LLAMA_1B, 2, 2048, False),
    "4b-36-layers-131072": _llama(LONG_4B, 1, 131072, True),
    "llama-8b": _llama(LLAMA_8B, 1, 4096, False),
}


def here(name: str) -> None:
    import oomph

    workload = CASES[name]()
    began = time.perf_counter()
    prediction = oomph.predict(workload, gpu="h200")  # type: ignore[arg-type]
    seconds = time.perf_counter() - began
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"{seconds:.2f} {host} {len(prediction.events)} {prediction.peak.allocated}")


def main() -> None:
    rows = []
    for name in sys.argv[1:] or CASES:
        environment = {**os.environ, "SPEED_CASE": name}
        out = subprocess.run(
            [sys.executable, "-m", "benchmarks.accuracy.speed"],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        seconds, host, events, peak = out.stdout.split()
        rows.append(
            [name, os.cpu_count(), seconds, f"{int(host) / 2**30:.2f}", events, f"{int(peak) / 2**30:.2f}"]
        )
        print(
            f"{name:24s} {seconds:>7s} s   host {rows[-1][3]} GiB   {events} events   peak {rows[-1][5]} GiB"
        )
    with OUT.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["case", "cores", "seconds", "host_gib", "events", "predicted_peak_gib"])
        writer.writerows(rows)


if __name__ == "__main__":
    if "SPEED_CASE" in os.environ:
        here(os.environ["SPEED_CASE"])
    else:
        main()
