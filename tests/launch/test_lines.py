"""Launch lines: which program they start, with what arguments, variables and ranks. No torch here."""

import shlex
import sys
from pathlib import Path

import pytest

from oomph.errors import UserError
from oomph.launch import follow, is_launcher


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "config.yaml", "app/train.py"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("")
    return tmp_path


def followed(line):
    return follow(shlex.split(line))


PYTHON = (
    "python train.py --lr 1e-4",
    "python3 -u train.py --lr 1e-4",
    "python -W ignore -X dev -uO train.py --lr 1e-4",
    f"{sys.executable} train.py --lr 1e-4",
    "env python train.py --lr 1e-4",
    "uv run train.py --lr 1e-4",
    "uv run --with einops --no-sync python train.py --lr 1e-4",
    "poetry run python train.py --lr 1e-4",
    "conda run -n training --no-capture-output python train.py --lr 1e-4",
    "nohup nice -n 10 python train.py --lr 1e-4",
    "timeout -s KILL 3600 python train.py --lr 1e-4",
    "'python train.py --lr 1e-4'",
)


@pytest.mark.parametrize("line", PYTHON)
def test_one_process(line):
    found = followed(line)
    assert (found.program, found.arguments) == ("train.py", ("--lr", "1e-4"))
    assert (found.module, found.torchrun, found.notes) == (False, False, ())


RANKS = {
    "torchrun train.py": 1,
    "torchrun --standalone --nproc-per-node 4 train.py": 4,
    "torchrun --nproc_per_node=4 --nnodes 2 --rdzv_backend c10d train.py": 8,
    "torchrun --nproc_per_nod 4 train.py": 4,
    "python -m torch.distributed.run --nproc-per-node 4 train.py": 4,
    "python -m torch.distributed.launch --nproc_per_node 4 --use_env train.py": 4,
    "uv run torchrun --nproc-per-node 4 train.py": 4,
    "composer -n 4 train.py": 4,
    "colossalai run --nproc_per_node 4 train.py": 4,
    "deepspeed --num_gpus=4 --no_local_rank train.py": 4,
    "deepspeed --include localhost:0,1,2 --no_local_rank train.py": 3,
    "fabric run --accelerator=cuda --devices=2 train.py": 2,
    "fabric run train.py --devices 0,3 --strategy ddp": 2,
}


@pytest.mark.parametrize("line", RANKS)
def test_ranks(line):
    found = followed(line)
    assert (found.program, found.arguments) == ("train.py", ())
    assert (found.torchrun, found.ranks) == (True, RANKS[line])


def test_options_after_the_script_are_its_own():
    found = followed("torchrun --nproc-per-node 2 train.py --gpu 3 --nproc-per-node 7 -- x")
    assert found.arguments == ("--gpu", "3", "--nproc-per-node", "7", "--", "x")
    assert found.ranks == 2


@pytest.mark.parametrize(
    "line",
    [
        "python -m app.train -x",
        "torchrun -m app.train -x",
        "uv run -m app.train -x",
        "torchrun --no-python python -mapp.train -x",
    ],
)
def test_modules(line):
    found = followed(line)
    assert (found.program, found.arguments, found.module) == ("app.train", ("-x",), True)


def test_launchers_that_name_the_local_rank():
    assert followed("deepspeed train.py -x").arguments == ("--local_rank=0", "-x")
    assert followed("python -m torch.distributed.launch train.py -x").arguments == ("--local-rank=0", "-x")


def test_variables():
    found = followed("CUDA_VISIBLE_DEVICES=0 A=1 env B='2 3' python train.py C=4")
    assert found.environment == {"CUDA_VISIBLE_DEVICES": "0", "A": "1", "B": "2 3"}
    assert found.arguments == ("C=4",)
    assert followed("fabric run train.py --precision bf16-mixed").environment["LT_PRECISION"] == "bf16-mixed"


@pytest.mark.parametrize("line", ["torchrun --nproc-per-node gpu train.py", "deepspeed train.py"])
def test_as_many_ranks_as_gpus(line):
    found = followed(line)
    assert found.ranks == 1
    assert found.every_gpu == line.split()[0]


def test_elastic_nodes_are_the_fewest():
    found = followed("torchrun --nnodes 2:4 --nproc-per-node 8 train.py")
    assert found.ranks == 16
    assert "2" in found.notes[0]


def test_shell_script():
    Path("run.sh").write_text(
        "#!/bin/bash\n#SBATCH --nodes=1\nset -e  # stop\n"
        "export FOO=bar\nGPUS=${GPUS:-4}\nARGS='--lr 1e-4 --note'\n"
        'echo "starting $FOO"\n'
        'torchrun --nproc_per_node "$GPUS" \\\n  train.py $ARGS "a b" \'$HOME\' "$@" 2>&1 | tee log.txt\n'
    )
    found = followed("bash run.sh --seed 1")
    assert (found.program, found.ranks, found.environment) == ("train.py", 4, {"FOO": "bar"})
    assert found.arguments == ("--lr", "1e-4", "--note", "a b", "$HOME", "--seed", "1")


