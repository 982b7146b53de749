"""One table, a row a launcher: its names, and how to get from its words to those of what it starts."""

from __future__ import annotations

import difflib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from oomph.errors import UserError
from oomph.launch import shell
from oomph.launch.lines import NO_OPTIONS, Launch, Line, Options, number, refuse

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_PYTHON = re.compile(r"python[\d.]*|pypy[\d.]*|ipython3?|pythonw?")
_ASKED = "oomph-launch "  # before the answer of ask_accelerate.py
_MOST_STEPS = 20  # from one launcher to the next
_AUTOMATIC = ("auto", "gpu", "cuda", "-1")  # as many ranks as there are GPUs

Follow = Callable[[Line, "Launcher", list[str]], "list[str] | None"]


@dataclass(frozen=True, slots=True)
class Launcher:
    """`follow` takes the words after its name; it returns the words that it starts, or says what it runs."""

    name: str  # as typed, with its command: "accelerate launch"
    follow: Follow
    options: Options = NO_OPTIONS
    modules: tuple[str, ...] = ()  # `python -m` these is the same


def follow(words: Sequence[str]) -> Launch:
    """Where a launch line leads. Raises a UserError that says what to give instead."""
    given = tuple(words)
    if len(given) == 1 and " " in given[0] and not os.path.exists(given[0]):
        try:
            given = tuple(shlex.split(given[0]))
        except ValueError as error:
            raise UserError(f"launch line {given[0]!r} cannot be read: {error}") from error
    line, rest = Line(given), list(given)
    for _ in range(_MOST_STEPS):
        started = _step(line, rest)
        if started is None:
            return line.launch()
        rest = started
    raise UserError(f"launch line {shlex.join(given)!r} starts itself; give the program, as train.py")


def is_launcher(word: str) -> bool:
    """Whether a line may begin with it: a variable, a row of the table, a shell script, a program."""
    name = os.path.basename(word)
    if _ASSIGNMENT.fullmatch(word) or name in _FIRST_WORDS or _PYTHON.fullmatch(name):
        return True
    if " " in word and not os.path.exists(word):
        return is_launcher(word.split()[0])
    if word.endswith(".sh"):
        return True
    return not word.endswith((".py", ".yaml", ".yml", ".ipynb")) and _console_script(word) is not None


def starts_program(words: Sequence[str]) -> bool:
    """Whether the words of a shell's command start a program of the user's here, as far as they tell: no file
    has to exist. Not so `pip install`, `conda install`, shell scripts and other machines."""
    words = [word for word in words if not _ASSIGNMENT.fullmatch(word)]
    name = os.path.basename(words[0]) if words else ""
    if set(words) & {"pip", "venv", "ipykernel", "setup.py"}:
        return False
    has_script = any(word.endswith(".py") or word.startswith("-m") for word in words[1:])
    if _PYTHON.fullmatch(name):
        return has_script
    for row in _FIRST_WORDS.get(name, []):
        command = row.name.split()[1:]
        if words[1 : 1 + len(command)] == command and name not in _NOT_HERE:
            return has_script or row.follow not in (_rest, _env, _timeout, _refused)
    return False


_NOT_HERE = ("bash", "sh", "zsh", "ssh", "docker", "podman")


def nearest(word: str) -> str:
    """The launcher that is most like it, or ""."""
    return next(iter(difflib.get_close_matches(word, [*_FIRST_WORDS, "python"], n=1, cutoff=0.8)), "")


def _step(line: Line, words: list[str]) -> list[str] | None:
    while words and (match := _ASSIGNMENT.fullmatch(words[0])):
        line.environment[match[1]] = match[2]
        words = words[1:]
    if not words:
        raise UserError(f"launch line {shlex.join(line.words)!r} has no program; give it, as python train.py")
    word = words[0]
    name = os.path.basename(word)
    if _PYTHON.fullmatch(name):
        return _python(line, word, words[1:])
    rows = _FIRST_WORDS.get(name)
    if not rows or (os.path.isfile(word) and word.endswith(".py")):
        return _file_or_console_script(line, words)
    for row in rows:
        command = row.name.split()[1:]
        if words[1 : 1 + len(command)] == command:
            return row.follow(line, row, words[1 + len(command) :])
    valid = ", ".join(row.name for row in rows)
    raise UserError(f"`{' '.join(words[:2])}` starts no training that can be followed; valid: {valid}")


