"""What a traced program may do, how its mistakes come out, and that nothing of the user's changes."""

from __future__ import annotations

import inspect
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer as optim
from torch.utils.data import DataLoader, TensorDataset

import oomph
from oomph import Prediction, ProgramError, UserError, Workload

MiB = 1 << 20


def mean_square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def workload(model: Callable[[], Any] = lambda: nn.Linear(64, 64), **changes: Any) -> Workload:
    options = {
        "model": model,
        "batch": lambda device: torch.randn(32, 64, device=device),
        "loss": mean_square,
    }
    return Workload(**options | changes)


def predict_step(step: Callable[[nn.Module, torch.Tensor], Any], width: int = 64) -> Prediction:
    """Predict a program whose step is `step(model, x)`, on the GPU."""

    def train() -> Callable[[], None]:
        model = nn.Linear(width, width).cuda()
        x = torch.randn(32, width, device="cuda")
        return lambda: step(model, x)

    return oomph.predict(train)


def line_of(function: Callable[..., Any], text: str) -> int:
    lines, start = inspect.getsourcelines(function)
    return next(start + index for index, line in enumerate(lines) if text in line)


def notes_of(prediction: Prediction) -> str:
    return "\n".join(note.text for note in prediction.notes)


# -- programs may do what they do on a GPU -----------------------------------------------------------


def test_zeroed_gradients_stay_allocated_between_steps():
    def ends(set_to_none: bool) -> list[int]:
        def train() -> Callable[[], None]:
            model = nn.Linear(1024, 1024, bias=False).cuda()
            optimizer = torch.optim.SGD(model.parameters())
            x = torch.randn(8, 1024, device="cuda")

            def step() -> None:
                mean_square(model, x).backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)

            return step

        return [step.end for step in oomph.predict(train).steps]

    kept, dropped = ends(False), ends(True)
    assert [a - b for a, b in zip(kept, dropped, strict=True)] == [4 * MiB] * 3


def test_gradient_clipping_works():
    def step(model: nn.Module, x: torch.Tensor) -> None:
        mean_square(model, x).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert norm.device.type == "cuda"
        nn.utils.clip_grad_value_(model.parameters(), 1.0)
        model.zero_grad()

    assert predict_step(step).peak.allocated > 0


def test_torch_compile_is_traced_as_eager_and_noted():
    def build() -> nn.Module:
        return torch.compile(nn.Linear(64, 64))

    prediction = oomph.predict(workload(build))
    note = next(note for note in prediction.notes if "torch.compile" in note.text)
    assert note.site is not None
    assert note.site.line == line_of(build, "torch.compile")


def test_a_function_compiled_before_the_trace_is_traced_as_eager_and_noted():
    @torch.compile(backend="eager")  # as a decorator does it, when the program is imported
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return mean_square(model, batch)

    prediction = oomph.predict(workload(loss=loss))
    assert prediction.peak.allocated == oomph.predict(workload()).peak.allocated
    assert "torch.compile" in notes_of(prediction)


def test_a_loss_can_be_formatted_for_a_log_line():
    written: list[str] = []

    def step(model: nn.Module, x: torch.Tensor) -> None:
        loss = mean_square(model, x)
        written.append(f"loss {loss:.3f}")

    predict_step(step)
    assert written == ["loss 1.000"] * 3


def test_a_default_device_set_by_the_program_is_the_pretend_gpu():
    def train() -> Callable[[], None]:
        torch.set_default_device("cuda")
        model = nn.Linear(64, 64)
        assert model.weight.is_cuda
        assert torch.tensor([1.0]).is_cuda
        assert torch.zeros(2, device="cpu").device.type == "cpu"
        return lambda: mean_square(model, torch.randn(32, 64)).backward()

    try:
        assert oomph.predict(train).peak.allocated > 64 * 64 * 4
        assert torch.get_default_device().type == "cpu"
    finally:
        torch.set_default_device(None)


def test_reading_a_loss_works_and_a_condition_is_taken_as_false_and_noted():
    seen: list[float] = []

    def step(model: nn.Module, x: torch.Tensor) -> None:
        loss = mean_square(model, x)
        if loss.isnan():
            raise RuntimeError("the loss is not a number")
        loss.backward()
        seen.append(loss.item())
        model.zero_grad()

    prediction = predict_step(step)
    assert len(seen) == 3
    assert all(isinstance(value, float) for value in seen)
    note = next(note for note in prediction.notes if "condition" in note.text)
    assert note.site is not None
    assert note.site.line == line_of(step, "isnan")


