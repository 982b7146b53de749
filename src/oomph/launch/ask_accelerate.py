"""What `accelerate launch` would start, by accelerate's own code. A program, run as

    python ask_accelerate.py accelerate launch --config_file fsdp.yaml train.py --lr 1e-4

or with `trl sft ...`, which launches through accelerate. It prints one JSON object: the words of the command
and the variables that it adds to the environment. It starts nothing.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from typing import Any

_MARK = "oomph-launch "
_every_gpu = False  # would have a process, because neither the line nor a config says how many


def _answer(words: list[str], environment: dict[str, str], before: dict[str, str]) -> None:
    added = {name: value for name, value in environment.items() if before.get(name) != value}
    answer = {"words": words, "environment": added, "every_gpu": _every_gpu}
    print(_MARK + json.dumps(answer), flush=True)
    os._exit(0)


def _torchrun(args: Any) -> list[str]:
    program = ["-m"] if args.module else ["--no-python"] if args.no_python else []
    nodes = ["--nnodes", str(args.num_machines)] if args.num_machines > 1 else []
    each = int(args.num_processes) // max(args.num_machines, 1)
    return [
        *("torchrun", *nodes, "--nproc-per-node", str(max(each, 1)), *program),
        *(args.training_script, *args.training_script_args),
    ]


def _pretend_gpus() -> list[int]:
    """The answer does not depend on the GPUs of this machine: there are as many as it says."""
    import torch

    found = [1]
    answers: dict[str, Any] = {
        "is_available": True,
        "is_bf16_supported": True,
        "current_device": 0,
        "set_device": None,
        "get_device_capability": (9, 0),
    }
    for name, value in answers.items():
        setattr(torch.cuda, name, lambda *_, value=value, **__: value)
    torch.cuda.device_count = lambda: found[0]
    return found


def main(words: list[str]) -> None:
    from accelerate.commands import launch
    from accelerate.utils import launch as environments

    if words[0] == "trl":
        import_module(f"trl.scripts.{words[1]}").make_parser()  # imports what asks for CUDA
    ranks = _pretend_gpus()
    before = dict(os.environ)

    def simple(args: Any) -> None:
        command, environment = environments.prepare_simple_launcher_cmd_env(args)
        _answer(command, environment, before)

    def several(args: Any) -> None:
        _answer(_torchrun(args), environments.prepare_multi_gpu_env(args), before)

    def deepspeed(args: Any) -> None:
        command, environment = environments.prepare_deepspeed_cmd_env(args)
        _answer(command or _torchrun(args), environment, before)

    validate = launch._validate_launch_command

    def validated(args: Any) -> Any:
        global _every_gpu
        given = args.num_processes
        ranks[:] = [given or 1]
        found = validate(args)
        _every_gpu = given is None and found[1] is None
        return found

    launch._validate_launch_command = validated
    launch.simple_launcher, launch.multi_gpu_launcher, launch.deepspeed_launcher = simple, several, deepspeed
    sys.argv = words
    if words[0] == "trl":
        from trl.cli import main as trl

        trl()
    else:
        launch.launch_command(launch.launch_command_parser().parse_args(words[2:]))
    sys.exit(f"{' '.join(words[:2])} starts no program of this machine")  # as for TPUs or SageMaker


if __name__ == "__main__":
    sys.path[:] = [each for each in sys.path if each != os.path.dirname(os.path.abspath(__file__))]
    main(sys.argv[1:])
