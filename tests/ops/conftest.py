"""Without a GPU, Triton kernels run in its interpreter, made correct and quicker here."""

import dataclasses
import importlib.util

import pytest
import torch


def _keep_masks_boolean():
    """Triton 3.9's interpreter broadcasts `scalar < scalar` as integers, and then refuses it as a mask."""
    from triton.runtime import interpreter

    splat = interpreter.InterpreterBuilder.create_splat

    def create_splat(self, kind, value):
        result = splat(self, kind, value)
        if value.data.dtype == bool:
            result.data = result.data.astype(bool)
        return result

    interpreter.InterpreterBuilder.create_splat = create_splat


def _patch_language_once_per_launch():
    """Triton's interpreter patches triton.language again at each call of a device function.

    That takes 40 % of its time and changes nothing after the first call in a launch.
    """
    from triton.runtime import interpreter

    patch, start = interpreter._patch_lang, interpreter.GridExecutor.__call__
    language = (interpreter.tl, interpreter.tl.core)
    patched = set()

    def patch_lang(function):
        names = function.__globals__.values()
        seen = tuple(any(value is module for value in names) for module in language)
        if seen in patched:
            return None  # device functions drop it
        patched.add(seen)
        return patch(function)

    def call(self, *args, **kwargs):
        patched.clear()
        return start(self, *args, **kwargs)

    interpreter._patch_lang = patch_lang
    interpreter.GridExecutor.__call__ = call


def _remember_types():
    """Triton's interpreter makes types and shapes anew for every value and checks sums for overflow.

    That takes half of its time; the sizes of tests are small.
    """
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

    block, tensor, numpy_dtype = interpreter.tl.block_type, interpreter.tl.tensor, interpreter._get_np_dtype
    make_block, make_tensor = block.__init__, tensor.__init__
    blocks, tensors, dtypes = {}, {}, {}

    def init_block(self, element, shape):
        key = element.name, *(getattr(size, "value", size) for size in shape)
        if key not in blocks:
            make_block(self, element, shape)
            blocks[key] = vars(self)
        self.__dict__ = blocks[key]

    def init_tensor(self, handle, type):
        if type.name not in tensors:
            make_tensor(self, handle, type)
            tensors[type.name] = vars(self) | {"handle": None}
        vars(self).update(tensors[type.name], handle=handle)

    def dtype_of(type):
        if type.name not in dtypes:
            dtypes[type.name] = numpy_dtype(type)
        return dtypes[type.name]

    block.__init__, tensor.__init__, interpreter._get_np_dtype = init_block, init_tensor, dtype_of


if not torch.cuda.is_available() and importlib.util.find_spec("triton") is not None:
    _keep_masks_boolean()
    _patch_language_once_per_launch()
    _remember_types()


@pytest.fixture(autouse=True)
def _in_process(in_process):
    """Predictions of every test here."""


@pytest.fixture
def poisoned():
    """What torch.empty returns is NaN until it is written."""
    # On a GPU, cuBLAS would ask for an environment variable.
    torch.use_deterministic_algorithms(True, warn_only=torch.cuda.is_available())
    yield
    torch.use_deterministic_algorithms(False)