def test_shell_script_with_its_ranks_as_argument():
    Path("run.sh").write_text('#!/bin/bash\nN=$1\nshift\ntorchrun --nproc_per_node=$N train.py "$@"\n')
    Path("run.sh").chmod(0o755)
    found = followed("./run.sh 4 --lr 1")
    assert (found.ranks, found.arguments) == (4, ("--lr", "1"))


KEPT = {
    "python train.py --epochs 3 > log.txt 2>&1": "--epochs 3",
    "python train.py --epochs 3 2> errors.txt |& tee log.txt": "--epochs 3",
    "python train.py --tag a#b --lr 1  # it's the best": "--tag 'a#b' --lr 1",
    "python train.py --tag 'a # 2> b' # run\n# and\n": "--tag 'a # 2> b'",
    'python train.py --name "" --lr 1': "--name '' --lr 1",
    'python train.py --tag c#d "two\nlines"': "--tag 'c#d' 'two\nlines'",
    "conda run -n training python train.py -x": "-x",
    "source venv/bin/activate\npython train.py": "",
}


@pytest.mark.parametrize("text", KEPT)
def test_words_of_a_shell_script_are_kept(text):
    Path("run.sh").write_text(text)
    found = followed("bash run.sh")
    assert (shlex.join(found.arguments), found.notes) == (KEPT[text], ())


def test_options_of_the_shell_and_of_its_script():
    Path("run.sh").write_text('python train.py "$@"\n')
    assert followed("bash -e -ux run.sh -e 5").arguments == ("-e", "5")


def test_files_that_a_shell_script_reads_are_noted():
    Path("run.sh").write_text("source .env\npython train.py\n")
    assert followed("bash run.sh").notes == ("run.sh:1: .env was not read",)


RUNS = (
    "torchrun --nproc-per-node 2 {}train.py -x",
    "torchrun --nproc-per-node 2 {}-m app.train",
    "python -m torch.distributed.run {}train.py",
)


@pytest.mark.parametrize("line", RUNS)
def test_line_with_oomph_run(line):
    found = followed(line.format("")).with_oomph_run("--fix", "a")
    assert found == line.format("-m oomph run --fix a ")


@pytest.mark.parametrize(
    "line", ["python -m torch.distributed.launch train.py", "deepspeed train.py", "fabric run train.py"]
)
def test_launchers_that_may_not_run_modules(line):
    assert followed(line).with_oomph_run("--fix", "a") == ""


def console_script(folder, monkeypatch, text, name="fancy-train"):
    file = folder / "bin" / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    file.chmod(0o755)
    monkeypatch.setenv("PATH", str(file.parent), prepend=":")
    return str(file)


BEGINNINGS = (
    f"#!{sys.executable}\n",
    "#!/usr/bin/env python3\n",
    f"#!/bin/sh\n'''exec' {sys.executable} \"$0\" \"$@\"\n' '''\n",
    f"#!/bin/sh\n'''exec' '{sys.executable}' \"$0\" \"$@\"\n' '''\n",
)


@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_console_script(folder, monkeypatch, beginning):
    text = f"{beginning}import sys\nfrom json import loads as main\nsys.exit(main())\n"
    file = console_script(folder, monkeypatch, text)
    for line in ("fancy-train fit --lr 1", "torchrun --no-python fancy-train fit --lr 1"):
        found = followed(line)
        assert (found.program, found.arguments, found.notes) == (file, ("fit", "--lr", "1"), ())
    assert is_launcher("fancy-train")


def test_console_script_of_another_environment(folder, monkeypatch):
    console_script(folder, monkeypatch, "#!/opt/other/bin/python3\nfrom fancy.cli import main\nmain()\n")
    with pytest.raises(UserError, match="package fancy is not in this Python"):
        followed("fancy-train fit")
    console_script(folder, monkeypatch, "#!/opt/other/bin/python3\nfrom json import loads\nloads()\n")
    assert "/opt/other/bin/python3" in followed("fancy-train fit").notes[0]


@pytest.fixture
def framework(folder, monkeypatch):
    """A package that is not installed, with these files."""

    def write(*files):
        for file in files:
            (folder / "lib" / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / "lib" / file).write_text("")
        monkeypatch.syspath_prepend(folder / "lib")
        return folder / "lib"

    return write


def test_torchtune(framework, folder):
    lib = framework("torchtune/__init__.py", "recipes/full.py", "recipes/configs/llama/1B.yaml")
    found = followed("tune run --nproc_per_node 2 full --config llama/1B batch_size=2")
    assert (found.program, found.ranks) == (str(lib / "recipes/full.py"), 2)
    config = str(lib / "recipes/configs/llama/1B.yaml")
    assert found.arguments == ("--config", config, "batch_size=2")
    found = followed("tune run app/train.py --config config.yaml")
    assert (found.program, found.module, found.torchrun) == ("app.train", True, False)
    assert found.environment["PYTHONPATH"].split(":")[-1] == str(folder)


