"""Sparse tensors: their memory is that of their indices and values.

How many elements of a result are not zero depends on values. Rule: as many as of the sparse argument, whose
indices are all distinct; of a dense one, what nonzero finds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from oomph.errors import UserError
from oomph.prediction.ops.registry import FACTS
from oomph.prediction.ops.rules import aten_ops, bind, op_name
from oomph.prediction.tracer.recorder import sparse_parts
from oomph.prediction.tracer.tracer import Tracer
from oomph.prediction.tracer.work import tensors_in
from oomph.torch_internals import FakeTensor, OpOverload, in_kernel_invocation_manager

aten = torch.ops.aten
_CPU = torch.device("cpu")

_MAKE_COO = aten._sparse_coo_tensor_with_dims_and_tensors.default
_MAKE_COMPRESSED = aten_ops("""
    sparse_compressed_tensor.comp_plain_value_size _sparse_compressed_tensor_unsafe.default
""")
_INDICES = aten_ops("""
    crow_indices.default ccol_indices.default col_indices.default row_indices.default
""")
_VIEWS = _INDICES | aten_ops("""
    _indices.default indices.default _values.default values.default detach.default is_coalesced.default
""")
_COMPRESSED = {torch.sparse_csr: 0, torch.sparse_csc: 1}  # layout -> the dimension of compressed indices
_COPIES = aten_ops("_coalesce.default clone.default sparse_mask.default")
_TRANSPOSES = aten_ops("t.default transpose.int")
_PRODUCTS = aten_ops("mm.default addmm.default _sparse_addmm.default")
_Run = Callable[[OpOverload, Sequence[Any], dict[str, Any]], Any]


class SparseTensors:
    """`run` runs an op on dense tensors, and records what it allocates."""

    def __init__(self, tracer: Tracer, run: _Run) -> None:
        self._tracer, self._run_dense = tracer, run
        self._indices = WeakIdKeyDictionary()  # storages of indices -> their values

    def run(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """An op that takes or gives a sparse tensor."""
        fake = self._tracer.fake_mode
        if func is _MAKE_COO:
            return fake.__torch_dispatch__(func, (), args, kwargs)
        if func in _VIEWS:
            view: Any = fake.__torch_dispatch__(func, (), args, kwargs)
            return self._with_values(view) if func in _INDICES else view
        if func in _MAKE_COMPRESSED:
            return self._made(args[:3], args[3], kwargs["layout"])
        if func is aten.add_.Tensor and args[0].layout is torch.strided:
            return args[0]
        source = args[-1] if func is aten.sparse_mask.default else args[0]
        if (layout := FACTS[func].converts_to) is not None:
            options = bind(func, args, kwargs)
            dense_dim = options.get("dense_dim") or source.dim() - options.get("sparse_dim", source.dim())
            return self._converted(source, options.get("layout") or layout, dense_dim)
        is_coo = source.layout is torch.sparse_coo
        transposes = is_coo and func in _TRANSPOSES
        if func in _COPIES or transposes:
            if func is aten._coalesce.default:
                return self._coalesced(source)
            parts = [self._run_dense(aten.clone.default, (part,), {}) for part in sparse_parts(source)]
            shape = list(source.shape)
            if transposes:
                first, second = args[1:] or (0, 1)
                shape[first], shape[second] = shape[second], shape[first]
            coalesced = is_coo and not transposes and source.is_coalesced()
            return self._made(parts, shape, source.layout, source.dense_dim(), coalesced)
        if func is aten._to_copy.default:
            options = {name: value for name, value in kwargs.items() if name != "layout"}
            indices = {**options, "dtype": None}
            *positions, values = sparse_parts(source)
            moved = dict(self._tracer.batches.moved)
            parts = [self._run_dense(func, (self._with_values(part),), indices) for part in positions]
            parts.append(self._run_dense(func, (values,), options))
            self._tracer.batches.moved = moved  # indices [2, N] are no batch of two rows
            coalesced = is_coo and source.is_coalesced()
            return self._made(parts, source.shape, source.layout, source.dense_dim(), coalesced)
        if func in _PRODUCTS:
            sparse, dense = args[-2:]
            if sparse.layout is torch.sparse_coo and dense.layout is torch.strided:
                return self._coo_product(func, sparse, dense)
            if sparse.layout is torch.sparse_csc:  # cuSPARSE takes CSR
                args = [*args[:-2], self._converted(sparse, torch.sparse_csr), dense]
        return self._estimated(func, args, kwargs)

    def embedding_bag_backward(self, grad: torch.Tensor, indices: torch.Tensor, *args: Any) -> Any:
        """With sparse=True: one row of the gradient for every index (native/EmbeddingBag.cpp)."""
        shape = [indices.numel(), grad.size(1)]
        rows = self._run_dense(aten.new_empty.default, (grad, shape), {})
        if args[6] == 1:  # mean: divided by the size of the bag
            rows = self._run_dense(aten.new_empty.default, (grad, shape), {})
        indices = self._run_dense(aten.view.default, (indices, [1, -1]), {})
        return self._made((indices, rows), (args[4], grad.size(1)), torch.sparse_coo, 1, coalesced=False)

    def _coo_product(self, func: OpOverload, sparse: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        """s_addmm_out_sparse_dense_cuda (native/sparse/cuda/SparseCUDATensorMath.cu): sorted, with indices of
        32 bits as CSR has them, into a column-major copy of the result. `mm` adds it to zeros."""
        if sparse.size(1) != dense.size(0):
            raise RuntimeError(f"mm: Expected dim 0 size {sparse.size(1)}, got {dense.size(0)}")
        empty = partial(self._run_dense, aten.new_empty.default)
        shape = [sparse.size(0), dense.size(1)]
        zeros = empty((dense, shape), {}) if func is aten.mm.default else None
        out = empty((dense, shape), {})
        if isinstance(sparse, FakeTensor) and not sparse.is_coalesced():
            sparse = self.run(aten._coalesce.default, (sparse,), {})
        if self._tracer.on_gpu(dense):
            indices = {"dtype": torch.int32}
            count = sparse_parts(sparse)[0].size(1)
            rows, columns = (empty((dense, [n]), indices) for n in (sparse.size(0) + 1, count))
            copy = empty((dense, shape), {})
            del rows, columns, copy
        del zeros
        return out  # type: ignore[no-any-return]

    def _coalesced(self, source: torch.Tensor) -> torch.Tensor:
        """Equal indices become one: as many as are known to differ, and not more than there are."""
        indices, values = sparse_parts(source)
        known = self._tracer.values.known(indices)
        if known is not None:
            count = known.unique(dim=1).size(1)
        else:
            count = min(indices.size(1), math.prod(source.shape[: source.sparse_dim()]))
        keys = self._keys(source)
        shapes = (indices, [indices.size(0), count]), (values, [count, *values.shape[1:]])
        parts = [self._run_dense(aten.new_empty.default, each, {}) for each in shapes]
        del keys
        return self._made(parts, source.shape, torch.sparse_coo, source.dense_dim())

    def _keys(self, sparse: torch.Tensor) -> list[torch.Tensor]:
        """What coalescing holds (native/sparse/cuda/SparseCUDATensor.cu): keys, sorted keys and positions."""
        indices = sparse_parts(sparse)[0]
        return [self._run_dense(aten.new_empty.default, (indices, [indices.size(1)]), {}) for _ in range(3)]

    def _with_values(self, indices: torch.Tensor) -> torch.Tensor:
        if (found := self._indices.get(indices.untyped_storage())) is not None:
            self._tracer.values.set(indices, found.values, known=found.known)
        return indices

    def _estimated(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        tracer = self._tracer
        tracer.record_autograd_node()
        try:
            out = tracer.fake_mode.__torch_dispatch__(func, (), args, kwargs)
        except (RuntimeError, TypeError) as error:
            layout = next(
                each.layout for each in tensors_in(args, kwargs) if each.layout is not torch.strided
            )
            raise UserError(
                f"{op_name(func)} of {layout} tensors cannot be traced yet; make them dense"
            ) from error
        sources = [each for each in tensors_in(args, kwargs) if each.layout is torch.sparse_coo]
        in_place = any(out is each for each in sources)
        if sources and not in_place and isinstance(out, torch.Tensor) and out.layout is torch.sparse_coo:
            return self._elementwise(func, out, sources)
        given = [part for each in tensors_in(args, kwargs) for part in sparse_parts(each)]
        if not any(map(tracer.on_gpu, given)):
            return out
        results = [part for each in tensors_in((out,), {}) for part in sparse_parts(each)]
        for part in results:
            tracer.record_result(part, op_name(func))
        tracer.note_once("temporaries of the kernels for sparse tensors are not included")
        if tracer.work.counting:
            tracer.work.kernel([*given, *results], tracer.phase, kind="memory")
        if tracer.phase == "backward":
            tracer.mark_gradient(out)
        return out

    def _elementwise(
        self, func: OpOverload, out: torch.Tensor, sources: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """torch's fake result has no elements. A sum has those of all terms; a quotient shares its dividend's
        indices."""
        indices, values = sparse_parts(sources[0])
        terms = sources if func is aten.add.Tensor else sources[:1]
        count = sum(sparse_parts(each)[0].size(1) for each in terms)
        if func is not aten.div.Tensor:
            shape = [indices.size(0), count]
            indices = self._run_dense(aten.new_empty.default, (indices, shape), {})
        options = {"dtype": out.dtype}
        values = self._run_dense(aten.new_empty.default, (values, [count, *values.shape[1:]]), options)
        coalesced = len(terms) == 1 and sources[0].is_coalesced()
        return self._made((indices, values), out.shape, torch.sparse_coo, sources[0].dense_dim(), coalesced)

    def _converted(self, source: torch.Tensor, layout: torch.layout, dense_dim: int = 0) -> torch.Tensor:
        if source.layout is layout:
            return source
        sparse_dim = source.dim() - (dense_dim if source.layout is torch.strided else source.dense_dim())
        if source.layout is torch.strided:
            values, known = source, self._tracer.values.known(source)
            count = self._run_dense(aten.nonzero.default, (source,), {}).shape[0]
            if known is None:
                count = min(count, math.prod(source.shape[:sparse_dim]))
            elif dense_dim:
                count = int(known.flatten(sparse_dim).any(-1).count_nonzero())
        else:
            values = sparse_parts(source)[-1]
            count = values.shape[0]

        def empty(*size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return self._run_dense(aten.new_empty.default, (values, size), {"dtype": dtype})  # type: ignore[no-any-return]

        if layout in _COMPRESSED and sparse_dim == 2:
            positions = [empty(source.shape[_COMPRESSED[layout]] + 1), empty(count)]
        elif layout is torch.sparse_coo:
            positions = [empty(sparse_dim, count)]
        else:
            raise UserError(f"tensors of {layout} with {source.dim()} dimensions cannot be traced yet")
        stored = empty(count, *source.shape[sparse_dim:], dtype=source.dtype)
        return self._made([*positions, stored], source.shape, layout, source.dim() - sparse_dim)

    def _made(
        self,
        parts: Sequence[torch.Tensor],
        shape: Sequence[int],
        layout: torch.layout,
        dense_dim: int = 0,
        coalesced: bool = True,
    ) -> torch.Tensor:
        """A sparse tensor that has these indices and values."""
        fake, values = self._tracer.fake_mode, parts[-1]
        options: dict[str, Any] = {"dtype": values.dtype, "layout": layout}
        if layout is torch.sparse_coo:
            dims = len(shape) - dense_dim, dense_dim, list(shape)
            options |= {"device": _CPU, "is_coalesced": coalesced}
            return self.run(_MAKE_COO, (*dims, *parts), options)  # type: ignore[no-any-return]
        fakes = [part if isinstance(part, FakeTensor) else fake.from_tensor(part) for part in parts]
        for index, part in zip(fakes[:-1], parts, strict=False):
            if (found := self._tracer.values.of(part)).whole:
                self._indices[index.untyped_storage()] = found
        make = aten._sparse_compressed_tensor_unsafe.default
        with in_kernel_invocation_manager(fake):
            made = make(*fakes, list(shape), device=torch.device("meta"), **options)
        return FakeTensor(fake, made, _CPU)
