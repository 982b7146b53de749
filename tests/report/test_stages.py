"""The table of a first step's stages: on scripted events, and on a stack of layers that is predicted."""

import json

import pytest
import torch
from sample_prediction import GiB, MiB, allocation, prediction
from torch import nn

import oomph
from oomph.records import Event, Moment
from oomph.report.stages import stage_table, stage_table_to_json

pytestmark = pytest.mark.usefixtures("in_process")

# Each word is an event: +id, -id, or a mark.
SCRIPT = (
    "+0 +1 +2 |step 1 |forward +3 |enter layers.0 +4 |enter layers.0.mlp.1 +5 |exit layers.0.mlp.1 -5 "
    "|exit layers.0 |enter layers.1 +6 |exit layers.1 +7 +8 +9 -8 |backward +10 -10 -9 |optimizer "
    "|step 2 |forward"
)
TENSORS = {
    0: allocation(0, 7 * GiB, kind="parameter", module="layers.0"),
    1: allocation(1, 1 * GiB, kind="buffer", module="layers.0"),
    2: allocation(2, 2 * MiB, kind="batch", module=""),
    3: allocation(3, 640 * MiB, op="aten.embedding", module="embedding", shape=(1, 131072, 2560)),
    4: allocation(4, 3 * GiB, module="layers.0"),
    5: allocation(5, 5 * GiB, module="layers.0.mlp.1"),
    6: allocation(6, 3 * GiB, module="layers.1"),
    7: allocation(7, 37 * GiB, op="aten.mm", module="", shape=(131072, 151936)),
    8: allocation(8, 74 * GiB, op="aten._to_copy", module=""),
    9: allocation(9, 74 * GiB, op="aten._log_softmax", module="", during="loss"),
    10: allocation(10, 80 * GiB, module="", during="backward"),
}


def scripted(script=SCRIPT, rounding=0):
    events, timeline, allocated = [], [], 0
    for word in script.replace(" |", "\n|").replace(" +", "\n+").replace(" -", "\n-").splitlines():
        if word.startswith("|"):
            events.append(Event("mark", -1, word[1:]))
            continue
        id = int(word[1:])
        sign = 1 if word[0] == "+" else -1
        allocated += sign * (TENSORS[id].bytes + rounding)
        timeline.append(Moment(len(events), allocated, allocated))
        events.append(Event("alloc" if sign == 1 else "free", id))
    return prediction(
        events=tuple(events),
        timeline=tuple(timeline),
        allocations=tuple(TENSORS[id] for id in sorted(TENSORS)),
    )


def test_every_stage_has_what_is_allocated_when_it_is_over():
    rows = stage_table(scripted())
    model, states = 8 * GiB + 2 * MiB, 640 * MiB
    assert [(row.stage, row.allocated) for row in rows] == [
        ("parameters", model),
        ("after embedding", model + states),
        ("after first layer", model + states + 3 * GiB),
        ("after all 2 layers", model + states + 6 * GiB),
        ("after full forward", model + states + 43 * GiB),
        ("peak of the loss", model + states + 191 * GiB),
        ("saved for backward", model + states + 117 * GiB),
        ("peak of backward", model + states + 197 * GiB),
    ]
    assert all(
        row.change == row.allocated - before.allocated
        for row, before in zip(rows[1:], rows[:-1], strict=True)
    )


@pytest.mark.parametrize(
    ("part", "changed"),
    [  # gradients that a layer makes on the way; an optimizer that updates in backward
        ("|exit layers.0 |enter", "|backward +10 -10 |forward |exit layers.0 |enter"),
        ("|backward +10 -10", "|backward |optimizer +10 |optimizer -10"),
    ],
)
def test_other_marks_within_forward_and_backward_do_not_end_them(part, changed):
    assert part in SCRIPT
    assert stage_table(scripted(SCRIPT.replace(part, changed))) == stage_table(scripted())


def test_a_forward_without_backward_ends_with_the_head():
    rows = stage_table(scripted(SCRIPT.partition(" +8")[0]))
    assert [row.stage for row in rows][-1] == "after full forward"


@pytest.mark.parametrize("mark", ["", "|step 1 "])
def test_a_program_that_builds_its_model_in_its_first_step_starts_when_it_is_there(mark):
    rows = stage_table(scripted(mark + SCRIPT.replace("|step 1 ", "").partition(" |step 2")[0]))
    assert [row.stage for row in rows][:2] == ["parameters", "after embedding"]
    assert rows[0].allocated == 8 * GiB


def test_where_no_block_is_repeated_there_is_no_table():
    assert stage_table(scripted("+0 |step 1 |forward +3 +7 |backward +10")) is None
    assert stage_table_to_json(None) is None


def test_where_blocks_of_another_stack_come_later_there_is_no_table_either():
    later = "|exit layers.1 |enter decoder.0 +7 |exit decoder.0"
    assert stage_table(scripted(SCRIPT.replace("|exit layers.1 +7", later))) is None
    earlier = SCRIPT.replace("+3", "|enter stem.0 +3 |exit stem.0")
    assert stage_table(scripted(earlier))[1].stage == "before the layers"


def test_as_data_it_is_plain_json():
    rows = json.loads(json.dumps(stage_table_to_json(stage_table(scripted()))))
    assert rows[1]["stage"] == "after embedding"
    assert rows[1]["change"] == 640 * MiB
    assert rows[1]["added"][0]["shape"] == [1, 131072, 2560]


def test_any_stack_of_blocks_is_found():
    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 64))
            self.tower = nn.Sequential(*(nn.TransformerEncoderLayer(64, 4, 256) for _ in range(3)))
            self.head = nn.Linear(64, 10)

        def forward(self, x):
            return self.head(self.tower(self.stem(x)))

    workload = oomph.Workload(
        Classifier,
        lambda device: torch.randn(4, 8, 16, device=device),
        lambda model, x: model(x).square().mean(),
    )
    stages = [row.stage for row in stage_table(oomph.predict(workload))]
    assert stages[1:4] == ["before the layers", "after first layer", "after all 3 layers"]