# ------------------------------------------------------------------------------------------- programs


def _python(line: Line, interpreter: str, words: list[str]) -> list[str] | None:
    if os.path.dirname(interpreter) and not _is_this(interpreter):
        line.notes.append(f"predicted with {sys.executable}, not with {interpreter}")
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "--":
        option = rest.pop(0)
        if option.startswith("--"):
            if option == "--check-hash-based-pycs" and rest:
                rest.pop(0)
            continue
        match = re.fullmatch(r"-(\w*?)([cmWX])(.*)", option)
        if match is None:
            if option == "-":
                raise UserError("python - reads its program from stdin; write it to a file, and give that")
            continue  # flags alone, such as -u
        value = match[3] or (rest.pop(0) if rest else "")
        if match[2] == "c":
            raise UserError("python -c has no file; write the program to a file, and give python train.py")
        if match[2] == "m":
            if not value:
                raise UserError("python -m needs a module, as python -m package.train")
            return _module(line, value, rest)
    if rest[:1] == ["--"]:
        rest.pop(0)
    if not rest:
        raise UserError("python is given no program; give the whole line, as python train.py --its --flags")
    _check_exists(rest[0])
    line.runs(rest[0], rest[1:])
    return None


def _is_this(interpreter: str) -> bool:
    found = shutil.which(os.path.expanduser(interpreter))
    return found is not None and os.path.dirname(os.path.abspath(found)) == os.path.dirname(sys.executable)


def _module(line: Line, name: str, arguments: list[str]) -> list[str] | None:
    if name in _MODULES:
        row = _MODULES[name]
        return row.follow(line, row, arguments)
    line.runs(name, arguments, module=True)
    return None


def _check_exists(file: str) -> None:
    if not os.path.exists(file):
        folder = Path(file).parent
        names = [each.name for each in folder.glob("*.py")] if folder.is_dir() else []
        close = difflib.get_close_matches(Path(file).name, names, n=1)
        near = f" (did you mean {str(folder / close[0])!r}?)" if close else ""
        raise UserError(f"file {file!r} of the launch line does not exist{near}; give the line where it does")


def _file_or_console_script(line: Line, words: list[str]) -> list[str] | None:
    """`./train.py`, `train.sh`, or a program on the PATH."""
    word, arguments = words[0], words[1:]
    found = word if os.path.isfile(word) else _console_script(word)
    if found is None:
        if word.endswith((".py", ".sh")) or "/" in word:
            _check_exists(word)
        close = nearest(word)
        near = f"; did you mean {close}?" if close else ""
        raise UserError(
            f"{word!r} is no program of this Python ({sys.prefix}) and not on the PATH{near}; install oomph "
            f"where {word} is, or give its script, as python train.py"
        )
    if found.endswith(".py"):
        line.runs(found, arguments)
        return None
    interpreter = _interpreter(found)
    if interpreter in ("bash", "sh", "zsh", "dash", "ksh") or found.endswith(".sh"):
        return shell.only_command(line, found, arguments)
    if interpreter is None or not _PYTHON.fullmatch(os.path.basename(interpreter)):
        raise UserError(
            f"{word} ({found}) is not a Python program; give what it starts, as python train.py --its --flags"
        )
    _check_console_script(line, word, found, interpreter)
    line.runs(found, arguments)
    return None


def _console_script(word: str) -> str | None:
    """The file that the shell would run; where it has none, that of this Python's environment."""
    return shutil.which(word) or shutil.which(word, path=sysconfig.get_path("scripts"))


