"""The catalogue: each configuration builds a model with the recorded number of parameters.

One of each architecture is built, the one with the fewest blocks; all of them with OOMPH_ALL_MODELS=1.
"""

import os
import re

import pytest
import torch

from oomph.errors import UserError
from oomph.models.configuration import catalogue, find, near

transformers = pytest.importorskip("transformers")


def blocks(config):
    text = config.get("text_config", config)
    return next(
        text[key] for key in ("num_hidden_layers", "n_layer", "n_layers", "encoder_layers") if key in text
    )


def sampled():
    entries = catalogue()
    if os.environ.get("OOMPH_ALL_MODELS"):
        return sorted(entries)
    smallest = {}
    for name, entry in entries.items():
        kind = entry.config["model_type"]
        if kind not in smallest or blocks(entry.config) < blocks(entries[smallest[kind]].config):
            smallest[kind] = name
    return sorted(smallest.values())


@pytest.mark.parametrize("name", sampled())
def test_number_of_parameters_is_the_recorded_one(name):
    entry = catalogue()[name]
    config = transformers.AutoConfig.for_model(**entry.config)
    with torch.device("meta"):
        model = getattr(transformers, entry.config["architectures"][0])._from_config(config)
    assert sum(each.numel() for each in model.parameters()) == entry.parameters


def test_every_entry_names_its_source_and_when_it_was_read():
    assert all(re.search(r"20\d\d-\d\d-\d\d$", entry.source) for entry in catalogue().values())
    assert all(entry.parameters for entry in catalogue().values())
    assert len(catalogue()) > 90


def test_a_name_without_its_owner_is_enough_where_it_is_one_model():
    assert find("qwen3-8b") == catalogue()["Qwen/Qwen3-8B"].config


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("Qwen/Qwen3-8b-instrct", "Qwen/Qwen3-8B"),
        ("gemma-3-4b", "google/gemma-3-4b-pt"),
        ("lama-3.1-8b", "meta-llama/Llama-3.1-8B"),
    ],
)
def test_a_typo_is_answered_with_the_nearest_names(typed, meant):
    assert meant in near(typed, alike=0.6)


def test_a_name_that_is_not_known():
    with pytest.raises(UserError, match=r"'mistral-7b' is not known.*Mistral-7B-v0.1"):
        find("mistral-7b")
