"""TARGET on the command line: `file.py:name`, `package.module:name` or a config; and its own errors."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console

from oomph import gpus, notebooks
from oomph.cli import extensions
from oomph.cli.common import (
    Gpu,
    Max,
    ModelOptions,
    Module,
    OverrideWords,
    Steps,
    Torchrun,
    progress_display,
)
from oomph.errors import (
    OomphError,
    ProgramError,
    UserError,
    is_missing_gpu,
    missing_arguments,
    place,
    program_traceback,
    user_line,
)
from oomph.launch import Launch, follow, is_launcher, nearest
from oomph.models import configuration
from oomph.models.finetuning import PROGRAM, FineTuning
from oomph.records import Note
from oomph.report.terminal import short_path
from oomph.units import parse_bytes

if TYPE_CHECKING:
    from oomph.prediction import Script
    from oomph.workload import Workload

_NO_SCRIPT = (
    "file.py:name or package.module:name, where name is a Workload, a function that returns one, or a "
    "function that sets up and returns the step; or a config, e.g. configs/pythia_70m.yaml"
)
VALID = (
    "give a script, as train.py; a launch line, as torchrun train.py; a model's name, as Qwen/Qwen3-8B; "
    f"{_NO_SCRIPT}"
)

# ------------------------------------------------------------------------------------------- targets


@dataclass(frozen=True, slots=True)
class TargetOptions(ModelOptions):
    """The target of a command that also takes scripts."""

    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="A script (train.py -- --its --flags), a launch line (-- torchrun train.py --its --flags), "
            "a model's name (Qwen/Qwen3-8B --method lora), a config (.yaml), or file.py:name or "
            "package.module:name; name is a Workload, a function that returns one, or a function that sets "
            "up and returns the step.",
        ),
    ] = ""
    overrides: OverrideWords = ()  # of a script: its arguments
    module: Module = None
    torchrun: Torchrun = False
    config: extensions.Config | None = None  # the target, if it is one; see find_target
    model: FineTuning | None = None  # likewise; target and overrides are then those of its program
    launch: Launch | None = None  # likewise

    @property
    def typed(self) -> str:
        """The target with its arguments."""
        if self.launch is not None:
            return f"-- {self.launch.typed}"
        if self.model is not None:
            return shlex.join(self._words)
        return shlex.join(
            (*self._words, *(["--"] if self.module and self.overrides else []), *self.overrides)
        )

    def command(self, name: str, *options: str) -> list[str]:
        """`oomph name` for this target, with options."""
        if self.launch is not None:
            return [name, *options, "--", *self.launch.words]
        if self.model is not None:
            return [name, *self._words, *options]
        if not self.is_script:
            return [name, self.target, *self.overrides, *options]
        return [name, *self._words, *options, *(["--"] if self.overrides else []), *self.overrides]

    @property
    def _words(self) -> list[str]:
        if self.model is not None:
            return [self.model.model, *self.given]
        launcher = ["--torchrun"] if self.torchrun else []
        return [*launcher, *(["-m"] if self.module else []), self.target]

    @property
    def is_script(self) -> bool:
        return self.module is not None or self.launch is not None or is_script(self.target)

    def script(self, steps: int | None = None) -> Script:
        if self.model is not None:
            return self.model.script()
        from oomph.prediction import Script

        script = Script(self.target, self.overrides, self.module is not None, torchrun=self.torchrun)
        if self.launch is not None:
            script = replace(script, ranks=self.launch.ranks)
        return script if steps is None else replace(script, steps=steps)

    def open(self) -> AbstractContextManager[Workload | Callable[[], Any]]:
        return open_target(self.target, self.overrides, self.config)


@dataclass(frozen=True, slots=True)
class StepOptions(TargetOptions):
    """A target, the card that its step is for, and the steps of a script."""

    gpu: Gpu = None
    max: Max = None
    steps: Steps = None

    @property
    def limits(self) -> list[str]:
        """The options as words, for another command."""
        given = {"--gpu": self.gpu, "--max": self.max, "--steps": self.steps}
        return [word for name, value in given.items() if value is not None for word in (name, str(value))]

    def check(self) -> None:
        """Raise for mistakes that show before torch is imported and the target traced."""
        if self.gpu is not None:
            gpus.find(self.gpu)
        if self.max is not None:
            parse_bytes(self.max)
        if self.steps is not None and self.steps < 1:
            raise UserError(f"--steps {self.steps} is not valid; give a positive number")
        if (self.steps is not None or self.torchrun) and (not self.is_script or self.model is not None):
            raise UserError("--steps and --torchrun are for scripts, as train.py or -m package.module")
        if not self.is_script and self.config is None:
            check_target(self.target, self.overrides)
        elif self.is_script and self.module is None and self.launch is None:
            check_python_file(self.target)


class TargetCommand(typer.core.TyperCommand):
    """An option is given once, --key is for configs, arguments of a script come after `--`, and a launch line
    is the end of the command."""

    ignore_unknown_options = True

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if begin := self._launch_line(ctx, args):
            args = [*args[:-begin], "--", *args[-begin:]]
        after = len(args) - args.index("--") - 1 if "--" in args else 0
        options: list[Any] = [each for each in self.params if each.param_type_name == "option"]
        _, _, given = self.make_parser(ctx).parse_args([*args])
        for each in options:
            if (times := given.count(each)) > 1 and not each.multiple and not each.is_flag:
                raise UserError(f"{each.opts[0]} was given {times} times; give it once")
        rest = super().parse_args(ctx, args)
        target, module = ctx.params["target"] or "", ctx.params["module"]
        words = [*([target] if module else []), *(ctx.params["overrides"] or ())]
        of_script = module is not None or is_script(target)
        for word in words[: max(0, len(words) - after)]:
            if word.startswith("-") and (of_script or not is_config(target)):
                names = [name for each in options for name in each.opts]
                close = difflib.get_close_matches(word.partition("=")[0], names, n=1, cutoff=0.8)
                nearest = f"; the nearest is {close[0]}" if close else ""
                advice = ". Options of the script come after --" if of_script else ""
                raise UserError(f"No such option: {word}{nearest}{advice}")
            if of_script and re.match(r"[A-Za-z_][\w.]*=", word):
                raise UserError(
                    f"{word!r} would be an argument of the script; these come after -- "
                    f"(`oomph {self.name} train.py -- {word}`); KEY=VALUE changes configs and Workloads"
                )
        return rest

    def _launch_line(self, ctx: Any, args: list[str]) -> int:
        """The number of its words at the end, where it stands without `--`."""
        parser = self.make_parser(ctx)
        parser.allow_interspersed_args = False
        given, _, _ = parser.parse_args([*args])
        line = [word for word in (given.get("target"), *(given.get("overrides") or ())) if word]
        if line and " " in line[0]:  # all of it in one word: options may follow
            return 0
        begins = len(args) - len(line)  # unless an unknown option, which is reported later, stands before it
        if not line or args[begins:] != line or args[begins - 1 : begins] == ["--"] or given.get("module"):
            return 0
        return len(line) if is_launch_line(line[0]) else 0


Options = TypeVar("Options", bound=TargetOptions)


def find_target(options: Options, command: str) -> Options:
    """With -m, the module is the target, and the first word is its argument. A config is opened, and a
    model's name becomes its program."""
    if options.module is None and not options.target:
        raise UserError(f"{command} needs a {'SCRIPT' if command == 'run' else 'TARGET'}, or -m MODULE")
    if options.module is None and is_launch_line(options.target):
        return _with_launch(options, command)
    if options.module is None and is_model(options.target, options.given):
        return _with_model(options)
    if options.given:
        of_script = options.module is not None or is_script(options.target)
        advice = "; options of the script come after --" if of_script else ""
        raise UserError(f"{options.given[0]} is for a model's name, as Qwen/Qwen3-8B --method lora{advice}")
    if options.module is None:
        return replace(options, config=_config(options.target, options.overrides))
    words = (*([options.target] if options.target else []), *options.overrides)
    return replace(options, target=options.module, overrides=words)


