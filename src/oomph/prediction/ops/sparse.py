"""Sparse tensors: which ops make them. tracer/sparse.py runs them."""

from oomph.prediction.ops.registry import op

op(
    """
    _sparse_coo_tensor_with_dims_and_tensors.default sparse_compressed_tensor.comp_plain_value_size
    _sparse_compressed_tensor_unsafe.default
    _to_sparse.default _to_sparse.sparse_dim _to_sparse_csr.default _to_sparse_csc.default
    _to_sparse_bsr.default _to_sparse_bsc.default
    """,
    makes_sparse=True,
)
