"""The workspaces that cuDNN takes for recurrent networks, with random sizes and options.

python -m benchmarks.accuracy.recurrent measure --seconds 120 --out FILE.csv    # on a GPU
python -m benchmarks.accuracy.recurrent compare [FILE.csv]                      # anywhere
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import RESULTS
from benchmarks.rows import stored, write
from oomph.prediction.ops.recurrent import RecurrentCall, workspace_bytes

ROWS = RESULTS / "recurrent_h200.csv"
WIDTHS = (8, 20, 32, 64, 100, 128, 129, 144, 160, 192, 200, 224, 256, 300, 384, 400, 512, 650, 1024)
DTYPES = ("float32", "float32", "float32", "float16", "float64", "bfloat16")
MOST_STATES = 40_000_000  # of one network


def random_network(rng: random.Random) -> dict[str, Any]:
    cell = rng.choice(("LSTM", "GRU", "RNN"))
    hidden = rng.choice(WIDTHS)
    layers = rng.choice((1, 1, 2, 3, 4, 6))
    return {
        "cell": cell,
        "steps": rng.choice((1, 2, 5, 10, 20, 35, 50, 100, 150, 300)),
        "batch": rng.choice((1, 4, 8, 16, 20, 32, 64, 100, 128, 256, 512)),
        "inputs": rng.choice((hidden, hidden, rng.choice((1, 8, 28, *WIDTHS)))),
        "hidden": hidden,
        "projection": hidden // 2 if cell == "LSTM" and rng.random() < 0.08 else 0,
        "layers": layers,
        "directions": rng.choice((1, 1, 2)),
        "dropout": int(layers > 1 and rng.random() < 0.3),
        "dtype": rng.choice(DTYPES),
        "packed": int(rng.random() < 0.12),
        "train": int(rng.random() > 0.06),
    }


def workspace(run: Callable[[], Any]) -> tuple[Any, int]:
    """What it returns, and the largest block that was freed again."""
    torch.cuda.memory._record_memory_history(context=None, stacks="python")
    out = run()
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    made = {event["size"] for event in trace if event["action"] == "alloc"}
    freed = {event["size"] for event in trace if event["action"] == "free_completed"}
    # The backward pass also frees the reserve of the forward pass, which it has not made.
    return out, max(made & freed, default=0)


def measure(seconds: float, seed: int) -> Iterator[dict[str, Any]]:
    rng = random.Random(seed)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        row = random_network(rng)
        if row["steps"] * row["batch"] * row["hidden"] * row["layers"] > MOST_STATES:
            continue
        dtype, train = getattr(torch, row["dtype"]), bool(row["train"])
        options = {"proj_size": row["projection"]} if row["projection"] else {}
        module = getattr(nn, row["cell"])(
            row["inputs"],
            row["hidden"],
            row["layers"],
            dropout=0.2 * row["dropout"],
            bidirectional=row["directions"] == 2,
            **options,
        )
        module.to("cuda", dtype).train(train)
        x: Any = torch.randn(row["steps"], row["batch"], row["inputs"], device="cuda", dtype=dtype)
        row["rows"] = row["steps"] * row["batch"]
        if row["packed"]:
            lengths = sorted((rng.randint(1, row["steps"]) for _ in range(row["batch"])), reverse=True)
            row["rows"] = sum(lengths)
            x = nn.utils.rnn.pack_padded_sequence(x, lengths)
        with torch.set_grad_enabled(train):
            out, row["forward"] = workspace(lambda network=module, x=x: network(x)[0])
            row["backward"] = 0
            if train:
                total = (out.data if row["packed"] else out).float().sum()
                row["backward"] = workspace(total.backward)[1]
        yield row


def predicted(row: dict[str, Any], backward: bool) -> int:
    number = {name: int(row[name]) for name in row if name not in ("cell", "dtype")}
    cell = {"LSTM": "lstm", "GRU": "gru", "RNN": "rnn_tanh"}[row["cell"]]
    call = RecurrentCall(
        cell=cell,
        rows=number["rows"],
        batch=number["batch"],
        packed=bool(number["packed"]),
        inputs=number["inputs"],
        hidden=number["hidden"],
        result=number["projection"] or number["hidden"],
        layers=number["layers"],
        directions=number["directions"],
        dropout=bool(number["dropout"] and number["train"]),
        train=bool(number["train"]),
        swapped=False,
        weights=0,
        dtype=getattr(torch, row["dtype"]),
    )
    return workspace_bytes(call, backward)


def compare(path: Path) -> None:
    errors: dict[str, list[float]] = {"plain": [], "packed or projected": []}
    for row in stored(path):
        kind = "packed or projected" if int(row["packed"]) or int(row["projection"]) else "plain"
        for backward, measured in enumerate((int(row["forward"]), int(row["backward"]))):
            if measured:
                errors[kind].append(abs(predicted(row, bool(backward)) / measured - 1))
    for kind, found in errors.items():
        close = ", ".join(
            f"{sum(e <= threshold for e in found)} within {threshold:.1%}" for threshold in (0.001, 0.01)
        )
        print(f"{kind}: {len(found)} passes, {close}, worst {max(found):.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    measured = commands.add_parser("measure")
    measured.add_argument("--seconds", type=float, default=120)
    measured.add_argument("--seed", type=int, default=0)
    measured.add_argument("--out", type=Path, required=True)
    commands.add_parser("compare").add_argument("rows", type=Path, nargs="?", default=ROWS)
    given = parser.parse_args()
    if given.command == "compare":
        compare(given.rows)
        return
    rows = list(measure(given.seconds, given.seed))
    write(given.out, rows)


if __name__ == "__main__":
    main()
