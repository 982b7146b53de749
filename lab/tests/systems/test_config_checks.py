"""A config reports all of its invalid fields together, with the value given and what is valid."""

from dataclasses import replace

import pytest
from pydantic import ValidationError

from oomph.errors import UserError
from oomph_lab.systems.ginr import GINRConfig
from oomph_lab.systems.hatchling import HatchlingConfig
from oomph_lab.systems.longctx import PRESETS, LongContextConfig
from oomph_lab.systems.npt import NPTConfig, NPTOptimization
from oomph_lab.systems.pythia import PythiaConfig


def longctx(**fields):
    return replace(PRESETS["tiny"], **fields)


@pytest.mark.parametrize(
    ("config", "fields", "advice"),
    [
        (HatchlingConfig, {"gate": "gru"}, "'spiking' or 'kimi'"),
        (HatchlingConfig, {"kda_mode": "fast"}, "'auto', 'sequential', 'scan', 'chunked'"),
        (HatchlingConfig, {"kda_memory_chunk_size": 0}, "greater than 0"),
        (HatchlingConfig, {"n_heads": 8, "n_kv_heads": 3}, "multiple of n_kv_heads=3"),
        (HatchlingConfig, {"token_drop": 1}, "less than 1"),
        (HatchlingConfig, {"token_drop_layers": (5, 4)}, "0 <= first <= last"),
        (PythiaConfig, {"hidden_size": 512, "num_heads": 5}, "multiple of num_heads=5"),
        (PythiaConfig, {"vocab_size": 2.5}, "a valid integer"),
        (PythiaConfig, {"parallel_residual": 1}, "a valid boolean"),
        (PythiaConfig, {"sparse": "banded"}, "'local', 'global', 'mixed'"),
        (PythiaConfig, {"positions": ["none"]}, "'learned' or 'rotary'"),
        (PythiaConfig, {"dropout": 1.0}, "less than 1"),
        (PythiaConfig, {"rotary_fraction": 0.01, "positions": "rotary"}, "even number >= 2"),
        (longctx, {"attention": "sparse"}, "'dense' or 'nsa'"),
        (longctx, {"num_heads": 4, "num_kv_heads": 3}, "multiple of num_kv_heads=3"),
        (longctx, {"head_dim": 15}, "even number"),
        (longctx, {"rope_theta": 0.5}, "> 1"),
        (NPTConfig, {"model_name": "bert"}, "'llama-3.1-8b'"),
        (NPTConfig, {"rank": 0}, "greater than 0"),
        (NPTConfig, {"stream": "both"}, "'teacher', 'student' or 'joint'"),
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
    with pytest.raises(ValidationError) as caught:
        config(**fields)
    (problem,) = caught.value.errors()
    assert next(iter(fields)) in (*problem["loc"], problem.get("ctx", {}).get("field"))
    assert advice in problem["msg"]


def test_all_invalid_fields_are_reported_together():
    fields = {"query_mixing": "none", "patch_size": "two", "heads": 0, "num_latents": 200}
    with pytest.raises(ValidationError) as caught:
        GINRConfig(**fields)
    assert {problem["loc"][0] for problem in caught.value.errors()} == set(fields)


def test_an_unknown_size_is_reported_with_the_valid_ones():
    with pytest.raises(UserError, match=r"no size '7B'; choose from tiny, 0\.6B, 4B, qwen3-4B, 8B"):
        LongContextConfig.of("7B")