def check_target(target: str, overrides: Sequence[str] = ()) -> None:
    """Raise for mistakes that show before torch is imported, which takes seconds."""
    if _config(target, overrides) is not None:
        return
    source, _ = split_target(target)
    _sizes(overrides, target)
    if _is_file(source):
        check_python_file(source)


@contextmanager
def open_target(
    target: str, overrides: Sequence[str] = (), config: extensions.Config | None = None
) -> Iterator[Workload | Callable[[], Any]]:
    """The object that `target` names, or the Workload of a config with its overrides.

    sys.path and sys.argv are as Python would have them for the program until the block ends, because models
    are often built, and modules imported, only while the step is traced; then they are restored.
    """
    if (config := config or _config(target, overrides)) is not None:
        yield config.workload()
        return
    check_target(target, overrides)
    from oomph.prediction.program import seed_generators

    source, name = split_target(target)
    seed_generators()
    path, modules, arguments = list(sys.path), set(sys.modules), sys.argv
    sys.argv = [source]
    try:
        found = _check_object(_attribute(_import(source), name, source), target)
        sizes = _sizes(overrides, target)
        yield workload_of(found, target).with_sizes(sizes) if sizes else found
    finally:
        sys.path[:], sys.argv = path, arguments
        if _is_file(source):
            # Only the file's own entry is removed; the modules it imported belong to the process.
            for taken in _module_names(source):
                if taken not in modules:
                    sys.modules.pop(taken, None)


