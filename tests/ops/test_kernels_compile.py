"""Kernels compile for a real GPU. The interpreter, which runs them in the other tests, accepts more.

The calls of kernel_calls.py run on the pretend GPU, where kernels are not started; what they would have been
started with is written down, and compiled in a process of its own, as Triton would compile it for an H200.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_calls import CALLS
from torch import Tensor

import oomph
from oomph.ops import launch
from oomph.ops.launch import Kernels

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

_PROCESSES = min(4, os.cpu_count() or 1)
SHARED_MEMORY = 227 << 10  # of one block of threads on an H100 or H200
OPS = Path(launch.__file__).parent
_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}


@dataclass(frozen=True)
class Launch:
    """A kernel, and what Triton would know of its arguments when it compiles it."""

    module: str
    kernel: str
    types: tuple[str, ...]  # "1" and "None": compiled in, as Triton does with these values
    aligned: tuple[bool, ...]  # the address or the number is a multiple of 16
    constants: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        return f"{self.module}.{self.kernel}"


def launch_of(module: str, kernel: str, arguments: tuple[Any, ...], constants: dict[str, Any]) -> Launch:
    types, aligned = zip(*map(_described, arguments), strict=True)
    return Launch(module, kernel, types, aligned, tuple(constants.items()))


def _described(argument: Any) -> tuple[str, bool]:
    if isinstance(argument, Tensor):
        return _TYPES[argument.dtype], argument.storage_offset() * argument.element_size() % 16 == 0
    if argument is None:
        return "None", False
    if isinstance(argument, bool):
        return "i1", False
    if isinstance(argument, int):
        wide = "i32" if -(1 << 31) <= argument < 1 << 31 else "i64"
        return "1" if argument == 1 else wide, argument % 16 == 0
    assert isinstance(argument, float)
    return "fp32", False


def recorded(call: Callable[[], Tensor], patch: pytest.MonkeyPatch) -> list[Launch]:
    """The kernels that a call and its backward pass start, each once."""
    found: dict[Launch, None] = {}

    def record(
        self: Kernels,
        name: str,
        grid: Any,
        *arguments: Any,
        flops: float = 0.0,  # these three are for predictions, and do not reach the kernel
        passes: float = 1.0,
        efficiency: float = 0.0,
        **constants: Any,
    ) -> None:
        found[launch_of(self._module, name, arguments, constants)] = None

    def program() -> None:
        result = call()
        result.backward(torch.ones_like(result))

    with patch.context() as replaced:
        replaced.setattr(Kernels, "launch", record)
        oomph.predict(program, gpu="h200")
    return list(found)


# Reads launches, writes for each its shared memory in bytes, or what the compiler said.
_COMPILER = """
import importlib, pickle, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

def compiled(launch):
    kernel = getattr(importlib.import_module(launch["module"]), launch["kernel"])
    constants = dict(launch["constants"])
    options = {key: constants.pop(key) for key in list(constants) if key not in kernel.arg_names}
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        kind = "constexpr" if name in constants else launch["types"][index]
        if kind in ("1", "None"):
            constants[name] = 1 if kind == "1" else None
            kind = "constexpr"
        signature[name] = kind
        if kind != "constexpr" and launch["aligned"][index]:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).metadata.shared

results = []
for launch in pickle.load(sys.stdin.buffer):
    try:
        results.append(compiled(launch))
    except Exception as error:
        results.append(f"{type(error).__name__}: {error}"[:2000])
pickle.dump(results, sys.stdout.buffer)
"""


def compiled(launches: list[Launch]) -> dict[Launch, int | str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", _COMPILER],
        input=pickle.dumps([vars(each) for each in launches]),
        env=environment,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return dict(zip(launches, pickle.loads(done.stdout), strict=True))


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict[Launch, int | str]]:
    """For every call, what became of its kernels. Few processes for all: to start Triton takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        launches = {name: recorded(call, patch) for name, call in CALLS.items()}
    distinct = list(dict.fromkeys(each for some in launches.values() for each in some))
    shares = [distinct[start::_PROCESSES] for start in range(_PROCESSES)]
    with ThreadPoolExecutor(_PROCESSES) as pool:
        outcome = {each: found for share in pool.map(compiled, shares) for each, found in share.items()}
    return {name: {each: outcome[each] for each in some} for name, some in launches.items()}


@pytest.mark.parametrize("call", CALLS)
def test_the_kernels_of_a_call_compile_for_hopper_and_fit_its_shared_memory(
    call: str, outcomes: dict[str, dict[Launch, int | str]]
) -> None:
    assert outcomes[call], "the call started no kernel"
    for launched, outcome in outcomes[call].items():
        assert isinstance(outcome, int), f"{launched.name}: {outcome}"
        assert outcome <= SHARED_MEMORY, f"{launched} takes {outcome} bytes"


def kernels_of(op: Path) -> set[str]:
    """Functions under @triton.jit whose name the op's Python code writes as a string: those it starts."""
    trees = {path: ast.parse(path.read_text()) for path in op.rglob("*.py")}
    strings = {
        node.value
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    jitted = {
        (path, node.name)
        for path, tree in trees.items()
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(by) for by in node.decorator_list)
    }
    return {
        ".".join(["oomph.ops", *path.relative_to(OPS).with_suffix("").parts, name])
        for path, name in jitted
        if name in strings
    }


@pytest.mark.parametrize("op", sorted(path.name for path in OPS.iterdir() if (path / "__init__.py").exists()))
def test_every_kernel_of_an_op_is_among_those_that_are_compiled(
    op: str, outcomes: dict[str, dict[Launch, int | str]]
) -> None:
    started = {launched.name for some in outcomes.values() for launched in some}
    missing = kernels_of(OPS / op) - started
    assert not missing, f"add calls to kernel_calls.py that start {sorted(missing)}"
