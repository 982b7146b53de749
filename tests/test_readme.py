"""The README's commands run, and its tables are those of the committed rows."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks import tables

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
COMMANDS = list(dict.fromkeys(re.findall(r"^\$ (oomph .*?)(?:\s+#.*)?$", README, flags=re.MULTILINE)))


def test_the_readme_shows_commands_and_a_picture() -> None:
    assert len(COMMANDS) >= 2
    for file in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / file).exists(), file


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_readme_gives_an_answer(command: str, tmp_path: Path) -> None:
    words = command.split()
    trains = words[1] == "train"
    if trains:  # a few steps of it, and not into the checkout
        words += [f"output.dir={tmp_path / 'run'}", "training.steps=3", "training.device=cpu"]
    if words[1:2] == ["fixes"] and len(words) > 2:  # one price instead of twenty
        words += ["--only", "fused_loss"]
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 1), done.stderr
    assert (done.stderr if trains else done.stdout).strip()


def test_every_figure_of_the_accuracy_table_is_a_committed_row() -> None:
    with (ROOT / "benchmarks/results/accuracy.csv").open() as file:
        rows = {row["workload"]: row for row in csv.DictReader(file)}
    shown = re.findall(
        r"^\| `([\w.-]+)`[^|]*\| ([\d.]+) GiB \| ([-+][\d.]+) % \| ([-+][\d.]+) % \|$", README, re.M
    )
    assert len(shown) >= 10
    for name, measured, allocated, reserved in shown:
        row = rows[name]
        assert f"{int(row['measured_allocated']) / 2**30:.2f}" == measured, name
        assert f"{float(row['allocated_error_percent']):+.2f}" == allocated, name
        assert f"{float(row['reserved_error_percent']):+.2f}" == reserved, name


def test_every_figure_of_the_speed_table_is_a_committed_row() -> None:
    with (ROOT / "benchmarks/results/speed.csv").open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        assert f"| {float(row['seconds']):.1f} s | {row['host_gib']} GiB |" in README, row["case"]


def test_the_tables_of_the_ops_are_those_of_the_committed_rows() -> None:
    assert tables.losses() in README
    assert tables.other_ops() in README


def test_every_generated_table_is_that_of_the_committed_rows() -> None:
    for name, of_file in tables.FILES.items():
        text = (ROOT / name).read_text()
        assert tables.replaced(text, of_file) == text, f"run python -m benchmarks.tables: {name}"


def test_every_key_of_a_config_and_every_fix_is_documented() -> None:
    from oomph.fixes.catalogue import all_fixes
    from oomph.training.config.schema import ALIASES, Schema
    from oomph.training.config.systems import SYSTEMS

    configs = (ROOT / "docs/configs.md").read_text()
    for system in SYSTEMS.values():
        for key in Schema(system).keys:
            assert f"`{key.removeprefix('model.')}`" in configs, key
        for preset in system.presets:
            assert f"`{preset}`" in configs, preset
    for alias in ALIASES:
        assert alias.removeprefix("optimization") in configs, alias
    for file in (ROOT / "configs").glob("*.yaml"):
        assert file.name in configs or re.fullmatch(r"ginr_solution_[2-5]\.yaml", file.name), file.name
    fixes = (ROOT / "docs/fixes.md").read_text()
    assert f"{len(all_fixes())} remedies" in README
    for fix in all_fixes():
        assert f"| `{fix.name}` | {fix.kind} | {fix.changes} |" in fixes, fix.name


def test_the_stages_shown_are_those_of_the_stored_command() -> None:
    with (ROOT / "benchmarks/results/predicted_commands.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["figure"] != "needs"]
    assert len(rows) == 8
    for row in rows:
        assert re.search(rf"^  {re.escape(row['figure'])} +{re.escape(row['value'])} ", README, re.M), row


def test_what_quoted_commands_need_is_what_is_stored() -> None:
    with (ROOT / "benchmarks/results/predicted_commands.csv").open() as file:
        stored = {row["command"]: row["value"] for row in csv.DictReader(file) if row["figure"] == "needs"}
    quoted = re.findall(
        r"^\$ (oomph predict examples/loss_without_logits\.py:\S+ --gpu \S+) .*: (.*)$", README, re.M
    )
    assert len(quoted) == 2
    for command, needs in quoted:
        assert stored[command] == needs


def test_the_share_of_attention_in_long_contexts_is_as_told() -> None:
    from oomph.models.longctx import PRESETS

    def share(name: str, tokens: int) -> float:
        """Of the arithmetic of a token: 6 for each weight, and, causally, 6 T d for a layer's attention."""
        config = PRESETS[name]
        with torch.device("meta"):
            weights = sum(each.numel() for each in config.build().parameters())
        attention = config.num_layers * tokens * config.num_heads * config.head_dim
        return attention / (weights + attention)

    assert (
        "at 131,072 three quarters of it are attention, at 20,480 two fifths"
        in (ROOT / "docs/training.md").read_text()
    )
    assert share("4B", 131_072) == pytest.approx(0.75, abs=0.02)
    assert share("qwen3-4B", 20_480) == pytest.approx(0.4, abs=0.04)
