"""FSDP2: its predicted saving, and blocks that it cannot shard. tests/parallel runs it on two ranks."""

import warnings
from dataclasses import replace

from small import TinyLM, workload

import oomph
from oomph import fixes
from oomph.nn.blocks import blocks
from oomph.parallel.parallelize import blocks_with_own_parameters


class ReturnsView(TinyLM):
    def __init__(self, **options):
        super().__init__(**options)
        for block in self.blocks:
            block.register_forward_hook(lambda block, given, out: out.view(out.shape))


def test_the_saving_is_predicted_and_warnings_of_fsdp2_are_not_shown():
    work = replace(workload(), model=lambda: ReturnsView(layers=3, width=512, heads=4))
    prediction = oomph.predict(work, gpu="h200")
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        eight, two = fixes.propose(prediction, work, only=("fsdp2",))
    assert not [each for each in shown if "FSDP2" in str(each.message)]
    assert eight.saving > two.saving > 0
    held = sum(
        size
        for stage, size in prediction.by_stage()
        if stage in ("parameters", "gradients", "optimizer state")
    )
    assert two.saving < held / 2
    assert eight.saving < held * 7 / 8
    assert two.peak.allocated > eight.peak.allocated


def test_blocks_that_share_a_parameter_are_left_to_the_whole_model():
    model = TinyLM()
    model.blocks[2].mlp = model.blocks[0].mlp
    assert [name for name, _ in blocks_with_own_parameters(blocks(model))] == ["blocks.1"]