def test_a_shape_that_depends_on_values_is_the_largest_possible_and_noted():
    def step(model: nn.Module, x: torch.Tensor) -> None:
        y = model(x)
        assert (y > 0).nonzero().shape == (32 * 64, 2)
        assert y[y > 0].shape == (32 * 64,)
        y.sum().backward()

    prediction = predict_step(step)
    sites = {note.site.line for note in prediction.notes if note.site and "depends on values" in note.text}
    assert sites == {line_of(step, "nonzero"), line_of(step, "y[y > 0]")}


def test_small_data_on_the_host_stays_real():
    data = TensorDataset(torch.arange(64.0).view(8, 8), torch.arange(8))
    epochs: list[list[int]] = []

    def train() -> Callable[[], None]:
        model = nn.Linear(8, 8).cuda()

        def step() -> None:
            order = list(range(8))
            random.shuffle(order)
            assert sorted(order) == list(range(8))
            labels: list[int] = []
            for x, y in DataLoader(data, batch_size=4, shuffle=True):
                assert not isinstance(x, FakeTensor)
                assert x[0, 0].item() == 8 * y[0].item()
                doubled = torch.from_numpy(numpy.asarray(x.numpy()) * 2)
                assert torch.equal(doubled, x * 2)
                labels += y.tolist()
                F.cross_entropy(model(x.to("cuda")), y.to("cuda")).backward()
            epochs.append(labels)

        return step

    oomph.predict(train)
    assert [sorted(labels) for labels in epochs] == [list(range(8))] * 3
    assert not isinstance(data.tensors[0], FakeTensor)


def test_a_seeded_program_sees_its_own_random_numbers():
    drawn: list[torch.Tensor] = []

    def step(model: nn.Module, x: torch.Tensor) -> None:
        torch.manual_seed(7)
        drawn.append(torch.rand(4))

    predict_step(step)
    assert all(torch.equal(each, drawn[0]) for each in drawn)
    assert torch.equal(drawn[0], torch.rand(4, generator=torch.Generator().manual_seed(7)))


def test_tensors_say_the_device_the_program_put_them_on():
    def step(model: nn.Module, x: torch.Tensor) -> None:
        assert x.device == torch.device("cuda", 0)
        assert x.is_cuda
        assert x.cpu().device.type == "cpu"
        assert model.weight.device.type == "cuda"
        assert torch.zeros(2).device.type == "cpu"
        assert torch.zeros_like(x).device == x.new_ones(3).device == x.device
        assert torch.cuda.is_available()

    assert predict_step(step).notes == ()


def test_a_function_that_returns_a_workload_is_predicted_as_that():
    direct = oomph.predict(workload())
    assert oomph.predict(lambda: workload()).peak.allocated == direct.peak.allocated


def test_a_function_that_returns_nothing_is_the_whole_run():
    def main() -> None:
        torch.empty(3 * MiB, dtype=torch.uint8, device="cuda")

    prediction = oomph.predict(main)
    assert prediction.peak.allocated == 3 * MiB
    assert prediction.steps == ()


# -- mistakes ----------------------------------------------------------------------------------------


