"""The commands of the README run, links resolve, and tables equal the committed rows."""

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import tables

from oomph.cli.main import run
from oomph_lab.cli import register

register()  # for where the lab is not installed

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [*ROOT.glob("*.md"), *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("lab/**/*.md"))]
# Commands, and what the README shows of their output.
COMMANDS = dict(re.findall(r"^\$ (oomph .*?)(?:\s+#.*)?\n((?:(?!\$|```).*\n)*)", README, flags=re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page):
    for file in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / file).exists(), file


def test_the_readme_has_at_most_150_lines():
    assert len(README.splitlines()) <= 150


@pytest.mark.parametrize("command", COMMANDS)
def test_readme_command_runs(command, tmp_path, monkeypatch, capfd):
    words = command.split()[1:]
    trains = words[0] == "train"
    if trains:
        words += [f"output.dir={tmp_path / 'run'}", "training.steps=3", "training.device=cpu"]
        words += [f"data.source={ROOT / 'docs'}/*.md"]  # instead of all of the standard library
    if "--method" in words:
        pytest.importorskip("peft")
        pytest.importorskip("bitsandbytes")
    words = [str(tmp_path / word) if word == "plan.json" else word for word in words]
    if words[0] == "fixes" and len(words) > 1:  # one prediction instead of twenty
        words += ["--only", "fused_linear_cross_entropy"]
    monkeypatch.chdir(ROOT)
    if "--method" in words:  # tests before may have imported bitsandbytes
        ran = subprocess.run([sys.executable, "-m", "oomph", *words], capture_output=True, text=True)
        status, out, err = ran.returncode, ran.stdout, ran.stderr
    else:
        status, (out, err) = run(words), capfd.readouterr()
    assert status in (0, 1), err
    assert (err if trains else out).strip()
    printed = out.replace(f"{tmp_path}/", "").splitlines()
    assert set(COMMANDS[command].splitlines()) <= {*printed, ""}


def test_generated_tables_equal_the_committed_rows():
    for name, of_file in tables.FILES.items():
        text = (ROOT / name).read_text()
        assert tables.replaced(text, of_file) == text, f"run python -m benchmarks.tables: {name}"


def test_every_config_key_and_fix_is_documented():
    from oomph.fixes.registry import all_fixes
    from oomph_lab.systems import SYSTEMS
    from oomph_lab.training.config import ALIASES, CONFIGS, ConfigKeys

    configs = (ROOT / "lab/docs/configs.md").read_text()
    for system in SYSTEMS.values():
        for key in ConfigKeys(system).all:
            assert f"`{key.removeprefix('model.')}`" in configs, key
        for preset in system.presets:
            assert f"`{preset}`" in configs, preset
    for alias in ALIASES:
        assert alias.removeprefix("optimization") in configs, alias
    for file in CONFIGS.glob("*.yaml"):
        assert file.name in configs or re.fullmatch(r"ginr_solution_[2-5]\.yaml", file.name), file.name
    fixes = (ROOT / "docs/fixes.md").read_text()
    for fix in all_fixes():
        assert f"| `{fix.name}` | {fix.kind} | {fix.changes} |" in fixes, fix.name


def test_the_stage_table_equals_the_stored_command():
    with (ROOT / "benchmarks/results/predicted_commands.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["figure"] != "needs"]
    assert len(rows) == 8
    text = (ROOT / "docs/predict.md").read_text()
    for row in rows:
        assert re.search(rf"^  {re.escape(row['figure'])} +{re.escape(row['value'])} ", text, re.M), row
