"""A config reports all of its invalid fields together, with the value given and what is valid."""

from dataclasses import replace

import pytest

from oomph.errors import UserError
from oomph.systems.config_checks import InvalidConfig, InvalidField
from oomph.systems.ginr import GINRConfig
from oomph.systems.hatchling import HatchlingConfig
from oomph.systems.longctx import PRESETS, LongContextConfig
from oomph.systems.longctx.naive import NaiveLongContext
from oomph.systems.npt import NPTConfig, NPTOptimization
from oomph.systems.pythia import PythiaConfig


def longctx(**fields):
    return replace(PRESETS["tiny"], **fields)


@pytest.mark.parametrize(
    ("config", "fields", "advice"),
    [
        (HatchlingConfig, {"gate": "gru"}, "'spiking', 'kimi'"),
        (HatchlingConfig, {"kda_mode": "fast"}, "'auto', 'chunked', 'sequential'"),
        (HatchlingConfig, {"kda_memory_chunk_size": 0}, "whole number >= 1"),
        (HatchlingConfig, {"n_heads": 8, "n_kv_heads": 3}, "multiple of n_kv_heads=3"),
        (HatchlingConfig, {"token_drop": 1}, ">= 0 and < 1"),
        (HatchlingConfig, {"token_drop_layers": (5, 4)}, "0 <= first <= last"),
        (PythiaConfig, {"hidden_size": 512, "num_heads": 5}, "multiple of num_heads=5"),
        (PythiaConfig, {"vocab_size": 2.5}, "whole number >= 1"),
        (PythiaConfig, {"parallel_residual": 1}, "true or false"),
        (PythiaConfig, {"sparse": "banded"}, "None, 'local', 'global', 'mixed'"),
        (PythiaConfig, {"positions": ["none"]}, "'learned', 'rotary'"),
        (PythiaConfig, {"dropout": 1.0}, ">= 0 and < 1"),
        (PythiaConfig, {"rotary_fraction": 0.01, "positions": "rotary"}, "even number >= 2"),
        (longctx, {"attention": "sparse"}, "'dense', 'nsa'"),
        (longctx, {"num_heads": 4, "num_kv_heads": 3}, "multiple of num_kv_heads=3"),
        (longctx, {"head_dim": 15}, "even number"),
        (longctx, {"rope_theta": 0.5}, "> 1"),
        (NPTConfig, {"model_name": "bert"}, "'llama-3.1-8b'"),
        (NPTConfig, {"rank": 0}, "whole number >= 1"),
        (NPTConfig, {"stream": "both"}, "'teacher', 'student', 'joint'"),
        (NPTConfig, {"gradients": "forward", "stream": "joint"}, "gradients='backward'"),
        (NPTOptimization, {"mixed_precision": "int4"}, "'no', 'bf16', 'fp16'"),
        (GINRConfig, {"query_mixing": "none"}, "'self', 'cross'"),
        (GINRConfig, {"num_latents": 200}, "square number"),
        (GINRConfig, {"query_chunk": 64}, "query_mixing='self'"),
        (GINRConfig, {"queries_per_step": 2000}, "1024 positions"),
        (GINRConfig, {"image_size": 33}, "multiple of patch_size=2"),
        (GINRConfig, {"sigmas": (1.0, 0.0)}, "one number > 0"),
    ],
)
def test_an_invalid_field_is_reported_with_the_valid_values(config, fields, advice):
    field, given = next(iter(fields.items()))
    with pytest.raises(InvalidConfig) as caught:
        config(**fields)
    (problem,) = caught.value.problems
    assert (problem.field, problem.given) == (field, given)
    assert advice in problem.advice
    assert f"{field}={given!r} is not valid; " in str(caught.value)


def test_all_invalid_fields_are_reported_a_line_each():
    fields = {"query_mixing": "none", "patch_size": "two", "heads": 0, "num_latents": 200}
    with pytest.raises(InvalidConfig) as caught:
        GINRConfig(**fields)
    lines = str(caught.value).splitlines()
    assert [line.split("=")[0] for line in lines] == [f"GINRConfig {field}" for field in fields]


def test_a_field_is_reported_once_and_nothing_is_computed_from_it():
    with pytest.raises(InvalidConfig) as caught:
        PythiaConfig(num_heads="eight", hidden_size=0, positions="rotary")
    assert [problem.field for problem in caught.value.problems] == ["hidden_size", "num_heads"]
    with pytest.raises(InvalidConfig) as caught:
        longctx(head_dim=0, rope_theta="large")
    assert caught.value.problems == (
        InvalidField("head_dim", 0, "give a whole number >= 1"),
        InvalidField("rope_theta", "large", "give a number >= 0"),
    )


def test_unknown_sizes_and_bugs_are_reported_with_the_valid_ones():
    with pytest.raises(UserError, match=r"no size '7B'; choose from tiny, 0\.6B, 4B, qwen3-4B, 8B"):
        LongContextConfig.of("7B")
    with pytest.raises(UserError, match="rope_bug='none' is not valid"):
        NaiveLongContext(PRESETS["tiny"], 8, rope_bug="none")
