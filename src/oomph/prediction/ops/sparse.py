"""Sparse tensors: which ops make them. tracer/sparse.py runs them."""

import torch

from oomph.prediction.ops.registry import op

op("_sparse_coo_tensor_with_dims_and_tensors.default", makes_sparse=True)
op("sparse_compressed_tensor.comp_plain_value_size", makes_sparse=True)
op("_sparse_compressed_tensor_unsafe.default", makes_sparse=True)
op("_to_sparse.default", makes_sparse=True, converts_to=torch.sparse_coo)  # or the layout that it is given
op("_to_sparse.sparse_dim", makes_sparse=True, converts_to=torch.sparse_coo)
op("_to_sparse_csr.default", makes_sparse=True, converts_to=torch.sparse_csr)
op("_to_sparse_csc.default", makes_sparse=True, converts_to=torch.sparse_csc)
op("_to_sparse_bsr.default", makes_sparse=True, converts_to=torch.sparse_bsr)
op("_to_sparse_bsc.default", makes_sparse=True, converts_to=torch.sparse_bsc)
