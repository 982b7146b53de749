"""The catalogue, and the way from a user's words to a card."""

import pytest

from oomph import gpus
from oomph.errors import UserError
from oomph.gpus import catalogue, find, for_device
from oomph.units import GiB, MiB

CARDS = catalogue()


def test_every_row_is_plausible_and_has_a_source():
    assert len({card.name for card in CARDS}) == len({card.title for card in CARDS}) == len(CARDS) >= 30
    for card in CARDS:
        assert 6 * GiB < card.memory < 300 * GiB
        assert (6, 0) <= card.capability <= (12, 0)
        assert card.bf16_tflops is None or 10 < card.bf16_tflops < 3000
        assert card.bandwidth is not None
        assert 200 * 10**9 < card.bandwidth < 10**13
        assert 200 * MiB <= card.context <= 1024 * MiB
        assert card.source.startswith(("measured", "reported by users' logs", "estimated: "))
        assert 5 < card.fp32_tflops < 200
        assert 0 < card.fp64_tflops <= card.fp32_tflops
        assert card.tf32_tflops >= 0.99 * card.fp32_tflops
        assert card.bf16_tflops is None or card.bf16_tflops >= 1.9 * card.fp32_tflops
        assert card.has_bf16 == (card.capability >= (8, 0))


def test_a_card_is_found_by_its_name_and_by_its_title():
    for card in CARDS:
        assert find(card.name) is card
        assert find(card.name.upper()) is card
        assert find(card.title) is card
        assert find(f"NVIDIA {card.title}") is card


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("RTX 3090", "rtx3090"),
        ("3090", "rtx3090"),
        ("3090 ti", "rtx3090ti"),
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
        ("RTX 3090 24GB", "rtx3090"),
        ("1080ti", "gtx1080ti"),
        ("A100-80GB", "a100-80gb"),
        ("a100 80g", "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb"),
        ("H100 SXM", "h100-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("H200 141GB", "h200"),
        ("T4 16GB", "t4"),
        ("Tesla V100-SXM2-16GB", "v100-16gb"),
        ("rtx-a6000", "a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000-ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
        ("RTX 4060 Ti 16GB", "rtx4060ti-16gb"),
        ("NVIDIA TITAN RTX", "titan-rtx"),
    ],
)
def test_the_usual_spellings_lead_to_the_card(text, name):
    assert find(text).name == name


@pytest.mark.parametrize(
    ("text", "name", "memory"),
    [
        ("24GiB", "24GiB", 24 * GiB),
        ("24 gib", "24GiB", 24 * GiB),
        ("1.5 GiB", "1.5GiB", 3 * GiB // 2),
        ("80GB", "80GB", 80 * 10**9),
        ("24576MiB", "24GiB", 24 * GiB),
    ],
)
def test_a_size_stands_for_a_card_of_that_memory_modelled_as_sm_90(text, name, memory):
    card = find(text)
    assert (card.name, card.memory, card.capability) == (name, memory, (9, 0))
    assert card.bf16_tflops is card.fp32_tflops is card.fp64_tflops is card.bandwidth is None
    assert "sm_90" in card.source


@pytest.mark.parametrize(
    ("device", "memory", "capability", "name"),
    [
        ("NVIDIA H200", 150109880320, (9, 0), "h200"),
        ("NVIDIA GeForce RTX 3090", 24257 * MiB, (8, 6), "rtx3090"),
        ("Tesla V100-SXM2-32GB", 32510 * MiB, (7, 0), "v100-32gb"),
        ("NVIDIA GeForce RTX 4060 Ti", 7806 * MiB, (8, 9), "rtx4060ti-8gb"),
        ("NVIDIA GeForce RTX 4060 Ti", 16380 * MiB, (8, 9), "rtx4060ti-16gb"),
    ],
)
def test_a_real_device_gets_its_catalogue_entry_with_its_own_memory(device, memory, capability, name):
    card = for_device(device, memory, capability)
    assert card.name == name
    assert card.memory == memory
    assert card.bandwidth == find(name).bandwidth
    assert card.context == find(name).context


@pytest.mark.parametrize(
    ("device", "memory", "capability"),
    [
        ("NVIDIA GeForce RTX 4070 Laptop GPU", 8188 * MiB, (8, 9)),  # not the desktop card
        ("NVIDIA GeForce RTX 3080", 12117 * MiB, (8, 6)),  # the 12 GB variant, under the same name
        ("NVIDIA GB10", 122502 * MiB, (12, 1)),
        ("Tesla K80", 11441 * MiB, (3, 7)),
    ],
)
def test_a_device_outside_the_catalogue_is_described_by_its_own_properties(device, memory, capability):
    card = for_device(device, memory, capability)
    assert (card.memory, card.capability) == (memory, capability)
    assert card.bf16_tflops is None
    assert card.bandwidth is None
    assert "NVIDIA" not in card.title
    assert card.context >= 200 * MiB


def test_what_a_card_leaves_the_allocator():
    card = find("rtx3090")
    left = card.memory - card.context
    assert card.limit() == card.limit("80GiB", budget="80GiB") == left
    assert card.limit(nccl=MiB) == left - MiB
    assert card.limit("2GiB", budget="4GiB", nccl=MiB) == 2048 * MiB
    assert card.limit("8GiB", budget="4GiB", nccl=MiB) == 4095 * MiB - card.context


def test_the_host_link_is_that_of_the_card():
    speeds = [find(name).host_link for name in ("t4", "rtx3090", "h100-80gb", "gh200")]
    assert speeds == sorted(set(speeds))
    assert find("rtx4060ti-16gb").host_link * 2 == find("rtx4070").host_link  # of the same generation
    assert find("24GiB").host_link == find("h200").host_link


def test_here_is_what_is_free_on_the_gpu_of_this_machine(monkeypatch):
    h200 = find("h200")
    mig = for_device("NVIDIA H200 MIG 1g.18gb", 16 * GiB, (9, 0))
    unused = h200.memory - h200.context
    for device, memory, name in (
        ((h200, 23 * GiB), 23 * GiB + h200.context, "h200"),
        ((h200, unused), h200.memory, "h200"),
        ((mig, 12 * GiB), 12 * GiB + mig.context, "13056MiB"),
    ):
        monkeypatch.setattr(gpus, "ask_device", lambda device=device: device)
        found = find("here")
        assert (found.memory, found.name) == (memory, name)
        assert ("free" in found.title) == (name == "h200" and memory < h200.memory)
        assert find(found.name)  # as plans and predictions keep it
    monkeypatch.setattr(gpus, "ask_device", lambda: None)
    with pytest.raises(UserError, match="no GPU here"):
        find("here")