def is_model(target: str, given: Sequence[str] = ()) -> bool:
    """Whether it is a model's name, or was meant as one, since options of a model are `given`."""
    if ":" in target or is_script(target) or is_config(target) or os.path.isfile(target):
        return False
    return bool(given) or configuration.is_name(target)


def is_launch_line(word: str) -> bool:
    """Whether a launch line begins with it."""
    is_other = is_script(word) or is_config(word) or (":" in word and "=" not in word) or is_model(word)
    return not is_other and is_launcher(word)


def _with_launch(options: Options, command: str) -> Options:
    """Its program, in the environment that the line gives to it, until the command ends."""
    if options.given:
        raise UserError(
            f"{options.given[0]} is for a model's name, not for a launch line, whose own options come last"
        )
    with progress_display(Console(stderr=True)) as report:
        report("following the launch line", None)
        found = follow((options.target, *options.overrides))
    set_environment(found.environment)
    return replace(
        options,
        target=found.program,
        overrides=found.arguments,
        module=found.program if found.module else None,
        torchrun=options.torchrun or found.torchrun,
        launch=found,
    )


def set_environment(added: Mapping[str, str]) -> None:
    """As if the command had been started with it; PYTHONPATH is read when Python starts."""
    os.environ.update(added)
    if "PYTHONPATH" in added:
        folders = [os.path.abspath(each) for each in added["PYTHONPATH"].split(os.pathsep) if each]
        sys.path[1:1] = [each for each in folders if each not in sys.path]


def launch_notes(options: TargetOptions, ranks: int | None = None) -> tuple[Note, ...]:
    """What the launch line leaves open. `ranks`: given beside it."""
    if options.launch is None:
        return ()
    every = options.launch.every_gpu if ranks is None else ""
    counted = f"{every} would start a process for each GPU: predicted for one (predict --ranks N: one of N)"
    return tuple(map(Note, (*options.launch.notes, *([counted] if every else []))))


def launch_to_json(options: TargetOptions) -> dict[str, Any]:
    """For `--json`: the launch line and where it leads; {} for other targets."""
    if (found := options.launch) is None:
        return {}
    ranks = found.ranks if found.torchrun else None
    return {"launch": {"line": found.typed, "program": found.program, "module": found.module, "ranks": ranks}}


def one_process(options: TargetOptions, command: str, *words: str) -> None:
    """Raise for a launch line of several ranks, of which `oomph run` and `measure` start none."""
    if options.launch is None or options.launch.ranks == 1:
        return
    line = options.launch.with_oomph_run(*words)
    advice = f"; `{line}` records each of them" if line else ""
    raise UserError(
        f"`oomph {command}` starts one process, and the launch line {options.launch.ranks} ranks{advice}; "
        f"`{shlex.join(('oomph', *options.command('predict')))}` predicts one of them"
    )


def _with_model(options: Options) -> Options:
    if options.overrides:
        raise UserError(f"{options.target} takes options, as --batch 4, not {options.overrides[0]!r}")
    model = options.finetuning(options.target)
    model.check()
    return replace(options, target=PROGRAM, overrides=model.words(), model=model)


def is_script(target: str) -> bool:
    return target.endswith((".py", notebooks.SUFFIX)) and ":" not in target


def is_config(target: str) -> bool:
    return target.endswith((".yaml", ".yml"))


def allocator_limit(options: TargetOptions, limit: str | None) -> str | None:
    """The smaller of --max and a config's limit; None where there is none."""
    limits = [limit, None if options.config is None else options.config.memory_limit]
    return min((each for each in limits if each is not None), key=parse_bytes, default=None)


def _config(target: str, overrides: Sequence[str]) -> extensions.Config | None:
    if not is_config(target):
        return None
    kind: type[extensions.Config] = extensions.load(extensions.TARGETS, target.rpartition(".")[2])
    return kind(target, overrides)


