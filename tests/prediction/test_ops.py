"""The registry of ops: what is entered, where, and what a program meets that is not."""

from dataclasses import fields

import pytest
import torch
import torch.nn.functional as F
from benchmarks.tables import ops_without_entry
from torch import nn

import oomph
from oomph.prediction.ops import registry
from oomph.prediction.ops.registry import FACTS, OpFacts, entered, is_described, op

aten = torch.ops.aten


def test_every_entry_is_of_ops_that_torch_has():
    for field in fields(OpFacts):
        entered(field.name)  # resolves their names


def test_all_that_is_entered_of_an_op_stands_in_one_file():
    apart = {name for name, files in registry.FILES.items() if len(files) > 1}
    # Their workspaces are in prediction/convolution/.
    assert apart == {"aten::convolution", "aten::convolution_backward"}


def test_an_entry_of_one_overload_adds_to_that_of_all():
    assert FACTS[aten.sort.stable].launches == FACTS[aten.sort.values].launches == 6
    assert FACTS[aten.sort.stable].temporaries is FACTS[aten.sort.values].temporaries is not None
    assert FACTS[aten.index_put.default].takes_masks
    assert not FACTS[aten.index_put.out].takes_masks


def test_tags_and_schemas_say_what_no_entry_says():
    assert FACTS[aten.exp.default].elementwise
    assert FACTS[aten.diagonal.default].is_free
    assert FACTS[aten.equal.default].reads
    assert FACTS[aten.arange.default].is_factory
    assert FACTS[aten._foreach_mul_.Scalar].over_lists


@pytest.mark.parametrize(
    ("facts", "shown"),
    [({"launches": 7}, "entered twice"), ({"lunches": 7}, "lunches")],
    ids=["twice", "typo"],
)
def test_a_fact_is_entered_once_and_by_its_name(facts, shown):
    with pytest.raises(AssertionError, match=shown):
        op("sort", **facts)


def several_families():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    net = net.to("cuda")
    head, table = nn.Linear(72, 16).cuda(), nn.Embedding(10, 16).cuda()
    x = F.layer_norm(head(net(torch.randn(2, 3, 8, 8, device="cuda"))), (16,))
    x = x + table(torch.zeros(2, dtype=torch.long, device="cuda"))
    rows = F.scaled_dot_product_attention(*[x.view(1, 1, 2, 16)] * 3).view(2, 16)
    loss = F.cross_entropy(F.dropout(rows, 0.1), torch.zeros(2, dtype=torch.long, device="cuda"))
    loss.backward()
    torch.optim.AdamW([*net.parameters(), *head.parameters(), *table.parameters()]).step()


@pytest.mark.usefixtures("in_process")
def test_the_docs_list_the_ops_that_a_program_meets_and_no_entry_describes():
    FACTS.clear()
    oomph.predict(several_families, gpu="h200")
    met = {str(func) for func in FACTS if not is_described(func)}
    listed = ops_without_entry()
    assert len(FACTS) > 50
    assert {name for name in met if f"`{name}`" not in listed} == set()