def test_llamafactory(framework):
    files = ("llamafactory/__init__.py", "llamafactory/launcher.py")
    program = str(framework(*files) / files[1])
    found = followed("llamafactory-cli train config.yaml")
    assert (found.program, found.arguments, found.torchrun) == (program, ("config.yaml",), False)
    found = followed("FORCE_TORCHRUN=1 NPROC_PER_NODE=4 llamafactory-cli train config.yaml")
    assert (found.program, found.ranks) == (program, 4)
    assert found.environment["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"


def test_swift(framework):
    lib = framework("swift/__init__.py", "swift/cli/sft.py")
    Path("config.yaml").write_text("model: tiny\nlora_rank: 8\ntarget: [q, k]\nENV: {NPROC_PER_NODE: 2}\n")
    found = followed("swift sft config.yaml --lr 1")
    assert (found.program, found.ranks) == (str(lib / "swift/cli/sft.py"), 2)
    assert found.arguments == ("--model", "tiny", "--lora_rank", "8", "--target", "q", "k", "--lr", "1")


@pytest.mark.parametrize("text", ["{", "[1]", "model: [\n"])
def test_swift_with_a_config_that_cannot_be_read(framework, text):
    framework("swift/__init__.py")
    for name in ("broken.json", "broken.yaml"):
        Path(name).write_text(text)
        with pytest.raises(UserError, match=f"config '{name}' ") as caught:
            followed(f"swift sft {name}")
        assert "\n" not in str(caught.value)


def test_axolotl():
    line = (
        "axolotl train config.yaml --launcher torchrun --learning-rate 1e-4 --no-bf16 -- --nproc_per_node=2"
    )
    found = followed(line)
    assert (found.program, found.module, found.ranks) == ("axolotl.cli.train", True, 2)
    assert found.arguments == ("config.yaml", "--learning-rate=1e-4", "--bf16=False")


REFUSED = {
    "srun -n 8 --gpus=8 python train.py --lr 1": "`oomph predict --ranks 8 -- python train.py --lr 1`",
    "srun --nodes 2 --ntasks-per-node 4 python train.py": "--ranks 8 -- python train.py",
    "srun torchrun --nproc-per-node 2 train.py": "`oomph predict -- torchrun --nproc-per-node 2 train.py`",
    "mpirun -np 4 python train.py": "--ranks 4 -- python train.py",
    "ssh node 'cd x && torchrun train.py -x'": "`oomph predict -- torchrun train.py -x`",
    "docker run --gpus all image python train.py": "`oomph predict -- python train.py`",
    "sbatch run.sh": "bash run.sh",
    "python -c 'import torch'": "write the program to a file",
    "python": "python train.py",
    "A=1": "no program",
    "torchrun": "torchrun train.py",
    "torchrun --nproc-per-node four train.py": "'four' is not valid",
    "torchrun --nproc-per-mode 4 train.py": "the nearest is --nproc-per-node",
    "torchrun trian.py": "did you mean 'train.py'",
    "accelerate config": "accelerate launch",
    "tune download x": "tune run",
    "ls": "not a Python program",
    "torchrunn train.py": "did you mean torchrun",
    "bash absent.sh": "does not exist",
    "bash -c 'python train.py'": "give the launch line",
    "env -i python train.py": "env -i",
    "env -u RANK python train.py": "env -u RANK",
}


@pytest.mark.parametrize("line", REFUSED)
def test_refused_with_what_to_give_instead(line):
    Path("run.sh").write_text("python train.py\n")
    with pytest.raises(UserError) as caught:
        followed(line)
    message = str(caught.value)
    assert REFUSED[line] in message
    assert "\n" not in message


SCRIPTS = {
    "python prepare.py\ntorchrun train.py --lr 1\n": "oomph predict -- torchrun train.py --lr 1",
    "for x in 1 2; do\npython train.py\ndone\n": "'for' cannot be followed",
    "python train.py --seed $(date +%s)\n": "run.sh:1",
    "torchrun --nproc_per_node $NO_SUCH_VARIABLE train.py\n": "$NO_SUCH_VARIABLE has no value",
    "cd /data\npython train.py\n": "run.sh:1 goes to another folder",
    "echo done\n": "runs no command",
}


@pytest.mark.parametrize("text", SCRIPTS)
def test_shell_scripts_that_are_not_followed(text):
    Path("run.sh").write_text(text)
    with pytest.raises(UserError) as caught:
        followed("bash run.sh")
    assert SCRIPTS[text] in str(caught.value)


@pytest.mark.parametrize("word", ["train.py", "config.yaml", "train.py:step", "Qwen/Qwen3-8B", "app"])
def test_other_targets_begin_no_launch_line(word):
    assert not is_launcher(word)