def workload_of(target: Workload | Callable[[], Any], name: str) -> Workload:
    """The target as a Workload, which fixes and sizes need. name: as the user wrote it."""
    from oomph.workload import Workload

    if isinstance(target, Workload):
        return target
    from oomph.prediction import call_on_fake_gpu

    found = call_on_fake_gpu(target)
    if not isinstance(found, Workload):
        from oomph.prediction.program import described

        raise UserError(
            f"target {name!r} returned {described(found)}; fixes and sizes need a Workload, or a function "
            'that returns one; in a loop of your own, oomph.apply("activation_checkpointing", model), and '
            "--sizes B=4 where it moves the batch to the GPU"
        )
    return found


def split_target(target: str) -> tuple[str, str]:
    """("file.py", "name"); raises UserError for anything else."""
    source, colon, name = target.rpartition(":")
    if not colon:
        if is_script(target):
            raise UserError(
                f"target {target!r} is a whole script, which this command does not take; give {_NO_SCRIPT}"
            )
        what = "is a folder" if os.path.isdir(target) else f"has no colon{_nearest_file(Path(target))}"
        if close := configuration.near(target):
            raise UserError(f"target {target!r} is not known; the nearest models are {', '.join(close)}")
        if launcher := nearest(target):
            raise UserError(f"target {target!r} is not known; the nearest launcher is {launcher}")
        raise UserError(f"target {target!r} {what}; {VALID}")
    if notebooks.is_notebook(source):
        raise UserError(f"target {target!r} is a part of a notebook, which is predicted as a whole: {source}")
    if not source or not name.isidentifier():
        raise UserError(f"target {target!r} is not valid; {VALID}")
    return source, name


def _sizes(words: Sequence[str], target: str) -> dict[str, int]:
    """`B=4 T=512` after a program: sizes of its Workload."""
    sizes = {}
    for word in words:
        match = re.fullmatch(r"([A-Za-z_]\w*)=([1-9]\d{0,17})", word)
        if match is None:
            raise UserError(
                f"target {target!r}: {word!r} is not a size of its Workload; give NAME=NUMBER, as B=4 "
                "(only a config, a .yaml file, has other keys)"
            )
        sizes[match[1]] = int(match[2])
    return sizes


def _attribute(module: ModuleType, name: str, source: str) -> Any:
    """`module.name`, or a UserError with the nearest names."""
    try:
        return getattr(module, name)
    except AttributeError:
        pass
    public = {
        known: value
        for known, value in vars(module).items()
        if not known.startswith("_") and not inspect.ismodule(value) and not inspect.isclass(value)
    }
    close = difflib.get_close_matches(name, public, n=3)
    if close:
        hint = f"did you mean {' or '.join(map(repr, close))}?"
    else:
        # Functions written in the module, and Workloads.
        homes = (module.__name__, "oomph.workload")
        own = [known for known, value in public.items() if getattr(value, "__module__", None) in homes]
        hint = f"it defines {', '.join(own[:8])}" if own else "it defines nothing that could be a target"
        hint += f"; `oomph predict {source}` predicts the whole script" if _is_file(source) else ""
    raise UserError(f"{source} has no {name!r}; {hint}")


def _check_object(found: Any, target: str) -> Workload | Callable[[], Any]:
    """`found` itself, if it is a Workload or a function that can be called without arguments."""
    from oomph.prediction.program import described, is_step, required_arguments
    from oomph.workload import Workload

    if isinstance(found, Workload):
        return found
    given = described(found)
    if is_step(found):
        required = required_arguments(found)
        if not required:
            return found
        given = f"a function that needs arguments ({', '.join(required)})"
    wanted = "give a Workload, or a function of no arguments that returns one"
    raise UserError(f"target {target!r} is {given}; {wanted}")


# ------------------------------------------------------------------------------------------- importing


def _import(source: str) -> ModuleType:
    return _import_file(source) if _is_file(source) else _import_module(source)


def _is_file(source: str) -> bool:
    return source.endswith(".py") or "/" in source or "\\" in source


def check_python_file(source: str, valid: str = VALID) -> None:
    path = Path(source)
    if not path.is_file():
        what = "is a directory" if path.is_dir() else "does not exist"
        if path.is_symlink():
            what = "is a symbolic link to nothing"
        raise UserError(f"file {source!r} {what}{_nearest_file(path)}; {valid}")
    if path.suffix not in (".py", notebooks.SUFFIX):
        raise UserError(f"file {source!r} is not a Python file; {valid}")
    if not os.access(path, os.R_OK):
        raise UserError(f"file {source!r} cannot be read: Permission denied")
    if notebooks.is_notebook(source):
        notebooks.load(source)


