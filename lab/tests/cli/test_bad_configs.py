"""Mistakes in configs and runs: for each, a command line and a part of the one line that the user gets.

All run in this process and in one folder, which has a finished run of small.yaml.
"""

import json
import os
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from oomph.cli.main import run
from oomph_lab.training.checkpoint import _write_manifest

USER = 2


class Case(NamedTuple):
    command: str  # as in a shell
    line: str  # a part of the error
    files: dict[str, str | bytes]  # written before
    damage: Callable[[Path], object] | None = None  # what happens to the run in runs/small before


CASES = []


def cases(command, *rows):
    """Rows of (more words, line), or (more words, line, what the file `x` with that suffix holds)."""
    for words, line, *content in rows:
        typed = f"{command} {words}"
        file = found[0] if (found := re.search(r"\bx\.[a-z]+", typed)) else "x.py"
        CASES.append(Case(typed, line, dict.fromkeys([file][: len(content)], *content)))


def run_cases(*rows):
    """Rows of (words after `train small.yaml`, line, damage to the run)."""
    for words, line, damage in rows:
        CASES.append(Case(f"train small.yaml {words}", line, {}, damage))


LONG, DIGITS, DEEP = "n" * 300, "9" * 5000, "[" * 3000

cases(
    "",
    ("train", "Missing argument 'CONFIG'"),
    ("trian", "No such command 'trian'. Did you mean 'train'? (the commands are predict, "),
    ("train smal", "config 'smal' does not exist; did you mean 'small.yaml'?"),
    ("train ptyhia_tiny", "config 'ptyhia_tiny' does not exist; did you mean 'configs/pythia_tiny.yaml'?"),
    ("systems mamba", "there is no system 'mamba'; choose from hatchling"),
)

# --------------------------------------------------------------------------------------------- configs

