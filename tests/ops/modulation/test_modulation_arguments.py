"""What modulated_linear refuses: one line each, with what was given and what is valid."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from modulation_inputs import inputs

from oomph.errors import ArgumentError
from oomph.ops.modulation import fused, modulated_linear


def call(**changes: Any) -> None:
    given = inputs(dtype=torch.float32)
    arguments: dict[str, Any] = {
        name: getattr(given, name) for name in ("h", "weight", "A", "B", "mod", "bias")
    }
    modulated_linear(**arguments | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"h": torch.ones(2, 5, 8)},
            r"h \[2, 5, 8\], weight \[7, 11\], A \[7, 3\] and B \[3, 11\] do not fit",
        ),
        ({"weight": torch.ones(11, 7)}, r"an nn.Linear's weight is \[f, d\]: give linear.weight.t\(\)"),
        ({"A": torch.ones(7, 2)}, r"A \[7, 2\], B \[3, 11\] and mod \[2, 5, 3\] do not fit together"),
        ({"B": torch.ones(11)}, r"B \[11\] and mod .* do not fit together; valid: A \[d, r\]"),
        ({"A": torch.ones(7, 0), "B": torch.ones(0, 11), "mod": torch.ones(0)}, "with r >= 1"),
        ({"mod": torch.ones(2, 4, 3)}, r"mod \[2, 4, 3\] does not broadcast to the tokens of h \[2, 5, 7\]"),
        ({"mod": torch.ones(1, 2, 5, 3)}, "does not broadcast to the tokens of h"),
        ({"mod": torch.tensor(1.0)}, "do not fit together"),
        ({"bias": torch.ones(7)}, r"bias has shape \[7\]; valid: \[11\]"),
        ({"h": torch.ones(2, 5, 7, dtype=torch.int64)}, "h has dtype torch.int64; valid: float16"),
        ({"A": [1.0]}, "A is a list, not a tensor"),
        ({"weight": None}, "weight is a NoneType; valid: a float tensor"),
        (
            {"weight": torch.ones(7, 11, dtype=torch.int8)},
            r"weight has dtype torch.int8; valid: .* an Int8Weight",
        ),
        (
            {"weight": torch.ones(7, 11, device="meta")},
            "all tensors must be on one device; given: h on cpu, wei",
        ),
        ({"impl": "fast"}, "impl='fast' is not valid; choose from 'auto', 'reference', 'chunked', 'triton'"),
    ],
)
def test_a_bad_argument_is_refused_with_what_is_valid(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call(**changes)


def test_triton_says_why_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match="too little for float64; choose 'auto' or 'chunked'"):
        call(h=torch.ones(2, 5, 7, dtype=torch.float64), impl="triton")
    with pytest.raises(ArgumentError, match="interpreter multiplies bfloat16 wrongly"):
        call(h=torch.ones(2, 5, 7, dtype=torch.bfloat16), impl="triton")
    monkeypatch.setattr(fused, "LARGEST_RANK", 2)
    with pytest.raises(ArgumentError, match="the rank 3 is above 2"):
        call(impl="triton")
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ArgumentError, match="impl='triton' cannot run: the tensors are on cpu"):
        call(impl="triton")
