"""Kernels compile for a real GPU. The interpreter, which runs them in the other tests, accepts more.

The calls of kernel_calls.py run in a prediction, which launches no kernels; their arguments are recorded, and
the kernels are compiled in a process of its own, as Triton would compile them for an H200.
"""

import ast
import os
import pickle
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_calls import CALLS
from torch import Tensor

import oomph
from oomph.ops import common as launch
from oomph.ops.common import Kernels
from oomph.prediction import isolation

pytest.importorskip("triton")

SHARED_MEMORY = 227 << 10  # of one block of threads on an H100 or H200
# Rounds of unrolled loops: two have all paths and the same shared memory, and take less time to compile.
UNROLLED = {"S": 2, "STEPS": 2}
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
    def name(self):
        return f"{self.module}.{self.kernel}"


def launch_of(module, kernel, arguments, constants):
    types, aligned = zip(*map(_described, arguments), strict=True)
    return Launch(module, kernel, types, aligned, tuple(constants.items()))


def _described(argument):
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


def recorded(call, patch):
    """The kernels that a call and its backward pass launch, each once: a second form takes as long again."""
    found = {}

    def record(
        self,
        name,
        grid,
        *arguments,
        flops=0.0,  # these three are for predictions, and do not reach the kernel
        passes=1.0,
        efficiency=0.0,
        **constants,
    ):
        fewer = {key: UNROLLED.get(key, value) for key, value in constants.items()}
        launched = launch_of(self._module, name, arguments, fewer)
        found.setdefault(launched.name, launched)

    def program():
        result = call()
        result.backward(torch.ones_like(result))

    with patch.context() as replaced:
        replaced.setattr(Kernels, "launch", record)
        replaced.setattr(isolation, "_inside", True)  # no child process: launches are recorded here
        oomph.predict(program, gpu="h200")
    return list(found.values())


# Reads launches, writes for each its shared memory in bytes and whether it has fused multiply-adds, or what
# the compiler said.
_COMPILER = """
import importlib, pickle, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

def up_to_ptx(backend=None, stages=None, *_):
    if stages is None:
        return "up to ptx", "up to ptx"  # a part of the key of Triton's cache
    stages["cubin"] = lambda ptx, metadata: b""

triton.knobs.runtime.add_stages_inspection_hook = up_to_ptx

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
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return made.metadata.shared, "fma.rn" in made.asm["ptx"]

results = []
for launch in pickle.load(sys.stdin.buffer):
    try:
        results.append(compiled(launch))
    except Exception as error:
        results.append(f"{type(error).__name__}: {error}"[:2000])
pickle.dump(results, sys.stdout.buffer)
"""


def compiled(launches):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # LLVM's optimisations, and ptxas, take half of the time and change nothing that is checked.
    environment |= {"DISABLE_LLVM_OPT": "1", "TRITON_DISABLE_LINE_INFO": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _COMPILER],
        input=pickle.dumps([vars(each) for each in launches]),
        env=environment,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return dict(zip(launches, pickle.loads(done.stdout), strict=True))


def kernels_of(package):
    """Functions under @triton.jit whose name the package's code writes as a string: those it launches."""
    trees = {path: ast.parse(path.read_text()) for path in package.rglob("*.py")}
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


def test_every_kernel_compiles_for_hopper_and_fits_its_shared_memory(monkeypatch):
    """One test, so that a parallel run compiles everything once."""
    calls = {name: recorded(call, monkeypatch) for name, call in CALLS.items()}
    assert [name for name, launches in calls.items() if not launches] == [], "these launch no kernel"
    launches = dict.fromkeys(each for some in calls.values() for each in some)
    missing = kernels_of(OPS) - {launched.name for launched in launches}
    assert not missing, f"add calls to kernel_calls.py that launch {sorted(missing)}"
    outcomes = compiled(list(launches))
    failed = [f"{each.name}: {found}" for each, found in outcomes.items() if isinstance(found, str)]
    assert not failed, "\n".join(failed)
    large = {each: found[0] for each, found in outcomes.items() if found[0] > SHARED_MEMORY}
    assert not large, f"more than {SHARED_MEMORY} bytes of shared memory: {large}"
    # It would round once where torch rounds twice, and neurons would fire at other steps.
    fused = {
        each.kernel: found[1] for each, found in outcomes.items() if each.module.endswith("spiking.kernels")
    }
    assert fused["lif_forward"] is False
