"""What is said of names that are not known, and of models without blocks."""

import re

import pytest

from oomph import fixes
from oomph.errors import UserError
from oomph.fixes.registry import NAMES_ELSEWHERE, OLD_NAMES


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("gradient_checkpointing", "'activation_checkpointing'"),
        ("Checkpointing", "'activation_checkpointing'"),
        ("flash_attention", "'fused_attention' for attention in your own code, or 'attn_implementation'"),
        ("gradient_accumulation", "'micro_batches'"),
        ("cpu_offload", "'activation_offloading' for activations, or 'optimizer_cpu_offload'"),
        ("fsdp", "'fsdp2'"),
        ("8bit_adam", "'optimizer_8bit'"),
        ("liger", "'fused_linear_cross_entropy'"),
    ],
)
def test_what_a_fix_is_called_elsewhere_is_told_in_one_line(name, here):
    with pytest.raises(UserError) as told:
        fixes.uses_of(name)
    assert str(told.value).startswith(f"there is no fix {name!r}; here that is {here}")
    assert len(str(told.value)) < 160


def test_hints_name_fixes_that_exist():
    named = {name for here in NAMES_ELSEWHERE for name in re.findall(r"'(\w+_?\w*)'", here)}
    assert {"activation_checkpointing", "attn_implementation", "optimizer_8bit"} <= named
    assert named <= {fix.name for fix in fixes.all_fixes()}


@pytest.mark.parametrize(("old", "new"), OLD_NAMES.items())
def test_an_old_name_works_and_warns(old, new):
    with pytest.warns(FutureWarning, match=f"fix '{old}' is deprecated; use '{new}'"):
        found = fixes.find(old)
    assert found.name == new


def test_an_old_name_in_a_record_becomes_the_new_one():
    with pytest.warns(FutureWarning, match="'recompute' is deprecated"):
        uses = fixes.uses_of([{"fix": "recompute", "options": {"keep": "products"}}])
    assert uses == fixes.uses_of("activation_checkpointing:keep=products")