def _import_file(source: str) -> ModuleType:
    path = Path(source).resolve()
    sys.path.insert(0, str(path.parent))  # as `python file.py` does
    # Under its own name, modules beside it can import it; an existing module must not be overwritten.
    name = next(name for name in _module_names(source) if name not in sys.modules)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # it ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with _as_program_error(source), _cuda_reported_available():
            spec.loader.exec_module(module)
    except ProgramError:
        sys.modules.pop(name, None)
        raise
    return module


def _import_module(source: str) -> ModuleType:
    if not all(part.isidentifier() for part in source.split(".")):
        raise UserError(f"module {source!r} is not a valid module name; {VALID}")
    sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    with _as_program_error(source), _cuda_reported_available():
        try:
            return importlib.import_module(source)
        except ModuleNotFoundError as error:
            # The missing module is the target, or a package above it; otherwise the program lacks one.
            if error.name is None or not f"{source}.".startswith(f"{error.name}."):
                raise
            missing = error.name
    inside = "" if missing == source else f" (there is no {missing!r})"
    raise UserError(f"module {source!r} was not found{inside}; {VALID}")


def _module_names(source: str) -> tuple[str, str]:
    stem = Path(source).stem
    return stem, f"{stem} (oomph target)"


def _nearest_file(path: Path) -> str:
    """Of its folder; where there is no such folder, of one with a similar name."""
    folders = [one.name for one in path.parent.parent.glob("*/")] if not path.parent.is_dir() else []
    similar = difflib.get_close_matches(path.parent.name, folders, n=1)
    folder = path.parent.with_name(similar[0]) if similar else path.parent
    names = [one.name for one in folder.glob("*") if one.suffix in (".py", ".ipynb", ".yaml", ".yml")]
    close = difflib.get_close_matches(path.name, names, n=1)
    return f" (did you mean {str(folder / close[0])!r}?)" if close else ""


@contextmanager
def _cuda_reported_available() -> Iterator[None]:
    """Many programs choose their device when they are imported; they are predicted for a GPU."""
    import torch

    from oomph.prediction.isolation import is_isolated
    from oomph.torch_internals import has_triton

    answer = torch.cuda.is_available
    if not is_isolated() and answer():  # it runs on the real one
        yield
        return
    # torch caches this, and asked while CUDA is reported to be available, it would start CUDA.
    torch.cuda.is_available = lambda: False
    has_triton()
    torch.cuda.is_available = lambda: True
    try:
        yield
    finally:
        torch.cuda.is_available = answer


# ------------------------------------------------------------------------------------------- errors


@contextmanager
def _as_program_error(source: str) -> Iterator[None]:
    """Raise what the program raises while it is imported as a ProgramError with the program's line."""
    try:
        yield
    except OomphError as error:
        # A Workload rejects bad arguments in its constructor: say where that is called.
        if at := raised_at(error):
            error.args = (f"{at}: {error}",)
        raise
    except KeyboardInterrupt:
        raise
    except SystemExit as error:
        message = f"{source} ends the process while it is imported (SystemExit: {error.code})"
        message += missing_arguments(error)
        raise ProgramError(message, *user_line(error), program_traceback(error)) from error
    except BaseException as error:
        if is_missing_gpu(error):
            script = source if _is_file(source) else f"-m {source}"
            raise UserError(
                f"{raised_at(error) or source} uses the GPU while {source} is imported, as a script does: "
                f"`oomph predict {script}` predicts the whole script; "
                "otherwise name a function that uses the GPU only when it is called"
            ) from error
        raise ProgramError.of(error) from error


def raised_at(error: BaseException) -> str:
    """`train.py:7`; "" where no line of the program is known."""
    file, line = user_line(error)
    return place(short_path(file), line) if file and line else ""


def program_error_text(error: ProgramError) -> tuple[str, str]:
    """Guesses that it branched on and the program's own traceback; and one line: where, and the message."""
    trace = error.traceback
    if error.assumed:
        trace = "\n  ".join(["assumed before the failure:", *error.assumed]) + f"\n{trace}"
    message = str(error).strip().split("\n")[0]  # the traceback has the rest
    file, line = error.file, error.line
    if file is None or (line and place(Path(file).name, line) in message):  # the message says where
        return trace, f"the program failed: {message}"
    where = place(short_path(file), line) if line else short_path(file)
    return trace, f"the program failed at {where}: {message}"
