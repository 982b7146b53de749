"""A trace in this process leaves torch and the user's objects as they were, and allocates nothing large.

`oomph.predict` traces in a child process, other functions in their own.
"""

import random
import resource
import threading

import numpy
import pytest
import torch
from small_programs import mean_square, workload
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer as optim

import oomph
from oomph import ProgramError, gpus
from oomph.prediction.child import call_on_fake_gpu, trace


def torch_state():
    watched = [torch, torch.cuda, torch.autograd, torch.autograd.graph, torch.nn.functional, optim]
    watched += [
        torch.Tensor,
        nn.Module,
        nn.Parameter,
        nn.RNNBase,
        FakeTensor,
        torch._C._autograd,
        torch.nn.init,
    ]
    attributes = {
        f"{owner.__name__}.{name}": value for owner in watched for name, value in vars(owner).items()
    }
    # Keyed by name, compared by identity: equality of tensors would not give one answer.
    return {name: id(value) for name, value in attributes.items()} | {
        "is_available": torch.cuda.is_available(),
        "autocast": (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "grad": torch.is_grad_enabled(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "rng": torch.get_rng_state().tolist(),
        "modes": torch._C._len_torch_function_stack(),
        "step hooks": len(optim._global_optimizer_pre_hooks),
    }


def assert_same(before, after):
    assert {name for name in before | after if before.get(name) != after.get(name)} == set()


def trace_here(target, gpu="h200"):
    trace(target, gpus.find(gpu), lambda text, fraction: None)


@pytest.fixture(autouse=True, scope="module")
def _first_trace():
    trace_here(workload())  # torch imports some of its own modules only when they are first used


def test_a_trace_changes_nothing_in_torch():
    before = torch_state()
    trace_here(workload(autocast="bfloat16", dtype="bfloat16"), gpu="rtx3090")
    assert_same(before, torch_state())


def test_random_numbers_drawn_by_the_program_are_not_taken_from_the_caller():
    def states():
        return random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    before = states()
    trace_here(
        lambda: (random.random(), numpy.random.rand(), torch.rand(1), torch.rand(1, device="cuda"), None)[-1]
    )
    assert states() == before


@pytest.mark.parametrize("where", ["model", "batch", "loss", "optimizer", "backward", "step"])
def test_a_failure_anywhere_puts_everything_back(where):
    def fail(*args, **kwargs):
        raise ValueError("on purpose")

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ValueError("on purpose")

    class FailingOptimizer(torch.optim.SGD):
        def step(self, closure=None):
            raise ValueError("on purpose")

    parts = {
        "backward": {"loss": lambda model, batch: Fails.apply(mean_square(model, batch))},
        "step": {"optimizer": lambda params: FailingOptimizer(params)},
    }
    failing = workload(autocast="bfloat16", **parts.get(where, {where: fail}))
    FailingOptimizer([nn.Parameter(torch.zeros(1))])  # torch wraps a class's step when it is first used
    before = torch_state()
    with pytest.raises(ProgramError, match="on purpose") as caught:
        trace_here(failing)
    assert isinstance(caught.value.__cause__, ValueError)
    del caught
    assert_same(before, torch_state())


def test_a_keyboard_interrupt_puts_everything_back():
    def interrupt(model, batch):
        raise KeyboardInterrupt

    before = torch_state()
    with pytest.raises(KeyboardInterrupt):
        trace_here(workload(loss=interrupt))
    assert_same(before, torch_state())
    with pytest.raises(KeyboardInterrupt):
        oomph.predict(workload(loss=interrupt))


@pytest.mark.parametrize("moved", [False, True], ids=["kept on the host", "moved by the program"])
def test_a_model_built_before_the_trace_is_not_changed(moved):
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    model.eval()
    before = {name: (tensor, tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}

    def train():
        model.to("cuda")
        x = torch.randn(32, 64, device="cuda")
        return lambda: mean_square(model, x).backward()

    target = train if moved else workload(lambda: model)
    assert oomph.predict(target).peak.allocated > 64 * 64 * 4
    trace_here(target)
    after = model.state_dict(keep_vars=True)
    assert list(after) == list(before)
    for name, (tensor, values) in before.items():
        assert after[name] is tensor
        assert not isinstance(tensor, FakeTensor)
        assert tensor.device.type == "cpu"
        assert torch.equal(tensor, values)
        assert tensor.grad is None
    assert not model.training
    assert mean_square(model, torch.randn(4, 64)).item() > 0


def test_several_threads_may_predict_and_trace():
    found = []

    def ask():
        try:
            call_on_fake_gpu(lambda: torch.empty(1, device="cuda"))
            found.append(oomph.predict(workload()).peak.allocated)
        except Exception as error:
            found.append(error)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [oomph.predict(workload()).peak.allocated] * 3


def test_a_prediction_inside_a_prediction_is_refused():
    def train():
        torch.empty(1, device="cuda")
        with pytest.raises(oomph.OomphError, match="is itself being predicted"):
            oomph.predict(workload())

    before = torch_state()
    trace_here(train)
    assert_same(before, torch_state())
    oomph.predict(train)


def _most_resident_bytes():
    users = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    return max(resource.getrusage(who).ru_maxrss for who in users) * 1024


def _predict_large_model(rank, port):
    before = _most_resident_bytes()
    large = oomph.Workload(
        model=lambda: nn.Sequential(*[nn.Linear(32768, 32768, bias=False) for _ in range(8)]),
        batch=lambda device: torch.randn(8192, 32768, device=device, dtype=torch.bfloat16),
        loss=lambda model, batch: model(batch).sum(),
        dtype="bfloat16",
    )
    prediction = oomph.predict(large, gpu="h200")
    parameters = sum(each.bytes for each in prediction.allocations if each.kind == "parameter") // 2
    assert parameters == 8 * 32768**2
    assert prediction.peak.allocated > 4 * 2 * parameters  # weights, gradients and two states, in bfloat16
    assert _most_resident_bytes() - before < 2**30


def test_an_eight_billion_parameter_model_is_predicted_in_little_host_memory(run_ranks):
    """In a process of its own, which has had no other children."""
    run_ranks(_predict_large_model, 1)


def test_an_optimizer_made_before_the_model_was_moved_steps_it_and_is_given_back():
    model = nn.Linear(1024, 1024)
    optimizer = torch.optim.AdamW(model.parameters())
    own = list(model.parameters())

    def train():
        model.to("cuda")
        x = torch.randn(8, 1024, device="cuda")

        def step():
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    stages = dict(oomph.predict(train).by_stage())
    assert stages["optimizer state"] == 2 * stages["parameters"]
    trace_here(train)
    assert all(one is other for one, other in zip(model.parameters(), own, strict=True))
    assert all(one is other for one, other in zip(optimizer.param_groups[0]["params"], own, strict=True))
    assert not optimizer.state


def test_predict_works_inside_inference_mode_and_without_gradients():
    with torch.inference_mode():
        assert oomph.predict(workload()).peak.allocated > 0
    with torch.no_grad():
        assert oomph.predict(workload()).peak.allocated > 0


def test_settings_that_the_program_makes_end_with_the_trace():
    def program():
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
        torch.use_deterministic_algorithms(True)
        torch.autocast("cuda", torch.bfloat16).__enter__()
        torch.empty(1, device="cuda")

    trace_here(program)
    assert not torch.backends.cuda.matmul.allow_tf32
    assert not torch.backends.cudnn.benchmark
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.is_autocast_enabled("cuda")
    assert torch.get_autocast_dtype("cuda") == torch.float16
    assert torch.autocast_increment_nesting() == 1
    torch.autocast_decrement_nesting()