class Stray(nn.Module):
    """Forgets to register its table, so that it stays on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.table = torch.zeros(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return x + self.table


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x[:, 1:])


def test_a_tensor_on_the_wrong_device_inside_the_model_is_named_with_its_line():
    with pytest.raises(ProgramError, match="Expected all tensors to be on the same device") as caught:
        oomph.predict(workload(Stray))
    assert caught.value.file == __file__
    assert caught.value.line == line_of(Stray.forward, "self.table")


def test_a_batch_on_the_wrong_device_is_the_users_mistake():
    with pytest.raises(UserError, match=r"batch.*cpu.*device") as caught:
        oomph.predict(workload(batch=lambda device: torch.randn(32, 64)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("batch", "loss"),
    [
        (lambda device: {"a": {"x": torch.randn(32, 64)}}, lambda model, b: mean_square(model, b["a"]["x"])),
        (lambda device: torch.randn(32, 64), lambda model, b: mean_square(model, b[:4])),
        (lambda device: [torch.randn(64, 32)], lambda model, b: mean_square(model, b[0].T)),
    ],
    ids=["nested", "sliced", "transposed"],
)
def test_a_batch_on_the_wrong_device_is_found_when_nested_or_seen_through_a_view(batch, loss):
    with pytest.raises(UserError, match="batch"):
        oomph.predict(workload(batch=batch, loss=loss))


def test_a_stray_tensor_in_a_batch_is_named_by_its_key():
    def batch(device: torch.device) -> dict[str, torch.Tensor]:
        return {"x": torch.randn(32, 64, device=device), "target": torch.randn(32, 64)}

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.mse_loss(model(batch["x"]), batch["target"])

    with pytest.raises(UserError, match="'target'"):
        oomph.predict(workload(batch=batch, loss=loss))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda model, batch: model(batch), r"shape \[32, 64\]"),
        (lambda model, batch: 1.5, "returned float"),
        (lambda model, batch: {"loss": model(batch).mean()}, "returned dict"),
        (lambda model, batch: None, "returned NoneType"),
        (lambda model, batch: model(batch).mean().detach(), "does not depend on any trainable parameter"),
    ],
    ids=["not scalar", "a number", "a dict", "nothing", "detached"],
)
def test_a_loss_that_cannot_be_differentiated_is_the_users_mistake(loss, message):
    with pytest.raises(UserError, match=message) as caught:
        oomph.predict(workload(loss=loss))
    assert "\n" not in str(caught.value)


def test_a_model_that_is_no_module_is_the_users_mistake():
    with pytest.raises(UserError, match="returned list"):
        oomph.predict(workload(lambda: [nn.Linear(2, 2)]))


def test_a_target_that_is_neither_workload_nor_function_is_the_users_mistake():
    with pytest.raises(UserError, match="int was given"):
        oomph.predict(42)  # type: ignore[arg-type]


def test_a_model_that_raises_gives_its_own_line_and_cause():
    with pytest.raises(ProgramError, match="RuntimeError") as caught:
        oomph.predict(workload(Broken))
    assert (caught.value.file, caught.value.line) == (__file__, line_of(Broken.forward, "return"))
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert caught.value.exit_status == 3


def test_a_model_that_cannot_be_built_gives_its_own_line_and_cause():
    def build() -> nn.Module:
        raise KeyError("no such size")

    with pytest.raises(ProgramError, match="no such size") as caught:
        oomph.predict(workload(build))
    assert caught.value.line == line_of(build, "raise")
    assert isinstance(caught.value.__cause__, KeyError)


# -- nothing of the user's is changed ----------------------------------------------------------------


def torch_state() -> dict[str, Any]:
    watched = [
        torch,
        torch.cuda,
        torch.autograd,
        torch.autograd.graph,
        torch.nn.functional,
        optim,
    ]
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


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert {name for name in before | after if before.get(name) != after.get(name)} == set()


@pytest.fixture(autouse=True, scope="module")
def _first_trace() -> None:
    oomph.predict(workload())  # torch imports some of its own modules only when they are first used


def test_a_prediction_changes_nothing_in_torch():
    before = torch_state()
    oomph.predict(workload(autocast="bfloat16", dtype="bfloat16"), gpu="rtx3090")
    assert_same(before, torch_state())


def test_what_the_program_sets_for_the_whole_process_ends_with_the_trace():
    def main() -> None:
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)

    before = torch_state()
    try:
        oomph.predict(main)
        after = torch_state()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
    assert_same(before, after)


def test_random_numbers_drawn_by_the_program_are_not_taken_from_the_caller():
    def states() -> tuple[Any, ...]:
        return random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]

    before = states()
    oomph.predict(lambda: (random.random(), numpy.random.rand(), torch.rand(1), None)[-1])
    assert states() == before


@pytest.mark.parametrize("where", ["model", "batch", "loss", "optimizer", "backward", "step"])
def test_a_failure_anywhere_puts_everything_back(where):
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("on purpose")

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            raise ValueError("on purpose")

    class FailingOptimizer(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise ValueError("on purpose")

    parts = {
        "backward": {"loss": lambda model, batch: Fails.apply(mean_square(model, batch))},
        "step": {"optimizer": lambda params: FailingOptimizer(params)},
    }
    failing = workload(autocast="bfloat16", **parts.get(where, {where: fail}))
    FailingOptimizer([nn.Parameter(torch.zeros(1))])  # torch wraps a class's step when it is first used
    before = torch_state()
    with pytest.raises(ProgramError, match="on purpose") as caught:
        oomph.predict(failing)
    assert isinstance(caught.value.__cause__, ValueError)
    del caught
    assert_same(before, torch_state())


def test_a_keyboard_interrupt_puts_everything_back():
    def interrupt(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    before = torch_state()
    with pytest.raises(KeyboardInterrupt):
        oomph.predict(workload(loss=interrupt))
    assert_same(before, torch_state())


@pytest.mark.parametrize("moved", [False, True], ids=["kept on the host", "moved by the program"])
def test_a_model_built_before_the_trace_is_not_changed(moved):
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    model.eval()
    before = {name: (tensor, tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}

    def train() -> Callable[[], None]:
        model.to("cuda")
        x = torch.randn(32, 64, device="cuda")
        return lambda: mean_square(model, x).backward()

    prediction = oomph.predict(train if moved else workload(lambda: model))
    assert prediction.peak.allocated > 64 * 64 * 4
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


def test_a_model_built_before_costs_the_same_as_one_built_inside():
    model = nn.Linear(64, 64)
    outside, inside = oomph.predict(workload(lambda: model)), oomph.predict(workload())
    assert outside.peak.allocated == inside.peak.allocated
    assert outside.steps == inside.steps


def test_predict_works_in_a_thread():
    found: list[Prediction] = []
    thread = threading.Thread(target=lambda: found.append(oomph.predict(workload())))
    thread.start()
    thread.join()
    assert found[0].peak == oomph.predict(workload()).peak


def test_predictions_asked_for_by_several_threads_take_turns():
    found: list[Any] = []

    def ask() -> None:
        try:
            found.append(oomph.predict(workload()).peak.allocated)
        except Exception as error:
            found.append(error)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [oomph.predict(workload()).peak.allocated] * 3


def test_a_prediction_inside_a_prediction_is_refused_or_right():
    inner: list[Any] = []

    def train() -> None:
        try:
            inner.append(oomph.predict(workload()).peak.allocated)
        except oomph.OomphError as error:
            inner.append(str(error))

    before = torch_state()
    oomph.predict(train)
    assert_same(before, torch_state())
    (answer,) = inner
    assert answer == oomph.predict(workload()).peak.allocated or "predict" in answer


# -- nothing of the model's size is allocated --------------------------------------------------------

LARGE_MODEL = """
import resource, time
import torch, torch.nn.functional as F
from torch import nn
import oomph

