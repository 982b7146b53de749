"""Tables of the five systems and of training runs, as Markdown, from the committed rows."""

from __future__ import annotations

import csv
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def stored(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file; none where there is no such file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def median(errors: list[float]) -> float:
    return statistics.median(map(abs, errors))


def worst(errors: list[float]) -> float:
    return max(errors, key=abs)


# A system, what failed, its sick and its healthy row, and what is to be known of the pair.
SYSTEMS = (
    (
        "hatchling",
        "a dk x dk transition for every token",
        "hatchling hn_xs sick 16 x 256",
        "hatchling hn_xs healthy 16 x 256",
        "hn_xs, 16 x 256",
    ),
    (
        "pythia",
        "V x V one-hot, products by broadcasting",
        "pythia report sick 8 x 512",
        "pythia report healthy 8 x 512",
        "V 50,304, 8 x 512",
    ),
    (
        "longctx",
        "all logits, in fp32, several times",
        "longctx 4B dense sick 1 x 32768 recompute",
        "longctx 4B dense healthy 1 x 32768 recompute",
        "4B, 1 x 32,768, checkpointed",
    ),
    (
        "npt",
        "a weight per token, [B, S, d, f]",
        "npt GPT-2 whole sick 1 x 64",
        "npt GPT-2 healthy 4 x 512",
        "GPT-2, sick 1 x 64, healthy 4 x 512",
    ),
    (
        "ginr",
        "nine N x N matrices per image",
        "ginr self sick 64, fp32",
        "ginr self healthy 64, autocast recompute",
        "64 images, fp32; healthy bf16, recomputed",
    ),
)


def systems() -> str:
    """Sick against healthy, and how far off the predictions are over all measured forms."""
    rows = system_rows()
    lines = [
        "| system | what failed | shape | peak, sick -> healthy | a step, sick -> healthy |",
        "|---|---|---|---:|---:|",
    ]
    for system, what, sick, healthy, shape in SYSTEMS:
        before, after = rows[sick], rows[healthy]
        lines.append(
            f"| `{system}` | {what} | {shape} "
            f"| {float(before['measured_mib']):,.0f} -> {float(after['measured_mib']):,.0f} MiB "
            f"| {float(before['measured_ms']):,.0f} -> {float(after['measured_ms']):,.0f} ms |"
        )
    return "\n".join([*lines, "", _peaks_line(rows)])


def _peaks_line(rows: Mapping[str, Mapping[str, str]]) -> str:
    errors = [float(row["error_percent"]) for row in rows.values() if row["error_percent"]]
    return (
        f"- {len(errors)} forms and shapes measured: allocated peak predicted within "
        f"{abs(worst(errors)):.1f} %, median {median(errors):.2f} %"
    )


def races() -> str:
    """Whole training steps against other forms of the same model."""
    lines = ["| race | time | MiB, ours / theirs |", "|---|---:|---:|"]
    for name, row in system_rows().items():
        if row["other_ms"]:
            lines.append(
                f"| {name} | {float(row['measured_ms']) / float(row['other_ms']):.2f} x "
                f"| {float(row['measured_mib']):,.0f} / {float(row['other_mib']):,.0f} |"
            )
    return "\n".join(lines)


def peaks(system: str) -> str:
    """Every measured form of a system."""
    lines = ["| form | measured | predicted | a step |", "|---|---:|---:|---:|"]
    for name, row in system_rows().items():
        if name.split()[0] == system and row["predicted_mib"]:
            lines.append(
                f"| {name} | {float(row['measured_mib']):,.0f} MiB | {float(row['error_percent']):+.2f} % "
                f"| {float(row['measured_ms']):,.1f} ms |"
            )
    return "\n".join(lines)


def claims(system: str) -> str:
    """The report's claims as `oomph cases` works them out."""
    sys.path.insert(0, str(ROOT / "src"))  # a checkout is enough: nothing need be installed
    from oomph.cases.catalogue import CASES

    lines = ["| claim | claimed | derived | verdict | why |", "|---|---|---|---|---|"]
    for claim in CASES[system].claims:
        cells = (claim.text, claim.claimed, claim.derive(), claim.verdict, claim.why)
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join(lines)


def system_rows() -> dict[str, dict[str, str]]:
    return {row["name"]: row for row in stored(RESULTS / "systems.csv")}


# ------------------------------------------------------------------------------------------- training

LONG_RUNS = {
    "longctx_4b": ("`longctx_4b`: plain AdamW in bf16, recompute", 80),
    "longctx_4b_24gb": ("`longctx_4b_24gb`: 8-bit AdamW in backward, offloaded checkpoints", 23),
}
PEERS = {
    "Qwen3-4B of Hugging Face": "Hugging Face's Qwen3-4B: SDPA, checkpointing, AdamW in bf16",
    "longctx qwen3-4B": "ours of Qwen3-4B's shape, recompute",
}
# What a run is judged by besides its loss, and how it is written.
FIGURES = {"perplexity": "perplexity {:,.1f}", "psnr": "{:.2f} dB", "matching": "matching {:.4g}"}


def training(results: Path = RESULTS) -> str:
    """Every run; nothing while none is stored."""
    rows = stored(results / "training.csv")
    if not rows:
        return ""
    lines = [
        f"Measured on one {rows[0]['gpu']} (`benchmarks/training.py`). The loss is the mean over a tenth "
        "of the steps at either end; speed is in tokens, for ginr in images, in brackets where runs shared "
        "the GPU. The allocator does not count what replays of recorded passes (`training.cuda_graph`) use: "
        "theirs is what is allocated beside them and what a pass took while it was recorded.",
        "",
        "| run | steps | per step | per second | peak | predicted | loss | held out |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        found = [text.format(float(row[key])) for key, text in FIGURES.items() if row.get(key)]
        if row.get("matching_at_start"):
            found.append(f"at the start {float(row['matching_at_start']):.4g}")
        lines.append(
            f"| {row['name']} | {int(row['steps']):,} | {int(row['tokens_per_step']):,} "
            f"| {_speed(row)} | {float(row['measured_mib']):,.0f} MiB "
            f"| {float(row['error_percent']):+.2f} % "
            f"| {float(row['first_loss']):.4g} -> {float(row['last_loss']):.4g} | {', '.join(found) or '-'} |"
        )
    changed = [f"- {row['name']}: `{row['changes']}`" for row in rows if row["changes"]]
    more = ["", "What differs from the files in configs/:", "", *changed] if changed else []
    return "\n".join([*lines, *more])


def _speed(row: Mapping[str, str]) -> str:
    speed = f"{float(row['tokens_per_second']):,.0f}"
    return f"({speed})" if row.get("alone") == "False" else speed


def training_in_short(results: Path = RESULTS, docs: Path = ROOT / "docs") -> str:
    """A sentence or two and the picture; nothing while no run is stored."""
    rows = stored(results / "training.csv")
    if not rows:
        return ""
    errors = [float(row["error_percent"]) for row in rows]
    falling = sum(_falls(row) for row in rows)
    told = (
        f"{len(rows)} runs of these configs on one {rows[0]['gpu']}: the loss falls in {falling} of them "
        "(npt's by little, on held-out batches that are looked at before and after), "
        f"the peak is predicted within {abs(worst(errors)):.1f} % (median {median(errors):.2f} %). "
    )
    costs = stored(results / "training_overhead_h200.csv")
    if costs:
        shipped = [float(row["percent"]) for row in costs if "," not in row["config"]]
        others = [float(row["percent"]) for row in costs if "," in row["config"]]
        told += f"The loop costs at most {max(shipped):.2f} % over the bare step of {len(shipped)} configs"
        told += f" (up to {max(others):.1f} % where the GPU waits for the host). "
    lines = [f"{told}The rows are in [docs/training.md](docs/training.md)."]
    if (docs / "training.svg").exists():
        lines += ["", "![loss curves of the configs](docs/training.svg)"]
    return "\n".join(lines)


def _falls(row: Mapping[str, str]) -> bool:
    """By held-out batches where they were looked at before and after: one batch differs from another."""
    if row.get("matching_at_start"):
        return float(row["matching"]) < float(row["matching_at_start"])
    return float(row["last_loss"]) < float(row["first_loss"])


def long_context(results: Path = RESULTS) -> str:
    """Report 002's model on one card, and the peer at the longest context that it has there."""
    runs = {row["name"]: row for row in stored(results / "training.csv")}
    peers = stored(results / "longctx_peer_h200.csv")
    if not peers or not runs.keys() >= LONG_RUNS.keys():
        return ""
    lines = [
        "| one GPU, every parameter trained | allowed | context | tokens/s | peak, reserved |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, (title, allowed) in LONG_RUNS.items():
        row = runs[name]
        lines.append(
            f"| {title} | {allowed} GiB | {int(row['tokens_per_step']):,} "
            f"| {float(row['tokens_per_second']):,.0f} | {float(row['reserved_mib']) / 1024:.1f} GiB |"
        )
    for row in peers:
        tokens = f"{int(row['tokens']):,}"
        speed, held = "-", "-"
        if row["fits"] == "True":
            speed = f"{float(row['tokens_per_second']):,.0f}"
            held = f"{float(row['reserved_mib']) / 1024:.1f} GiB"
        elif any(other["fits"] == "True" and other["limit_gib"] == row["limit_gib"] for other in peers):
            tokens += " does not fit"
        else:
            tokens = f"none, not even {tokens}"
        lines.append(f"| {PEERS[row['who']]} | {row['limit_gib']} GiB | {tokens} | {speed} | {held} |")
    return "\n".join(lines)


def overhead(results: Path = RESULTS) -> str:
    rows = stored(results / "training_overhead_h200.csv")
    if not rows:
        return ""
    lines = [
        f"What the loop costs on one {rows[0]['gpu']}: the same steps by hand and by the loop, in turns.",
        "",
        "| config | bare step | in the loop | more |",
        "|---|---:|---:|---:|",
    ]
    for row in rows:
        lines.append(
            f"| {row['config']} | {float(row['bare_ms']):.2f} ms | {float(row['loop_ms']):.2f} ms "
            f"| {float(row['percent']):+.2f} % |"
        )
    return "\n".join(lines)
