"""Kernels compile for a real GPU. The interpreter, which runs them in the other tests, accepts more."""

import importlib.util
import os
import subprocess
import sys

import pytest

_PROGRAM = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from oomph.ops.cross_entropy import triton as kernels

def compiled(kernel, types, **constants):
    names = [name for name in kernel.arg_names if name not in constants]
    types = dict(zip(names, types.split(), strict=True))
    present = {name: kind for name, kind in types.items() if kind != "None"}
    absent = {name: None for name, kind in types.items() if kind == "None"}
    constants = {**constants, **absent}
    signature = {name: present.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})

rows = dict(FIND_LSE=True, MERGE=False, WRITE_GRADIENT=True, KEEP_TARGET=False, SMOOTH=False,
            HAS_CLASS_WEIGHT=False, HAS_SOFTCAP=False, HAS_GRAD_LSE=False, BLOCK=2048)
scalars = "i32 fp32 fp32 fp32 fp32"
compiled(kernels.softmax_rows,
         "*bf16 i32 *i64 i32 *i1 *fp32 None None None None *fp32 *fp32 None None " + scalars, **rows)
every = {name: True for name in rows} | {"BLOCK": 2048}
compiled(kernels.softmax_rows,
         "*fp16 i32 *i64 i32 *i1 *fp32 *fp32 *fp32 *fp32 *fp32 *fp32 *fp32 *fp32 *fp32 " + scalars, **every)
compiled(kernels.prepare_rows, "*i32 *bf16 *fp32 *i64 *i1 *fp32 *fp32 i32 i32 i32 i32 i32",
         SHIFT=True, HAS_TOKEN_WEIGHT=True, HAS_CLASS_WEIGHT=True, MEAN=True, BLOCK=4096)
compiled(kernels.clear_targets, "*bf16 i32 *i64 i32 i32 i32", BLOCK=256)
compiled(kernels.add_target_rows, "*bf16 i32 i32 *bf16 i32 i32 *fp32 *i64 *i64 *i64 None *i1 i32 i32",
         HAS_INDEX=False, BLOCK=1024)
compiled(kernels.scale_in_place, "*bf16 i32 *fp32", BLOCK=4096)
print("compiled")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernels_of_cross_entropy_compile_for_hopper() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "compiled", done.stderr[-2000:]