def _interpreter(file: str) -> str | None:
    """Of the first line, `#!`; long paths are in the second: '''exec' /long/path/python "$0" "$@"'."""
    try:
        with open(file, "rb") as opened:
            first, second = (opened.readline(4096).decode("utf-8", "replace") for _ in range(2))
    except OSError:
        return None
    if not first.startswith("#!"):
        return None
    if second.startswith("'''exec'"):
        return shlex.split(second.removeprefix("'''exec'"))[0]
    words = first[2:].split()
    found = words[1] if len(words) > 1 and os.path.basename(words[0]) == "env" else (words or [""])[0]
    return found if _PYTHON.fullmatch(os.path.basename(found)) else os.path.basename(found)


def _check_console_script(line: Line, word: str, file: str, interpreter: str) -> None:
    """Its package must be importable here; of another environment, its version may be another."""
    text = Path(file).read_text(encoding="utf-8", errors="replace")
    match = re.search(r"^\s*from\s+([\w.]+)\s+import", text, re.MULTILINE)
    package = match[1].partition(".")[0] if match else ""
    if package and package != "__future__" and importlib.util.find_spec(package) is None:
        raise UserError(
            f"{word} is a program of {interpreter}, whose package {package} is not in this Python "
            f"({sys.prefix}); install oomph there, and run that oomph"
        )
    if "/" in interpreter and not _is_this(interpreter):
        line.notes.append(f"{word} is a program of {interpreter}; predicted with {sys.executable}")


# -------------------------------------------------------------------------------- launchers of processes


def _rest(line: Line, row: Launcher, words: list[str]) -> list[str]:
    """Of a command that only runs another: `uv run`, `nohup`."""
    given, rest = row.options.split(row.name, words)
    if row.name == "uv run" and (environment := _project_environment()) not in (None, Path(sys.prefix)):
        line.notes.append(f"uv run uses {environment}; predicted with {sys.executable}")
    if "-m" in given or "--module" in given:
        return ["python", "-m", *rest]
    if rest[0].endswith(".py"):
        return ["python", *rest]
    return rest


def _project_environment() -> Path | None:
    folder = Path.cwd()
    return next((each / ".venv" for each in (folder, *folder.parents) if (each / ".venv").is_dir()), None)


def _env(line: Line, row: Launcher, words: list[str]) -> list[str]:
    given, rest = row.options.split(row.name, words)
    for option in given.keys() & {"-i", "--ignore-environment", "-u", "--unset"}:
        typed = f"env {option} {given[option]}".rstrip()
        raise UserError(f"{typed} cannot be followed; give the line without it, and run oomph under {typed}")
    return rest


def _timeout(line: Line, row: Launcher, words: list[str]) -> list[str]:
    return row.options.split(row.name, words)[1][1:]


def _on_ranks(line: Line, row: Launcher, words: list[str]) -> list[str] | None:
    """torchrun, and what has its options."""
    given, rest = row.options.split(row.name, words)
    _set_ranks(line, row.name, given)
    if "--no-python" in given:
        return rest
    local = ["--local-rank=0"] if row.name == "python -m torch.distributed.launch" else []
    if "--use-env" in given:
        local = []
    return ["python", *(["-m"] if given.keys() & {"-m", "--module"} else []), rest[0], *local, *rest[1:]]


def _set_ranks(line: Line, launcher: str, given: dict[str, str]) -> None:
    each = next((given[name] for name in _PER_NODE if name in given), "1")
    nodes = next((given[name] for name in _NODES if name in given), "1")
    if ":" in nodes:  # elastic: from the fewest, which hold most, to the most
        nodes = nodes.partition(":")[0]
        line.notes.append(f"{launcher} may run on more nodes than {nodes}; predicted for the fewest")
    if each in _AUTOMATIC:
        line.every_gpu = launcher
        each = "1"
    line.torchrun = True
    line.ranks = number(launcher, "the ranks of a node", each) * number(launcher, "the nodes", nodes)


_PER_NODE = ("--nproc-per-node", "--nproc", "-n", "--num-gpus", "--num-accelerators", "--devices")
_NODES = ("--nnodes", "--num-nodes")