cases(
    "predict",
    ("nothing.yaml", "config 'nothing.yaml' does not exist"),
    ("smal.yaml", "config 'smal.yaml' does not exist; did you mean 'small.yaml'?"),
    ("folder.yaml", "config 'folder.yaml' is a directory"),
    ("x.yaml", "config 'x.yaml' is empty", "# nothing\n"),
    ("x.yaml", "holds a list; it should be a mapping", "- a"),
    ("x.yaml", "line 2 is not valid YAML: expected the node content", "a: 1\nb: ["),
    ("x.yaml", "line 4 is not valid YAML: the key 'a' is given twice", "a: 1\n\nb: 2\na: 3"),
    ("x.yaml", "is not valid YAML: could not determine a constructor", "a: !!python/object:os.system x"),
    ("x.yaml", "is not UTF-8 text", b"\xff"),
    ("x.yaml", "it is nested too deeply", f"a: {DEEP[:900]}"),
    ("x.yaml", "is not valid YAML", f"a: {DIGITS}"),
    ("x.yaml", "system is missing; choose from hatchling, pythia", "model: {}"),
    ("x.yaml", "system = 'pytha' is not valid; did you mean 'pythia'?", "system: pytha"),
    ("x.yaml", "epoch is not a key; did you mean 'training.epochs'?", "system: pythia\nepoch: 3"),
    ("x.yaml", "model = [1] is not valid; give a mapping of keys", "system: pythia\nmodel: [1]"),
    (
        "x.yaml",
        "model.preset = '70m' is not valid; pythia has report",
        "system: pythia\nmodel: {preset: 70m}",
    ),
    ("x.yaml", "reads images", "system: ginr\ndata: {seq_len: 64}"),
    ("small.yaml nsa", "'nsa' is not an override; give key=value"),
    ("small.yaml --gup rtx3090", "(the nearest option to --gup is --gpu)"),
    ("small.yaml --fix micro_batches:parts=9 B=3", "B is not a key"),
    (
        "small.yaml p.yaml",
        "'p.yaml' is not an override; give key=value, --key value, or --flag; give one config",
    ),
)
cases(
    "train small.yaml",
    ("lr=fast", "lr (which is optimizer.learning_rate) = 'fast' is not valid; it should be a valid number"),
    ("model.zzz=1", "the keys of 'model' are preset"),
    ("zzz=1", "the sections are model, data"),
    ("data.batch_size=0", "it should be greater than or equal to 1"),
    ("data.batch_size=1000000000000", "the batches of a step need 238418.6 GiB, and this machine has"),
    ("data.batch_size=null data.batch_tokens=5", "one sequence has 16 tokens"),
    ("batch_size=4 data.batch_size=8", "is given twice, as batch_size = 4 and as data.batch_size = 8"),
    ("batch_size=4 batch_tokens=128", "with batch_tokens=128 it is 8: give one of them"),
    ("steps=5 epochs=2", "training.steps is 5: give one"),
    ("data.seq_len=1", "data.seq_len = 1 is not valid; it should be greater than or equal to 2"),
    ("data.seq_len=100000", "seq_len=100000 is longer than the data"),
    ("training.epochs=1 data.batch_size=10000", "is larger than the data"),
    ("'data.curriculum=[]'", "give at least one stage, or null"),
    ("'data.curriculum=[{seq_len: 8}]' data.seq_len=null data.batch_size=null", "batch_tokens is missing"),
    ("'data.curriculum=[{seq_len: 8, batch_token: 8}]'", "did you mean 'batch_tokens'?"),
    ("data.vocab_size=20000", "data.vocab_size = 20000 is not valid; the model has 260 tokens"),
    ("data.validation=1", "data.validation = 1 is not valid"),
    ("data.tokenizer=bytes model.vocab_size=100", "it has at least 260 tokens"),
    (
        "data.tokenizer=words data.vocab_size=260 data.source=few.txt data.validation=0",
        "is larger than the data",
    ),
    ("data.source=nothing.txt", "nothing.txt does not exist"),
    ("data.source=tekst.txt", "tekst.txt does not exist (nearest name: text.txt)"),
    ("data.source=wikitext2", "there is no data source 'wikitext2' (nearest name: wikitext-2)"),
    ("data.source=cifar10", "cifar10 has images, not text"),
    ("'data.source=*.md'", "no file matches *.md"),
    ("data.source=folder", "folder has no files"),
    ("data.source=empty.txt", "empty.txt is empty"),
    ("data.source=few.txt", "few.txt is too small to hold a part out for validation"),
    ("data.source=x.txt", "x.txt is not a text file (a NUL byte at offset 4)", b"text\0text\n" * 99),
    ("data.source=x.txt", "x.txt is not a text file (not UTF-8 at offset 0)", b"\xe9\n" * 99),
    ("data.source=x.parquet", "x.parquet cannot be read as parquet", "text\n" * 99),
    ("data.source=x.jsonl", "x.jsonl:1: broken JSON", '{"text": "a"\n' * 99),
    ("data.source=x.jsonl", 'no text in field "text" (fields: body)', '{"body": "a"}\n' * 99),
    ("data.source=x.jsonl data.field=body", 'no text in field "body" (it is a list)', "[1, 2, 3, 4]\n" * 99),
    ("lr=.nan", "a finite number"),
    ("lr=-1", "it should be greater than 0"),
    ("'lr=[1'", "override 'lr=[1' is not valid YAML"),
    ("lr", "'lr' is not an override"),
    ("steps=", "override 'steps=' has no value; write steps=null for none"),
    ("--=3", "'--=3' is not a flag"),
    ("training.schedule=cosin", "it should be 'constant', 'cosine' or 'linear'"),
    ("training.memory_limit=25000000000", "has no unit; a size is a number with a unit"),
    ("training.dtype=int8", "training.dtype = 'int8' is not valid; it should be 'float32' or 'bfloat16'"),
    ("training.dtype=bf16 training.autocast=fp16", "the parameters are bfloat16"),
    ("training.device=gpu", "training.device='gpu' is not a device; give cpu, cuda or cuda:0"),
    ("training.device=meta", "training.device='meta' is not supported"),
    ("model.hidden_size=17", "model.hidden_size = 17 is not valid; give a multiple of num_heads=2"),
    ("model.hidden_size=1000000000000", "out of memory (Storage size calculation overflowed"),
    ("form=ill", "form = 'ill' is not valid; choose from 'model', 'naive'"),
    ("fixes=3", "fixes.0 = 3 is not valid; a fix is given as 3"),
    ("'fixes=[fused_optimizer, no_foreach]'", "'fused_optimizer' and 'no_foreach' cannot be combined"),
    ("fixes=optimizer_in_backward clip=1", "with the fix 'optimizer_in_backward'"),
    ("--fixes optimizer_8bit", "single fixes are given as fixes=[name, ...]"),
    ("--fixes x.json clip=1.0", "training.clip", '[{"fix": "optimizer_in_backward"}]'),
    ("--export text.txt", "--export 'text.txt' exists already; give another name"),
    ("--export no/w.safetensors", "--export 'no/w.safetensors': the folder 'no' does not exist"),
    ("--export /proc/w.safetensors", "--export '/proc/w.safetensors': cannot write there"),
    ("output.dir=text.txt/run", "cannot write in text.txt/run: Not a directory"),
    (f"output.dir={LONG}", "File name too long; give another output.dir"),
    ("output.dir=other", "other/config.yaml is not of a run, and a run would overwrite it"),
    ("output.dir=new --resume", "new holds no run to resume; leave --resume out"),
)
cases(
    "train x.yaml",
    *(
        (words, line, "system: pythia")
        for words, line in (
            ("'curriculum=[{batch_size: 8}]'", "data.curriculum.0.seq_len is missing"),
            ("'curriculum=[{seq_len: 8, batch_size: 2}]' seq_len=64", "give data.curriculum=null too"),
            (
                "'curriculum=[{seq_len: 8, batch_size: 2}, {seq_len: 16, batch_size: 1}]'",
                "data.curriculum.0.steps is missing; only the last stage",
            ),
            ("fixes=optimizer_in_backward accumulation=4", "= 4 is not valid; with the fix 'optimizer_in"),
            ("model=3", "model = 3 is not valid; give a mapping of keys"),
            ("training.cuda_graph=true autocast=fp16", "float16 changes the loss scale at every step"),
        )
    ),
)
NPT = "system: npt\nmodel: {preset: tiny, weights: %s}\ndata: {tokenizer: words, vocab_size: 9}"
cases(
    "train",
    ("p.py", "config 'p.py', line 2 is not valid YAML"),
    ("x.yaml", "weights='w' is not a folder", NPT % "w"),
    ("x.yaml", "weights='folder' cannot be loaded (ValueError: Unrecognized model", NPT % "folder"),
)

