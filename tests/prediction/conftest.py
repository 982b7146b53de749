"""Fixtures that several files of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from autocast_log import OpLog, is_on_gpu
from predict_samples import linear_workload, stack_workload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import DefaultDeviceType

import oomph
from oomph import Prediction
from oomph.prediction.cuda.autocast import cuda_autocast


@pytest.fixture(scope="session")
def linear() -> Prediction:
    return oomph.predict(linear_workload(), gpu="h200")


@pytest.fixture(scope="session")
def stack() -> Prediction:
    return oomph.predict(stack_workload(), gpu="h200")


@pytest.fixture
def gpu_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *args, **kwargs: True)
    # Fake tensors say "cpu" here, so a checkpoint would fall back on the machine's own kind of device.
    monkeypatch.setattr(DefaultDeviceType, "_default_device_type", "cuda")


@pytest.fixture
def log(gpu_claimed: None) -> Iterator[OpLog]:
    with cuda_autocast(is_on_gpu), FakeTensorMode(), OpLog() as mode:
        yield mode