def _accelerate(line: Line, row: Launcher, words: list[str]) -> list[str]:
    """Asked of accelerate itself, in an interpreter of its own: its configs and versions are its business."""
    names = ["accelerate", "launch"] if row.name.startswith("accelerate") else row.name.split()
    for each in dict.fromkeys((names[0], "accelerate")):
        _check_installed(each, row.name)
    if not words:
        raise UserError(f"{row.name} is given no program; give the whole line, as {row.name} train.py")
    program = str(Path(__file__).with_name("ask_accelerate.py"))
    asked = subprocess.run(
        [sys.executable, program, *names, *words],
        env={**os.environ, **line.environment},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    answer = next((each for each in asked.stdout.splitlines() if each.startswith(_ASKED)), None)
    if answer is None:
        said = [each for each in (asked.stderr or asked.stdout).strip().splitlines() if each.strip()]
        why = said[-1].strip() if said else f"it ended with status {asked.returncode}"
        raise UserError(f"{row.name} did not start: {why}")
    found = json.loads(answer.removeprefix(_ASKED))
    line.environment |= found["environment"]
    if found["every_gpu"]:
        line.every_gpu = row.name
    started: list[str] = found["words"]
    return started


def _check_installed(package: str, launcher: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise UserError(
            f"{launcher}: {package} is not installed in this Python ({sys.prefix}); install it, or run the "
            "oomph of the environment that has it"
        )


def _deepspeed(line: Line, row: Launcher, words: list[str]) -> list[str]:
    given, rest = row.options.split("deepspeed", words)
    included = given.get("--include") or given.get("-i") or ""
    if not given.keys() & {"--num-gpus", "--num-accelerators"} and ":" in included:
        given["--num-gpus"] = str(sum(len(each.partition(":")[2].split(",")) for each in included.split("@")))
    given.setdefault("--num-gpus", given.get("--num-accelerators", "-1"))
    _set_ranks(line, "deepspeed", given)
    if "--no-python" in given:
        return rest
    local = [] if "--no-local-rank" in given else ["--local_rank=0"]
    return ["python", *(["-m"] if "--module" in given else []), rest[0], *local, *rest[1:]]


def _fabric(line: Line, row: Launcher, words: list[str]) -> list[str]:
    """Its options may stand on both sides of the script."""
    given: dict[str, str] = {"--devices": "1"}
    rest, words = [], list(words)
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if word == "--":
            rest += words
            break
        if name not in _FABRIC:
            rest.append(word)
            continue
        if not equals and not words:
            raise UserError(f"{row.name}: {word} needs a value")
        given[name] = value if equals else words.pop(0)
    if not rest:
        raise UserError(f"{row.name} is given no script; give the whole line, as {row.name} train.py")
    devices = given["--devices"]
    if "," in devices:
        given["--devices"] = str(len([each for each in devices.split(",") if each]))
    _set_ranks(line, row.name, given)
    line.environment["LT_CLI_USED"] = "1"
    line.environment |= {"LT_DEVICES": devices, "LT_NUM_NODES": given.get("--num-nodes", "1")}
    for name in ("accelerator", "strategy", "precision"):
        if f"--{name}" in given:
            line.environment[f"LT_{name.upper()}"] = given[f"--{name}"]
    return ["python", *rest]


_FABRIC = (
    *("--accelerator", "--strategy", "--devices", "--num-nodes", "--node-rank", "--main-address"),
    *("--main-port", "--precision"),
)

# ------------------------------------------------------------------------------------------- frameworks


def _tune(line: Line, row: Launcher, words: list[str]) -> list[str]:
    """torchtune's own recipes and configs are files beside the package; others are modules and files."""
    given, rest = row.options.split(row.name, words)
    if "--config" not in rest[:-1]:
        raise UserError(f"{row.name} {rest[0]} needs --config, as --config llama3_2/1B_lora_single_device")
    if given:
        _set_ranks(line, row.name, given)
    recipes = _package_folder("torchtune", row.name).parent / "recipes"
    at = rest.index("--config") + 1
    config = recipes / "configs" / f"{rest[at]}.yaml"
    if config.is_file():
        rest[at] = str(config)
    _add_to_path(line, os.getcwd())
    recipe = recipes / f"{rest[0]}.py"
    if recipe.is_file():
        return ["python", str(recipe), *rest[1:]]
    return ["python", "-m", os.path.splitext(rest[0])[0].replace("/", "."), *rest[1:]]


def _add_to_path(line: Line, folder: str) -> None:
    before = line.variable("PYTHONPATH")
    line.environment["PYTHONPATH"] = os.pathsep.join(filter(None, (before, folder)))


def _package_folder(package: str, launcher: str) -> Path:
    _check_installed(package, launcher)
    spec = importlib.util.find_spec(package)
    assert spec is not None
    return Path(next(iter(spec.submodule_search_locations or ()), spec.origin or ""))


def _llamafactory(line: Line, row: Launcher, words: list[str]) -> list[str] | None:
    """It trains in its own process, unless torchrun is forced."""
    forced = (line.variable("FORCE_TORCHRUN") or "").lower() in ("true", "y", "1")
    folder = _package_folder("llamafactory", row.name)
    if forced:
        ranks = ["--nproc-per-node", line.variable("NPROC_PER_NODE") or "auto"]
        if line.variable("NNODES"):
            ranks += ["--nnodes", str(line.variable("NNODES"))]
        if (line.variable("OPTIM_TORCH") or "1").lower() in ("true", "y", "1"):
            line.environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
            line.environment["TORCH_NCCL_AVOID_RECORD_STREAMS"] = "1"
        return ["torchrun", *ranks, str(folder / "launcher.py"), *words]
    # As `llamafactory-cli train` with one GPU: the same function, in its own process.
    return ["python", str(folder / "launcher.py"), *words]


def _swift(line: Line, row: Launcher, words: list[str]) -> list[str]:
    words = _swift_config(line, words)
    program = _package_folder("swift", row.name) / "cli" / f"{row.name.split()[1]}.py"
    ranks = []
    for name, option in (("NPROC_PER_NODE", "--nproc-per-node"), ("NNODES", "--nnodes")):
        if (value := line.variable(name)) is not None:
            ranks += [option, value]
    return [*(["torchrun", *ranks] if ranks else ["python"]), str(program), *words]


def _swift_config(line: Line, words: list[str]) -> list[str]:
    """A config in the first place stands for options."""
    if not words or not words[0].endswith((".json", ".yaml", ".yml")):
        return words
    _check_exists(words[0])
    import yaml

    try:
        text = Path(words[0]).read_text(encoding="utf-8")
        config = json.loads(text) if words[0].endswith(".json") else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"config {words[0]!r} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(config, dict):
        raise UserError(f"config {words[0]!r} has no keys; give options in it, as `model: NAME`")
    for name, value in (config.pop("ENV", None) or {}).items():
        if line.variable(name) is None:
            line.environment[name] = str(value)
    line.environment["SWIFT_CONFIG_FILE"] = words[0]
    options = []
    for key, value in config.items():
        values = value if isinstance(value, list) else [value]
        options.append(f"--{key}")
        options += [json.dumps(one) if isinstance(one, dict) else str(one) for one in values]
    return [*options, *words[1:]]


def _axolotl(line: Line, row: Launcher, words: list[str]) -> list[str]:
    """`--launcher`, two options of it, and what follows `--` are the launcher's; the rest the module's."""
    end = words.index("--") if "--" in words else len(words)
    own, after = words[:end], words[end + 1 :]
    if not own or own[0].startswith("-"):
        raise UserError(f"{row.name} needs a config, as {row.name} config.yaml")
    _check_exists(own[0])
    given, rest = dict[str, str](), own[1:]
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if not equals and rest and not rest[0].startswith("--"):
            value = rest.pop(0)
        elif not equals:
            name, value = (f"--{name[5:]}", "False") if name.startswith("--no-") else (name, "True")
        given[name.replace("_", "-")] = value
    launcher = given.pop("--launcher", "accelerate")
    port, ranks = given.pop("--main-process-port", None), given.pop("--num-processes", None)
    if line.variable("PYTORCH_ALLOC_CONF") is None:
        line.environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    module = ["-m", "axolotl.cli.train", own[0], *(f"{name}={value}" for name, value in given.items())]
    if launcher == "python":
        return ["python", *module]
    if launcher == "torchrun":
        return ["torchrun", *after, *module]
    options = ["--main_process_port", port] if port else []
    options += ["--num_processes", ranks] if ranks else []
    return ["accelerate", "launch", *options, *after, *module]


# ------------------------------------------------------------------------------------- what is not followed


def _shell(line: Line, row: Launcher, words: list[str]) -> list[str]:
    rest = list(words)
    while rest and re.fullmatch(r"-[eux]+", rest[0]):
        rest.pop(0)
    if not rest or rest[0].startswith("-"):
        raise UserError(
            f"`{row.name} {' '.join(words[:1])}` is not followed; give the launch line that it runs"
        )
    _check_exists(rest[0])
    return shell.only_command(line, rest[0], rest[1:])


def _refused(line: Line, row: Launcher, words: list[str]) -> list[str]:
    """Another machine, or processes that nothing here starts: the part that can be predicted."""
    part, ranks = list[str](), None
    for index, word in enumerate(words):
        inside = next((each for each in map(str.strip, re.split("&&|;", word)) if _begins_line(each)), "")
        if " " in word and inside:
            part = shlex.split(inside)
            break
        known = _begins_line(word)
        if known or word.endswith((".py", ".sh")):
            part = words[index:] if known else [("python", "bash")[word.endswith(".sh")], *words[index:]]
            ranks = _ranks_of(words[:index])
            break
    starts_ranks = bool(part) and _PYTHON.fullmatch(os.path.basename(part[0])) is None
    refuse(row.name, _WHY.get(row.name, "starts programs elsewhere"), part, None if starts_ranks else ranks)


def _begins_line(text: str) -> bool:
    name = os.path.basename(text.partition(" ")[0])
    return name in _FIRST_WORDS or _PYTHON.fullmatch(name) is not None


def _ranks_of(options: Sequence[str]) -> int | None:
    text = " ".join(options)
    match = re.search(r"(?:^|\s)(?:-np|-n|--ntasks|--np)[ =]?(\d+)(?:\s|$)", text)
    each = re.search(r"--ntasks-per-node[ =](\d+)", text)
    nodes = re.search(r"(?:-N|--nodes)[ =]?(\d+)(?:\s|$)", text)
    if match:
        return int(match[1])
    return int(each[1]) * (int(nodes[1]) if nodes else 1) if each else None


_WHY = {
    "srun": "starts its tasks through Slurm",
    "sbatch": "queues a script with Slurm",
    "salloc": "asks Slurm for machines",
    "ssh": "runs on another machine",
    "docker": "runs in a container",
    "sudo": "runs as another user",
}

_TORCHRUN = Options(
    "--nnodes= --nproc-per-node= --rdzv-backend= --rdzv-endpoint= --rdzv-id= --rdzv-conf= --standalone",
    "--max-restarts= --monitor-interval= --start-method= --event-log-handler= --role= -m --module",
    "--no-python --run-path --log-dir= -r= --redirects= -t= --tee= --local-ranks-filter=",
    "--duplicate-stdout-filters= --duplicate-stderr-filters= --node-rank= --master-addr= --master-port=",
    "--local-addr= --logs-specs= --numa-binding= --signals-to-handle= --shutdown-timeout=",
    "--virtual-local-rank --use-env",
)
_UV = Options(
    "--with= --with-editable= --with-requirements= --extra= --no-extra= --group= --no-group= --only-group=",
    "-p= --python= --project= --directory= --package= --env-file= --index= --index-url= --extra-index-url=",
    "-m --module --all-extras --all-groups --no-dev --dev --only-dev --isolated --active --no-sync --locked",
    "--frozen --no-project --offline --exact --no-env-file --refresh -q --quiet -v --verbose --no-cache -n",
    "-U --upgrade --upgrade-package= --managed-python --no-managed-python --prerelease= --script -s",
)

LAUNCHERS = (
    # Commands before the program.
    Launcher("env", _env, Options("-i --ignore-environment -u= --unset= -S= -v")),
    Launcher("uv run", _rest, _UV),
    Launcher("poetry run", _rest),
    Launcher("pdm run", _rest, Options("-p= --project=")),
    Launcher("pipenv run", _rest),
    Launcher("rye run", _rest),
    Launcher("hatch run", _rest),
    Launcher("pixi run", _rest, Options("-e= --environment= --manifest-path= --frozen --locked")),
    Launcher("conda run", _rest, Options("-n= --name= -p= --prefix= --no-capture-output --live-stream")),
    Launcher("nohup", _rest),
    Launcher("time", _rest, Options("-p -v --verbose -f= -o=")),
    Launcher("exec", _rest),
    Launcher("nice", _rest, Options("-n= --adjustment=")),
    Launcher("ionice", _rest, Options("-c= -n= -t")),
    Launcher("numactl", _rest, Options("--cpunodebind= --membind= -N= -m= --physcpubind= -C= --interleave=")),
    Launcher("taskset", _timeout, Options("-c")),
    Launcher("timeout", _timeout, Options("-s= --signal= -k= --kill-after= --foreground -v")),
    # Launchers of ranks.
    Launcher("torchrun", _on_ranks, _TORCHRUN, ("torch.distributed.run",)),
    Launcher("python -m torch.distributed.launch", _on_ranks, _TORCHRUN, ("torch.distributed.launch",)),
    Launcher("accelerate launch", _accelerate, modules=("accelerate.commands.launch",)),
    Launcher("accelerate-launch", _accelerate),
    Launcher(
        "deepspeed",
        _deepspeed,
        Options(
            "-H= --hostfile= -i= --include= -e= --exclude= --num-nodes= --num-gpus= --num-accelerators=",
            "--master-port= --master-addr= --node-rank= --launcher= --launcher-args= --module --no-python",
            "--no-local-rank --no-ssh --no-ssh-check --force-multi --save-pid --enable-each-rank-log=",
            "--autotuning= --bind-cores-to-rank --bind-core-list= --ssh-port= --venv-script= --log-level=",
            "-q --quiet",
        ),
        ("deepspeed.launcher.runner",),
    ),
    Launcher("fabric run", _fabric, modules=("lightning.fabric.cli", "lightning_fabric.cli")),
    Launcher("lightning run model", _fabric),
    Launcher("composer", _on_ranks, Options("-n= --nproc= -m --module --world-size= --stdout= --stderr= -v")),
    Launcher(
        "colossalai run",
        _on_ranks,
        Options("--nproc-per-node= --num-nodes= --master-addr= --master-port= --hostfile= --host= -m"),
    ),
    # Frameworks that start ranks. Others (litgpt, yolo) train in the process of their console script.
    Launcher("tune run", _tune, _TORCHRUN),
    Launcher("llamafactory-cli train", _llamafactory),
    Launcher("lmf train", _llamafactory),
    *(Launcher(f"swift {command}", _swift) for command in ("sft", "pt", "rlhf")),
    *(
        Launcher(f"trl {command}", _accelerate)
        for command in ("sft", "dpo", "grpo", "kto", "reward", "rloo", "distillation")
    ),
    Launcher("axolotl train", _axolotl),
    # Shells, and what is not followed.
    *(Launcher(name, _shell) for name in ("bash", "sh", "zsh")),
    *(
        Launcher(name, _refused)
        for name in (
            *("srun", "sbatch", "salloc", "ssh", "mpirun", "mpiexec", "horovodrun", "docker", "podman"),
            *("singularity", "apptainer", "kubectl", "sudo", "nsys", "ncu", "sky", "modal", "ray", "torchx"),
            *("py-spy", "kernprof", "screen", "tmux"),
        )
    ),
)
_FIRST_WORDS: dict[str, list[Launcher]] = {}
for _row in LAUNCHERS:
    if not _row.name.startswith("python"):
        _FIRST_WORDS.setdefault(_row.name.split()[0], []).append(_row)
_MODULES = {module: row for row in LAUNCHERS for module in row.modules}
