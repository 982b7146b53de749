"""Short labels: files, ranges of modules, groups of tensors."""

from pathlib import Path

import pytest
from sample_prediction import GiB, allocation

from oomph.records import Alive, Site
from oomph.report.terminal import collapse_modules, group_tensors, short_path


def _alive(*allocations):
    return [Alive(one.bytes, one) for one in allocations]


@pytest.mark.parametrize(
    "change", [{"shape": (1,)}, {"dtype": "bfloat16"}, {"stage": "backward"}, {"site": Site("a.py", 1, "f")}]
)
def test_a_difference_in_shape_dtype_stage_or_line_keeps_tensors_apart(change):
    assert len(group_tensors(_alive(allocation(0), allocation(1, **change)))) == 2


def test_groups_come_largest_total_first_so_many_small_can_beat_one_large():
    small = [allocation(i, GiB, module=f"h.{i}") for i in range(3)]
    large = allocation(9, 2 * GiB, shape=(7,))
    assert [group.count for group in group_tensors(_alive(large, *small))] == [3, 1]


def test_without_a_line_only_the_same_place_in_other_layers_is_alike():
    a = allocation(0, site=None, module="h.0.mlp")
    b = allocation(1, site=None, module="h.1.mlp")
    c = allocation(2, site=None, module="head")
    assert sorted(group.count for group in group_tensors(_alive(a, b, c))) == [1, 2]


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        ([], ""),
        (["", ""], ""),
        (["lm_head"], "lm_head"),
        (["h.3.attn"], "h.3.attn"),
        (["h.0.attn", "h.1.attn"], "h.{0,1}.attn"),
        ([f"h.{i}.attn" for i in range(12)], "h.{0..11}.attn"),
        ([f"h.{i}.attn" for i in (0, 3, 7)], "h.{0,3,7}.attn"),
        ([f"h.{i}" for i in range(0, 24, 2)], "h.{12 of 0..22}"),
        ([f"h.{i}" for i in (2, 10, 9)], "h.{2,9,10}"),
        (["h.0.q", "h.0.k", "h.1.q", "h.1.k"], "h.{0,1}.{q,k}"),
        ([f"h.{i}.{n}" for i in range(3) for n in "qkv"], "h.{0..2}.{q,k,v}"),
        (["h.0.q", "h.1.k", "h.1.q"], "h.{0,1}.q and 1 more"),
        ([f"s.{i}.b.{j}" for i in range(2) for j in range(3)], "s.{0,1}.b.{0..2}"),
        (["s.0.b.0", "s.0.b.1", "s.1.b.0"], "s.*.b.*"),
        (["encoder.x", "decoder.layers.y", "head"], "encoder.x and 2 more"),
    ],
)
def test_module_paths_collapse_without_naming_one_that_is_not_there(paths, expected):
    assert collapse_modules(paths) == expected


HERE = Path("/home/ada/project")


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("/home/ada/project/loss.py", "loss.py"),
        ("/home/ada/project/models/gpt.py", "models/gpt.py"),
        ("/env/lib/python3.11/site-packages/transformers/gpt2.py", "transformers/gpt2.py"),
        ("/usr/lib/python3/dist-packages/yaml/x.py", "yaml/x.py"),
        ("/home/ada/project/.venv/lib/site-packages/torchvision/resnet.py", "torchvision/resnet.py"),
        ("/data/a/b/c/train.py", ".../b/c/train.py"),
        ("/data/train.py", "/data/train.py"),
        ("relative/train.py", "relative/train.py"),
        ("<stdin>", "<stdin>"),
    ],
)
def test_paths_are_shown_by_their_last_parts(file, expected):
    assert short_path(file, HERE) == expected