# ----------------------------------------------------------------------------- a run that is resumed


def write(name, content):
    data = content.encode() if isinstance(content, str) else content
    return lambda run: (run / name).write_bytes(data)


def in_state(change):
    """Change state.json of the newest checkpoint and write its hashes again."""

    def damage(run):
        *older, folder = sorted((run / "checkpoints").iterdir())
        for path in older:
            shutil.rmtree(path)
        state = json.loads((folder / "state.json").read_text())
        change(state)
        (folder / "state.json").write_text(json.dumps(state))
        step = json.loads((folder / "manifest.json").read_text())["step"]
        (folder / "manifest.json").unlink()
        _write_manifest(folder, step)

    return damage


def each_checkpoint(name, content):
    return lambda run: [(path / name).write_text(content) for path in (run / "checkpoints").iterdir()]


def edited_text(run):
    text = Path("text.txt")
    text.write_text(text.read_text().replace("line 3", "LINE 3"))


RESUME = "training.steps=6 --resume"
run_cases(
    ("", "runs/small holds a run already; continue with --resume", lambda run: None),
    ("model.dropout=0.5 --resume", "was started with another config: model.dropout was", lambda run: None),
    ("training.steps=1 --resume", "is at step 4, and training.steps is 1", lambda run: None),
    (RESUME, "the data are not those of the checkpoint: contents was", edited_text),
    (
        RESUME,
        "the data are not those of the checkpoint: size was",
        lambda run: write("../../text.txt", "a\n" * 999)(run),
    ),
    (RESUME, "text.txt is empty", lambda run: Path("text.txt").write_bytes(b"")),
    (RESUME, "text.txt does not exist", lambda run: Path("text.txt").unlink()),
    (RESUME, "is not a tokenizer that oomph saved", write("tokenizer.json", "{")),
    (RESUME, "is not a tokenizer that oomph saved", write("tokenizer.json", '{"model": {"type": "BPE"}}')),
    (RESUME, "is not the record that oomph wrote", write("tokenizer_source.json", "{")),
    (RESUME, "was made with source=None", write("tokenizer_source.json", "{}")),
    (RESUME, "config.yaml' is empty", write("config.yaml", "")),
    (RESUME, "holds checkpoints, and no config.yaml", lambda run: (run / "config.yaml").unlink()),
    (RESUME, "no checkpoint in runs/small/checkpoints can be used", each_checkpoint("manifest.json", "{}")),
    (RESUME, "is corrupt", each_checkpoint("state.json", "{}")),
    (RESUME, "is malformed (KeyError: 'scaler'", in_state(lambda state: state.pop("scaler"))),
    (RESUME, "is malformed (ValueError: step 'four'", in_state(lambda state: state.update(step="four"))),
    (RESUME, "is malformed", in_state(lambda state: state["data"]["position"].update(chunk=-1))),
    (
        RESUME,
        "random number state cannot be restored",
        in_state(lambda state: state["rng"].update(python=[3])),
    ),
    (
        RESUME,
        "do not hold the tensors that state.json names",
        in_state(lambda state: state["model"].popitem()),
    ),
)


