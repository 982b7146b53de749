"""What helps where a predicted program fails: a row for each kind of error, by what its text looks like.

A new kind of error is a new row of ROWS; the first that matches is taken.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass

from oomph.errors import ProgramError

_NAME = r"[\w.-]+/[\w.-]+"  # on the Hugging Face Hub
_OFFLINE = (
    r"offline mode|OfflineModeIsEnabled|outgoing traffic has been disabled|[Ii]nternet connection|"
    r"[Cc]ouldn't (?:connect to|reach)|[Cc]ould not connect|Max retries exceeded|Failed to resolve|"
    r"name resolution|Name or service not known|Network is unreachable|cannot use the network"
)
_ON_HUB = rf"(?s)(?=.*(?:{_OFFLINE}))"


@dataclass(frozen=True, slots=True)
class Row:
    error: str  # a pattern in the message or, where it is not there, in the traceback
    advice: str | Callable[[re.Match[str]], str]  # one line; {0}, {1}: groups of the pattern
    forbidden: str = ""  # only where this was not allowed, as "network"


def _model(match: re.Match[str]) -> str:
    name = next((one for one in match.groups() if one), "")
    text = (
        f"a prediction keeps the network off: `hf download {name or 'NAME'}` before, a folder instead of the "
        "name, or --allow-network (what it downloads then is not kept)"
    )
    return f"{text}; `oomph predict {name} --method full` needs no weights" if name else text


def _gated(match: re.Match[str]) -> str:
    return (
        f"accept the terms of {match[1] or 'the model'} on its page and log in with `hf auth login`, or give "
        "a folder that has it"
    )


ROWS = (
    # The network.
    Row(
        r"Couldn't (?:reach|find) (?:the Hugging Face Hub for dataset )?'([^']+)'",
        "a prediction keeps the network off: load data set {0} once without oomph, so that the cache has it, "
        "or permit the network with --allow-network (what it downloads then is not kept)",
        "network",
    ),
    Row(rf"{_ON_HUB}.*from_pretrained\(\s*[\"']({_NAME})[\"']", _model, "network"),
    Row(rf"{_ON_HUB}.*(?:huggingface\.co/(?:api/models/)?({_NAME})/|huggingface_hub)", _model, "network"),
    Row(
        _OFFLINE,
        "a prediction keeps the network off: --allow-network permits it; or give the program a file on this "
        "machine",
        "network",
    ),
    Row(rf"(?:gated repo|GatedRepoError|401 Client Error|403 Client Error)(?:.*?({_NAME})/resolve)?", _gated),
    # Other programs and files.
    Row(
        r"cannot (?:start other programs|spawn Python processes|send signals)",
        "a prediction starts no other program: --allow-subprocesses permits it, and what they do is real",
        "subprocesses",
    ),
    Row(
        r"PermissionError: \[Errno 13\]",
        "a library that opens files for writing by itself, as h5py does, needs --allow-subprocesses",
        "subprocesses",
    ),
    Row(
        r"(?:FileNotFoundError|NotADirectoryError).*: '|No such file or directory: ",
        "the program reads its files as in a real run: start oomph where the program is started, or give it "
        "a sample of the data, of which only sizes matter",
    ),
    # The environment.
    Row(
        r"(?<![A-Z_])((?:LOCAL_|GROUP_)?(?:WORLD_SIZE|RANK)|MASTER_\w+)'?(?: expected, but not set)?$",
        "torchrun sets {0}: add --torchrun, or --ranks 8 for one of 8 ranks",
    ),
    Row(
        r"'(SLURM_\w+)'",
        "srun sets {0}: give it, as SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=8 oomph predict train.py "
        "--ranks 8",
    ),
    Row(
        r"'((?:OMPI|PMI|PMIX|MV2|MPI)_\w+)'",
        "mpirun sets {0}: give it, as {0}=0 oomph predict train.py --ranks 8",
    ),
    Row(
        r"(?s)environ\[(?=.*KeyError: '(\w+)')",
        "the program reads {0} from the environment: {0}=VALUE oomph predict ...",
    ),
    Row(
        r"cuda:\d+ was asked for|invalid device ordinal",
        "one GPU is predicted: of a program with a process for each GPU, --ranks 2 predicts the first of 2; "
        "one process with several GPUs is not predicted",
    ),
    Row(r"No module named '(google\.colab)", "{0} is on Colab alone: remove what needs it"),
    Row(
        r"ModuleNotFoundError: No module named '([\w.]+)'$",  # without advice of its own
        f"the program runs in the environment {sys.prefix}: install {{0}} there, or add its folder to "
        "PYTHONPATH",
    ),
    Row(
        r"EOFError: EOF when reading a line",
        "what the program asks on standard input has no answer here: give it as an argument",
    ),
)


def what_helps(error: ProgramError) -> str:
    """One line on what to do; "" where no row knows the error, or the message says it already."""
    message = str(error)
    for row in ROWS:
        if row.forbidden and row.forbidden not in error.forbidden:
            continue
        match = re.search(row.error, message) or re.search(row.error, f"{error.traceback}\n{message}")
        if match is None:
            continue
        groups = [one or "" for one in match.groups()]
        text = row.advice(match) if callable(row.advice) else row.advice.format(*groups)
        options = re.findall(r"--[a-z-]+", text)
        return "" if options and all(each in message for each in options) else text
    return ""
