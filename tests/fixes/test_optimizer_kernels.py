"""The kernels of compact optimizers compile for a real GPU, which takes more than the interpreter asks."""

import importlib.util
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

_COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from oomph.fixes.optimizers import triton as kernels

def compile(kernel, types, **constants):
    names = kernel.arg_names
    absent = {name: None for name, kind in types.items() if kind is None}
    constants = {**constants, **absent, "BLOCK": 256, "ROWS": 4}
    kinds = {name: "constexpr" if name in constants else types.get(name, "fp32") for name in names}
    source = ASTSource(kernel, kinds, constexprs=constants)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert made.metadata.shared < 48 << 10

sizes = {"N": "i32", "seed": "i32"}
plain = dict.fromkeys(("m_scale_ptr", "v_scale_ptr", "table_ptr"))
for p, state, coded, drawn, stochastic in (
    ("*fp32", "*u8", True, False, False),
    ("*bf16", "*u8", True, False, True),
    ("*bf16", "*bf16", False, True, True),
    ("*fp32", "*fp32", False, False, False),
):
    types = {"p_ptr": p, "g_ptr": p, "m_ptr": state, "v_ptr": state, **sizes}
    types |= dict.fromkeys(plain, "*fp32") if coded else plain
    flags = {"CODED": coded, "DRAWN_STATE": drawn, "STOCHASTIC": stochastic, "MAXIMIZE": stochastic}
    compile(kernels.adam, types, **flags)
for momentum, nesterov in ((None, False), ("*bf16", False), ("*fp32", True)):
    drawn = momentum == "*bf16"
    types = {"p_ptr": "*bf16", "g_ptr": "*bf16", "m_ptr": momentum, **sizes}
    flags = {"MOMENTUM": momentum is not None, "NESTEROV": nesterov, "DRAWN_STATE": drawn}
    compile(kernels.sgd, types, STOCHASTIC=True, MAXIMIZE=False, **flags)
"""


def test_they_compile_for_an_h200():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
