"""Linear algebra and Fourier transforms.

cuSOLVER's workspaces are within 3 % of those measured on an H200 (CUDA 13.0) that have more than 4 MiB. Most
ops take several matrices one after the other.
"""

from __future__ import annotations

import math

import torch

from oomph.gpus import GPU
from oomph.prediction.ops.registry import always, op, temporaries
from oomph.prediction.ops.rules import BoundArguments, TemporariesRule

aten = torch.ops.aten


@temporaries(aten._linalg_eigh.default)
def _eigenvalues(call: BoundArguments, gpu: GPU) -> list[int]:
    matrices, n = call["A"], call["A"].shape[-1]
    count = math.prod(matrices.shape[:-2])
    if n < 32 or (n == 32 and count > 1):
        elements = min(count, gpu.multiprocessors) * (67_000 + 810 * n)  # measured for up to 16 at once
    elif n <= 512 and matrices.dtype == torch.float32:
        elements = n * (n + 38)
    else:
        elements = 4 * n * n + max(128 * n + 33_000, 196_000)
    copy = 0 if call["compute_v"] else matrices.nbytes
    return [copy, elements * matrices.dtype.itemsize]


@temporaries(aten._linalg_svd.default)
def _singular_values(call: BoundArguments, gpu: GPU) -> list[int]:
    matrices, item = call["A"], call["A"].dtype.itemsize
    m, n = matrices.shape[-2:]
    elements = 2 * m * n + 70 * min(m, n)
    if m != n:  # by way of QR
        elements = max(elements, _QR_ELEMENTS) + (m * n if m < n else 0)
    vectors = [] if call["compute_uv"] else [min(m, n) * m * item, min(m, n) * n * item]
    return [matrices.nbytes, *vectors, elements * item]


_QR_ELEMENTS = 1024 * 768


@temporaries(aten.linalg_qr.default)
def _qr(call: BoundArguments, gpu: GPU) -> list[int]:
    matrices = call["A"]
    m, n = matrices.shape[-2:]
    at_once = m <= 256 and math.prod(matrices.shape[:-2]) >= max(2, m // 16)
    return [] if at_once else [max(1024 * (512 + n), _QR_ELEMENTS) * matrices.dtype.itemsize]


def _copies(*names: str) -> TemporariesRule:
    return lambda call, gpu: [call[name].nbytes for name in names]


op("linalg_cholesky_ex.default linalg_ldl_factor_ex.default linalg_lu_factor_ex.default", factorizes=True)
op("linalg_inv_ex.default _linalg_solve_ex.default", factorizes=True)
# The LU decomposition, and a copy of it.
op("linalg_inv_ex.default", temporaries=_copies("A", "A"), uses_cublas=always)
op("_linalg_solve_ex.default", temporaries=_copies("A"), uses_cublas=always)
op("cholesky_inverse.default _cholesky_solve_helper.default", temporaries=_copies("self"))
op("linalg_lu_solve.default", temporaries=_copies("B"), uses_cublas=always)
op("linalg_solve_triangular.default linalg_pinv.atol_rtol_tensor", uses_cublas=always)
op("linalg_lu.default linalg_lu_factor_ex.default linalg_matrix_exp.default", uses_cublas=always)
op("_linalg_slogdet.default _linalg_det.default", uses_cublas=lambda args: args[0].dim() > 2)
# cuFFT overwrites the input (native/cuda/SpectralOps.cpp).
op("_fft_c2r.default", temporaries=_copies("self"))


@temporaries(aten.linalg_matrix_exp.default)
def _matrix_exponential(call: BoundArguments, gpu: GPU) -> list[int]:
    """Five powers and five sums of them (compute_T18 of native/LinearAlgebra.cpp); two more of one matrix."""
    return [(12 if call["self"].dim() == 2 else 10) * call["self"].nbytes]
