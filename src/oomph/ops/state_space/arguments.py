"""What selective_scan can take."""

from torch import Tensor

from oomph.errors import ArgumentError
from oomph.ops import common

DIRECTIONS = ("forward", "backward", "both")
IMPLS = ("auto", "reference", "chunked", "triton")


def check_arguments(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    direction: str,
    initial_state: Tensor | None,
    chunk_size: int | None,
    impl: str,
) -> None:
    """Values are not looked at: that would wait for the device. A > 0 is computed as it is written."""
    common.check_one_of("impl", impl, IMPLS)
    common.check_one_of("direction", direction, DIRECTIONS)
    whole = isinstance(chunk_size, int) and not isinstance(chunk_size, bool)
    if chunk_size is not None and (not whole or chunk_size < 1):
        raise ArgumentError(f"chunk_size={chunk_size!r} is not valid; give a whole number >= 1, or None")
    common.check_floating(x=x, delta=delta, A=A, B=B, C=C)
    optional = {"D": D, "z": z, "delta_bias": delta_bias, "initial_state": initial_state}
    common.check_floating_if_given(**optional)
    common.check_same_device(x=x, delta=delta, A=A, B=B, C=C, **optional)

    pair = [2] if direction == "both" else []
    if x.dim() != 3 and not (pair and x.dim() == 4 and x.shape[0] == 2):
        valid = "[B, L, d], or [2, B, L, d] with one x per direction" if pair else "[B, L, d]"
        raise ArgumentError(f"x has shape {list(x.shape)}; valid for direction={direction!r}: {valid}")
    if A.dim() != 2 + len(pair) or A.shape[-1] == 0:
        raise ArgumentError(
            f"A has shape {list(A.shape)}; valid for direction={direction!r}: "
            f"[{'2, ' if pair else ''}d, n] with n >= 1"
        )
    batch, length, d = x.shape[-3:]
    n = A.shape[-1]
    expected: dict[str, tuple[Tensor | None, list[int]]] = {
        "delta": (delta, [*pair, batch, length, d]),
        "A": (A, [*pair, d, n]),
        "B": (B, [*pair, batch, length, n]),
        "C": (C, [*pair, batch, length, n]),
        "D": (D, [*pair, d]),
        "z": (z, [batch, length, d]),
        "delta_bias": (delta_bias, [*pair, d]),
        "initial_state": (initial_state, [*pair, batch, d, n]),
    }
    for name, (tensor, shape) in expected.items():
        if tensor is not None and list(tensor.shape) != shape:
            raise ArgumentError(
                f"{name} has shape {list(tensor.shape)}; valid for x {list(x.shape)}, n={n} and "
                f"direction={direction!r}: {shape}"
            )
