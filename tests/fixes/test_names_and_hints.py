"""What is said of names that are not known, and of models without blocks."""

import re

import pytest
from small import TinyLM, seeded
from torch import nn

from oomph import fixes
from oomph.errors import UserError
from oomph.fixes.other_names import ELSEWHERE
from oomph.fixes.words import parse_fixes


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("gradient_checkpointing", "'recompute'"),
        ("activation-checkpointing", "'recompute'"),
        ("Checkpointing", "'recompute'"),
        ("flash_attention", "'fused_attention' for attention in your own code, or 'attention_backend'"),
        ("gradient_accumulation", "'micro_batches'"),
        ("cpu_offload", "'offload_activations' for activations, or 'optimizer_offload'"),
        ("fsdp", "'shard'"),
        ("8bit_adam", "'optimizer_8bit'"),
        ("liger", "'fused_loss'"),
    ],
)
def test_what_a_fix_is_called_elsewhere_is_told_in_one_line(name, here):
    with pytest.raises(UserError) as told:
        parse_fixes([name])
    assert str(told.value).startswith(f"there is no fix {name!r}; here that is {here}")
    assert len(str(told.value)) < 160


def test_hints_name_fixes_that_exist():
    named = {name for here in ELSEWHERE for name in re.findall(r"'(\w+_?\w*)'", here)}
    assert {"recompute", "attention_backend", "optimizer_8bit"} <= named
    assert named <= {fix.name for fix in fixes.all_fixes()}


class Encoder(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)

    def forward(self, x):
        return self.down(self.up(x).relu())


class TwoParts(nn.Module):
    """No list of blocks; the body holds nearly all there is."""

    def __init__(self):
        super().__init__()
        self.body = nn.Module()
        self.body.encoder, self.body.decoder = Encoder(64), Encoder(32)
        self.head = nn.Linear(8, 2)


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.large, self.small = nn.Linear(64, 64), nn.Linear(8, 8)


@pytest.mark.parametrize("fix", ["recompute", "offload_activations"])
def test_where_no_blocks_are_found_modules_of_the_model_are_named(fix):
    with pytest.raises(UserError) as told:
        fixes.apply_to_model(fix, TwoParts())
    assert str(told.value) == (
        f"fix {fix!r}: no list of blocks found; name modules, such as blocks=body.encoder "
        "(the largest are body.encoder, body.decoder)"
    )
    with pytest.raises(UserError, match=r"no module in it has parts \(the largest are large, small\)"):
        fixes.apply_to_model(fix, Bare())
    with pytest.raises(UserError, match="no module in the model has parameters"):
        fixes.apply_to_model(fix, nn.Identity())


def test_what_is_named_can_be_given():
    changed = fixes.apply_to_model({"fix": "recompute", "options": {"blocks": "body.encoder"}}, TwoParts())
    assert [change.where for change in changed] == ["body.encoder"]
    assert fixes.apply_to_model("recompute", seeded(TinyLM))