class Layer(nn.Module):
    def __init__(self, width=4096, inner=14336, kv=1024):
        super().__init__()
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = nn.Linear(width, kv, bias=False), nn.Linear(width, kv, bias=False)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)

    def forward(self, x):
        h = self.norm1(x)
        q, k, v = (p(h).unflatten(-1, (-1, 128)).transpose(1, 2) for p in (self.q, self.k, self.v))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(h.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))

class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(128256, 4096)
        self.layers = nn.ModuleList(Layer() for _ in range(32))
        self.norm, self.head = nn.RMSNorm(4096), nn.Linear(4096, 128256, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())

prediction = oomph.predict(oomph.Workload(
    model=Llama,
    batch=lambda device: torch.randint(0, 128256, (2, 4096), device=device),
    loss=lambda model, tokens: model(tokens),
    dtype="bfloat16",
), gpu="h200")
parameters = sum(each.bytes for each in prediction.allocations if each.kind == "parameter") // 2
print(parameters, prediction.peak.allocated, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def test_an_eight_billion_parameter_model_is_predicted_in_little_host_memory():
    done = subprocess.run([sys.executable, "-c", LARGE_MODEL], capture_output=True, text=True, timeout=40)
    assert done.returncode == 0, done.stderr
    parameters, peak, resident = map(int, done.stdout.split())
    assert parameters == pytest.approx(8.03e9, rel=0.01)
    assert peak > 4 * 2 * parameters  # weights, gradients and two states, in bfloat16
    assert resident < 1.5 * 2**30
