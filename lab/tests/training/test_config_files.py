"""Every config that is shipped: it loads, builds its model's config, and says what the reports say."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import oomph
from oomph import fixes
from oomph.workload import Workload
from oomph_lab.systems import SYSTEMS
from oomph_lab.training.config import CONFIGS, ConfigError, load, load_dict
from oomph_lab.training.step import predicted_workload, workload

FILES = sorted(CONFIGS.glob("*.yaml"))
BY_NAME = {file.stem: file for file in FILES}
pytestmark = pytest.mark.usefixtures("in_process")


def loaded(name, *overrides):
    if name.startswith("npt"):
        pytest.importorskip("transformers")
    return load(BY_NAME[name], overrides)


@pytest.mark.parametrize("name", BY_NAME)
def test_it_loads_and_describes_a_step(name):
    config = loaded(name)
    assert isinstance(config.model_config, SYSTEMS[config.system].config)
    step = workload(config)
    assert isinstance(step, Workload)
    assert step.fixes == tuple(sorted(config.fixes, key=lambda use: step.fixes.index(use)))
    with torch.device("meta"):
        config.model_config.build()


def test_the_curriculum_of_hn_xs_is_the_reports():
    config = loaded("hn_xs")
    assert [stage.seq_len for stage in config.stages] == [256, 512, 768, 1024]
    assert [stage.batch_tokens for stage in config.data.curriculum] == [4096, 5120, 4608, 5120]
    assert {12, 20} <= {stage.accumulate for stage in config.stages} <= set(range(12, 21))
    assert (config.training.clip, config.training.schedule) == (1.0, "cosine")
    assert not config.fixes
    assert config.training.cuda_graph
    assert workload(config).sizes == {"B": 5, "T": 1024}
    assert workload(config, stage=config.stages[0]).sizes == {"B": 16, "T": 256}


def test_cuda_graphs_are_predicted_with_gradients_that_stay():
    plain, recorded = (loaded("pythia_tiny", f"training.cuda_graph={on}") for on in ("false", "true"))
    model = workload(plain).make_model(lambda made: made)
    gradients = sum(each.nbytes for each in model.parameters())
    ends = [oomph.predict(predicted_workload(each)).steps[-1].end for each in (plain, recorded)]
    assert ends[1] - ends[0] == pytest.approx(gradients, rel=0.05)


def test_gradients_that_cuda_graphs_need_are_not_freed_by_a_fix():
    config = loaded("pythia_tiny", "training.cuda_graph=true")
    step = predicted_workload(config)
    assert fixes.propose(oomph.predict(step), step, only=("set_to_none",)) == []
    with pytest.raises(ConfigError, match="a step with the fix 'set_to_none' cannot be captured"):
        loaded("pythia_tiny", "training.cuda_graph=true", "fixes=[set_to_none]")


def test_a_step_has_what_the_config_says():
    config = loaded("longctx_4b", "model.attention=nsa", "data.context_length=4096", "lr=0.5")
    step = workload(config)
    assert (step.dtype, step.autocast, step.accumulate) == (torch.bfloat16, None, 4)
    assert step.sizes == {"B": 1, "T": 4096}
    assert workload(config, most_passes=2).accumulate == 2
    assert config.model_config.attention == "nsa"
    group = step.optimizer([torch.nn.Parameter(torch.zeros(1))]).param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.5, (0.9, 0.95), 0.1)


def test_adamw_is_fused_on_a_gpu_and_over_the_trained_parameters_alone():
    make = workload(loaded("pythia_tiny")).optimizer
    assert make is not None
    with FakeTensorMode():  # a GPU's tensors without a GPU
        trained = nn.Parameter(torch.empty(3, device="cuda"))
        frozen = nn.Parameter(torch.empty(3, device="cuda"), requires_grad=False)
        on_gpu = make([trained, frozen])
    assert [len(group["params"]) for group in on_gpu.param_groups] == [1]
    assert on_gpu.param_groups[0]["fused"]
    assert not make([nn.Parameter(torch.empty(3))]).param_groups[0]["fused"]


def test_batch_tokens_replaces_those_of_every_stage_of_a_curriculum():
    config = loaded("hn_xs", "batch_tokens=2048")
    assert [(stage.seq_len, stage.batch_size) for stage in config.stages] == [
        (256, 8),
        (512, 4),
        (768, 2),
        (1024, 2),
    ]
    assert load_dict(config.to_dict(), "again").stages == config.stages
