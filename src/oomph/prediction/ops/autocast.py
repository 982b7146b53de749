"""CUDA's autocast, by kernels in Python at its own dispatch key.

A trace runs on fake CPU tensors that carry a GPU label of our own. Torch's CUDA autocast kernels exist in
CPU builds too, but a CPU tensor never reaches them, and they cast nothing whose device is not really CUDA.
So for the duration of `cuda_autocast` two things change:

- the CUDA autocast dispatch key is in force for every call of this thread (it still acts only where
  `torch.autocast("cuda")` is enabled, so torch's own switches, nesting and queries keep working unmodified);
- each op on CUDA's lists has, under that key, a Python kernel that makes the same casts and calls
  `is_on_gpu` instead of reading the device.

CPU autocast uses another key and is not touched: real CPU tensors under `torch.autocast("cpu")` behave as
ever. One difference is left: a labelled tensor under an enabled `torch.autocast("cpu")` is cast too, which a
real CUDA tensor would not be. The op lists and policies are those of ATen/autocast_mode.h and
ATen/autocast_mode.cpp.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from oomph.prediction.ops.rules import program_error
from oomph.torch_internals import (
    AUTOCAST_CUDA,
    DispatchKeySet,
    ExcludeDispatchKeyGuard,
    OpOverload,
    current_graph_task_id,
    disable_torch_function,
    dispatch_call_boxed,
    dispatch_get_all_op_names,
    dispatch_has_kernel_for_dispatch_key,
    dispatch_tls_set_dispatch_key_included,
    tree_map_only,
)

_KEY_SET = DispatchKeySet(AUTOCAST_CUDA)
_KEY_NAME = "AutocastCUDA"


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Every floating-point argument is cast to the autocast dtype.
LOWER_PRECISION = _names(
    """
    _convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution cudnn_convolution cudnn_convolution_transpose
    addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot
    _scaled_dot_product_flash_attention scaled_dot_product_attention prelu
    _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    """
)

# Every floating-point argument is cast to float32. (rms_norm joined after torch 2.11, linalg_matrix_sqrth
# after 2.13.)
FLOAT32 = _names(
    """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
    pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim
    linalg_matrix_sqrth nuclear_norm nuclear_norm.dim dist pdist cdist renorm logsumexp cosine_similarity
    poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss
    smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
    triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits
    upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d
    upsample_trilinear3d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa
    _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
    """
)

# Arguments stay; the op is asked for a float32 result unless the caller named a dtype.
FLOAT32_RESULT = _names(
    """
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList
    """
)

# As above, for overloads without a dtype argument: the overload on the right has one.
FLOAT32_RESULT_BY_OVERLOAD = {
    "norm.Scalar": "norm.ScalarOpt_dtype",
    "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype",
}

# Arguments are cast to the widest dtype among them.
PROMOTE = _names("addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add")

# Refused: it would overflow or lose its gradient in half precision.
BANNED = frozenset({"binary_cross_entropy"})

_BANNED_MESSAGE = (
    "binary_cross_entropy (torch.nn.BCELoss) is unsafe to autocast, and CUDA autocast refuses it: "
    "use binary_cross_entropy_with_logits (torch.nn.BCEWithLogitsLoss) on the values before the sigmoid"
)

OnGpu = Callable[[torch.Tensor], bool]
Kernel = Callable[..., Any]


def _overload(op: str) -> OpOverload:
    name, _, overload = op.partition(".")
    found: OpOverload = getattr(getattr(torch.ops.aten, name), overload or "default")
    return found


def _autocast_ops() -> dict[str, OpOverload]:
    listed = LOWER_PRECISION | FLOAT32 | FLOAT32_RESULT | FLOAT32_RESULT_BY_OVERLOAD.keys() | PROMOTE | BANNED
    has_kernel = dispatch_has_kernel_for_dispatch_key
    known = {name.removeprefix("aten::") for name in dispatch_get_all_op_names()}
    return {op: _overload(op) for op in listed & known if has_kernel(f"aten::{op}", _KEY_NAME)}


# The ops of our tables that the installed torch casts on CUDA: the lists differ a little by version. Found at
# import, because every prediction is a process of its own.
AUTOCAST_OPS = _autocast_ops()


@contextmanager
def cuda_autocast(is_on_gpu: OnGpu, float32_ops: Sequence[str] = ()) -> Iterator[None]:
    """While active, `torch.autocast("cuda")` acts on the tensors for which `is_on_gpu` is true.

    `float32_ops`: of libraries, as "torchvision::nms"; they return the dtype of their first argument.
    Casts go through autograd, and the cast of a float32 leaf is kept until the outermost region ends. Holds
    for the calling thread and the backward passes it starts. Nothing of the process is changed afterwards.
    """
    casts = _Casts(is_on_gpu)
    new_library: Any = torch.library.Library
    library = new_library("aten", "IMPL")
    with ExitStack() as undo:
        undo.callback(casts.clear)
        undo.callback(library._destroy)
        with warnings.catch_warnings():
            # Torch remarks, once per process, that a kernel is replaced. Here that is the purpose.
            warnings.simplefilter("ignore")
            for op, overload in AUTOCAST_OPS.items():
                library.impl(op, casts.kernel(op, overload), _KEY_NAME, allow_override=True)
        load_library = torch.ops.load_library

        def load_and_replace(path: str) -> None:
            load_library(path)
            _replace_ops(casts, float32_ops, undo)

        _replace_ops(casts, float32_ops, undo)
        undo.callback(delattr, torch.ops, "load_library")
        torch.ops.load_library = load_and_replace  # type: ignore[method-assign]
        for name, replacement in _torch_functions(casts.forget_copies).items():
            undo.callback(setattr, torch, name, getattr(torch, name))
            setattr(torch, name, replacement)
        undo.callback(dispatch_tls_set_dispatch_key_included, AUTOCAST_CUDA, False)
        dispatch_tls_set_dispatch_key_included(AUTOCAST_CUDA, True)
        yield


def _replace_ops(casts: _Casts, ops: Sequence[str], undo: ExitStack) -> None:
    """Replace the kernels for autocast of libraries that are imported by now."""
    new_library: Any = torch.library.Library
    known = set(dispatch_get_all_op_names()).intersection(ops)
    for name in known:
        if dispatch_has_kernel_for_dispatch_key(name, _KEY_NAME):
            namespace, _, op = name.partition("::")
            library = new_library(namespace, "IMPL")
            undo.callback(library._destroy)
            overload: OpOverload = getattr(getattr(torch.ops, namespace), op).default
            library.impl(op, casts.in_float32(overload), _KEY_NAME, allow_override=True)


class _Casts:
    """Builds the kernels: each looks at its arguments, casts by its policy, calls the op below autocast."""

    def __init__(self, is_on_gpu: OnGpu) -> None:
        self.is_on_gpu = is_on_gpu
        # Low-precision copies of float32 leaves: a weight used twice is cast once.
        self._kept: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._copies: list[torch.Tensor] = []  # torch keeps those of leaves that died, too

    def forget_copies(self) -> None:
        self._kept = WeakTensorKeyDictionary()
        self._copies.clear()

    def clear(self) -> None:
        """Lets go of the caller's objects: torch never drops a Python kernel, even of a destroyed library."""
        self.is_on_gpu = lambda tensor: False
        self.forget_copies()

    def kernel(self, op: str, overload: OpOverload) -> Kernel:
        if op in LOWER_PRECISION:
            return self._casting(overload, lambda args: torch.get_autocast_dtype("cuda"))
        if op in FLOAT32:
            return self._casting(overload, lambda args: torch.float32)
        if op in PROMOTE:
            return self._casting(overload, self._widest_dtype(overload))
        if op in FLOAT32_RESULT:
            return self._setting_dtype(overload)
        if op in FLOAT32_RESULT_BY_OVERLOAD:
            return self._appending_dtype(overload, _overload(FLOAT32_RESULT_BY_OVERLOAD[op]))
        return self._refusing(overload)

    def _casting(self, overload: OpOverload, target: Callable[[tuple[Any, ...]], torch.dtype]) -> Kernel:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            with ExcludeDispatchKeyGuard(_KEY_SET):
                dtype = target(args)
                # Last argument first. C++ leaves the order to the compiler, and GCC on x86-64, which builds
                # most CUDA wheels, goes from the right: `linear` casts bias, weight, then input.
                cast = [self._cast_argument(arg, dtype) for arg in reversed(args)]
                return _call(overload, *reversed(cast), **kwargs)

        return kernel

    def in_float32(self, overload: OpOverload) -> Kernel:
        computed = self._casting(overload, lambda args: torch.float32)

        def kernel(*args: Any, **kwargs: Any) -> Any:
            dtype, results = args[0].dtype, computed(*args, **kwargs)
            with ExcludeDispatchKeyGuard(_KEY_SET):
                return tree_map_only(torch.Tensor, lambda result: self._cast(result, dtype), results)

        return kernel

    def _setting_dtype(self, overload: OpOverload) -> Kernel:
        position = [argument.name for argument in overload._schema.arguments].index("dtype")

        def kernel(*args: Any, **kwargs: Any) -> Any:
            with ExcludeDispatchKeyGuard(_KEY_SET):
                given = args[position] if len(args) > position else kwargs.get("dtype")
                if given is None and self._is_eligible(args[0]):
                    args, kwargs = args[:position], {**kwargs, "dtype": torch.float32}
                return _call(overload, *args, **kwargs)

        return kernel

    def _appending_dtype(self, overload: OpOverload, with_dtype: OpOverload) -> Kernel:
        defaults = [argument.default_value for argument in overload._schema.arguments]

        def kernel(*args: Any) -> Any:
            with ExcludeDispatchKeyGuard(_KEY_SET):
                if not self._is_eligible(args[0]):
                    return _call(overload, *args)
                # The dispatcher leaves out trailing defaults, which the other overload does not have.
                return _call(with_dtype, *args, *defaults[len(args) :], dtype=torch.float32)

        return kernel

    def _refusing(self, overload: OpOverload) -> Kernel:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            with ExcludeDispatchKeyGuard(_KEY_SET):
                with disable_torch_function():
                    is_on_gpu = any(self.is_on_gpu(tensor) for tensor in _tensors(args))
                if is_on_gpu:
                    raise program_error(RuntimeError(_BANNED_MESSAGE))
                return _call(overload, *args, **kwargs)

        return kernel

    def _widest_dtype(self, overload: OpOverload) -> Callable[[tuple[Any, ...]], torch.dtype]:
        # Optional tensors (the bias of `bilinear`) are cast but have no say in the dtype.
        optional = [isinstance(argument.type, torch.OptionalType) for argument in overload._schema.arguments]

        def widest(args: tuple[Any, ...]) -> torch.dtype:
            low = found = torch.get_autocast_dtype("cuda")
            tensors = _tensors(arg for arg, skip in zip(args, optional, strict=False) if not skip)
            with disable_torch_function():
                dtypes = [tensor.dtype for tensor in tensors if self._is_eligible(tensor)]
            for dtype in dtypes:
                if torch.float32 in (found, dtype):
                    found = torch.float32
                elif dtype != low:
                    message = f"CUDA autocast to {low} cannot promote a {dtype} argument of {overload}"
                    raise program_error(RuntimeError(message))
            return found

        return widest

    def _cast_argument(self, arg: Any, dtype: torch.dtype) -> Any:
        if isinstance(arg, torch.Tensor):
            return self._cast(arg, dtype)
        if isinstance(arg, (list, tuple)) and any(isinstance(item, torch.Tensor) for item in arg):
            return [self._cast(item, dtype) if isinstance(item, torch.Tensor) else item for item in arg]
        return arg

    def _cast(self, arg: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        # Reading attributes is visible to a TorchFunctionMode; in C++ it is not.
        with disable_torch_function():
            if arg.dtype == dtype or not self._is_eligible(arg):
                return arg
            is_kept = (
                arg.dtype == torch.float32
                and dtype == torch.get_autocast_dtype("cuda")
                and arg.requires_grad
                and arg.is_leaf
                and not arg._is_view()
                and torch.is_autocast_cache_enabled()
            )
            kept = self._kept.get(arg) if is_kept else None
        if kept is not None:
            return kept
        copy: torch.Tensor = _call(torch.ops.aten.to.dtype, arg, dtype)
        if is_kept:
            self._kept[arg] = copy
            self._copies.append(copy)
        return copy

    def _is_eligible(self, arg: torch.Tensor) -> bool:
        with disable_torch_function():
            dtype = arg.dtype
            return dtype.is_floating_point and dtype != torch.float64 and self.is_on_gpu(arg)


def _torch_functions(forget_copies: Callable[[], None]) -> dict[str, Callable[[], Any]]:
    """Replacements for the torch functions through which `torch.autocast` ends the life of kept casts."""
    clear, enter, leave = (
        torch.clear_autocast_cache,
        torch.autocast_increment_nesting,
        torch.autocast_decrement_nesting,
    )
    depth_in_backward = 0

    def clear_autocast_cache() -> None:
        clear()
        forget_copies()

    # CUDA's backward has a thread of its own, and the nesting depth is per thread. So a region entered in
    # backward (a checkpoint recomputing) is an outermost one and clears the cache at its end, even where
    # `backward()` is called inside autocast. Here both run on one thread: the depths are kept apart by hand.
    def autocast_increment_nesting() -> int:
        nonlocal depth_in_backward
        if not _in_backward():
            return int(enter())
        depth_in_backward += 1
        return depth_in_backward

    def autocast_decrement_nesting() -> int:
        nonlocal depth_in_backward
        if not _in_backward():
            return int(leave())
        depth_in_backward -= 1
        return depth_in_backward

    return {
        "clear_autocast_cache": clear_autocast_cache,
        "autocast_increment_nesting": autocast_increment_nesting,
        "autocast_decrement_nesting": autocast_decrement_nesting,
    }


def _tensors(args: Iterable[Any]) -> Iterator[torch.Tensor]:
    for arg in args:
        for item in arg if isinstance(arg, (list, tuple)) else (arg,):
            if isinstance(item, torch.Tensor):
                yield item


def _in_backward() -> bool:
    return current_graph_task_id() != -1


def _call(overload: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Calls the op as C++ would: through the dispatcher, unseen by any TorchFunctionMode."""
    return dispatch_call_boxed(overload._handle, *args, **kwargs)