CONFIG = """
system: pythia
model: {preset: report, vocab_size: 260, hidden_size: 16, num_layers: 2, num_heads: 2,
        intermediate_size: 32, block_size: 8}
data: {source: text.txt, tokenizer: bytes, seq_len: 16, batch_size: 2, validation: 0.1}
training: {steps: 4, save_every: 2, eval_every: 4, eval_batches: 1, device: cpu}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder, before = tmp_path_factory.mktemp("bad_configs"), Path.cwd()
    os.chdir(folder)
    files = {
        "p.py": "import torch\nprint({1: 2}): 3: 4\n",
        "small.yaml": CONFIG,
        "few.txt": "short",
        "empty.txt": "",
        "other/config.yaml": "a: 1",
        "text.txt": "".join(f"line {number}: {number * number}\n" for number in range(500)),
    }
    for name in ("folder", "folder.yaml", "other"):
        (folder / name).mkdir()
    for name, content in files.items():
        (folder / name).write_text(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("oomph_lab.training.evaluation.NEW_TOKENS", 3)
        assert run(["train", "small.yaml", "output.dir=finished"]) == 0
        yield folder
    os.chdir(before)


@pytest.mark.usefixtures("folder", "in_process")
@pytest.mark.parametrize("case", CASES, ids=[f"{case.command[:60]} {case.line[:30]}" for case in CASES])
def test_it_is_one_line(case, capfd):
    shutil.rmtree("runs", ignore_errors=True)
    text = Path("text.txt").read_bytes()
    if case.damage is not None:
        shutil.copytree("finished", "runs/small")
        config = Path("runs/small/config.yaml")
        config.write_text(config.read_text().replace("dir: finished", "dir: runs/small"))
        case.damage(Path("runs/small"))
    for name, content in case.files.items():
        Path(name).write_bytes(content.encode() if isinstance(content, str) else content)
    try:
        status = run(shlex.split(case.command))
    finally:
        Path("text.txt").write_bytes(text)
        for name in case.files:
            Path(name).unlink()
    out, err = capfd.readouterr()
    errors = [line for line in err.splitlines() if line.startswith("oomph: ")]
    assert (status, len(errors)) == (USER, 1), err
    assert case.line in errors[0]
    assert errors[0].isprintable()
    assert out == ""
    assert "Traceback" not in err
    assert case.damage is not None or not Path("runs/small/config.yaml").exists()  # no run was started


def test_a_current_directory_that_is_gone(tmp_path, monkeypatch, capsys):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert run(["train", "small.yaml"]) == USER
    assert capsys.readouterr().err.count("oomph: ") == 1
