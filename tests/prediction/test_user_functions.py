"""Functions as targets: what they may return, loops of their own, and the notes on what they do."""

import copy
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace

import pytest
import torch
from small_programs import line_of, notes_of, workload
from torch import nn

import oomph
from oomph import UserError

pytestmark = pytest.mark.usefixtures("in_process")

WIDTH = 256


def batch():
    return torch.randn(4096, WIDTH, device="cuda")


class Training:
    """A model and its optimizer."""

    def __init__(self):
        self.model = nn.Linear(WIDTH, WIDTH).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.kept = []

    def step(self):
        out = self.model(batch())
        out.square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def setup():
    return Training().step


def test_a_training_loop_is_traced_whole_and_the_progress_text_names_the_faster_way():
    def training():
        own = Training()
        for _ in range(5):
            own.step()

    texts = []
    prediction = oomph.predict(training, gpu="h200", progress=lambda text, share: texts.append(text))
    assert prediction.peak.allocated == oomph.predict(setup, gpu="h200").peak.allocated
    said = [text for text in texts if "is traced for three" in text]
    assert [text.split(";")[0] for text in said] == [
        "running the program, optimizer step 4",
        "running the program, optimizer step 5",
    ]


def test_one_step_alone_is_said_to_be_too_few_for_the_optimizers_state():
    prediction = oomph.predict(lambda: Training().step())
    assert "only one optimizer step of the function was traced" in notes_of(prediction)
    assert prediction.peak.allocated < oomph.predict(setup).peak.allocated


@pytest.mark.parametrize("how", ["closure", "keyword"])
def test_a_closure_of_the_optimizer_runs_forward_and_backward(how):
    def setup():
        own = Training()

        def closure():
            own.optimizer.zero_grad()
            loss = own.model(batch()).square().mean()
            loss.backward()
            return loss

        def step():
            own.optimizer.step(closure=closure) if how == "keyword" else own.optimizer.step(closure)

        return step

    made = [one for one in oomph.predict(setup).allocations if one.step == 2]
    stages = {one.during for one in made if one.kind != "workspace"}
    assert {"forward activations", "backward", "optimizer step"} <= stages
    by_model = {one.during for one in made if one.module and one.kind == "activation"}
    assert by_model <= {"forward activations", "loss"}


def test_data_are_the_batch_also_where_they_stay_or_come_between_update_and_evaluation():
    def setup():
        own, data = Training(), torch.randn(1024, 64, device="cuda")

        def step():
            own.step()
            with torch.no_grad():
                data.mean() + torch.randn(2048, 64).cuda().mean()

        return step

    made = oomph.predict(setup).allocations
    assert {one.stage for one in made if one.shape in ((1024, 64), (2048, 64))} == {"batch"}


def test_plain_tensors_that_an_optimizer_updates_are_parameters():
    def setup():
        weight = torch.randn(64, 64, device="cuda", requires_grad=True)
        optimizer = torch.optim.SGD([weight])

        def step():
            optimizer.zero_grad()
            (torch.ones(8, 64, device="cuda") @ weight).sum().backward()
            optimizer.step()

        return step

    made = oomph.predict(setup).allocations
    assert {one.stage for one in made if one.shape == (64, 64)} == {"parameters", "gradients"}


def _averaged_model(model):
    average = torch.optim.swa_utils.AveragedModel(model)
    return lambda: average.update_parameters(model)


def _copied_model(model):
    average = copy.deepcopy(model)

    @torch.no_grad()
    def update():
        for mean, now in zip(average.parameters(), model.parameters(), strict=True):
            mean.copy_(0.9 * mean + 0.1 * now)

    return update


def _foreach(model):
    average = [parameter.detach().clone() for parameter in model.parameters()]

    @torch.no_grad()
    def update():
        torch._foreach_lerp_(average, list(model.parameters()), 0.1)

    return update


@pytest.mark.parametrize("average", [_averaged_model, _copied_model, _foreach])
def test_weight_averages_are_a_stage_of_their_own(average):
    def setup():
        own = Training()
        update = average(own.model)

        def step():
            own.step()
            update()

        return step

    found = oomph.predict(setup)
    stages = dict(found.by_stage())
    assert stages["weight averages"] >= stages["parameters"]
    updates = [one for one in found.allocations if one.site and one.site.function.endswith("update")]
    assert {one.during for one in updates} <= {"optimizer step"}


def test_the_shapes_of_the_batch_are_those_that_were_seen():
    def setup():
        own, rows = Training(), iter((8, 16, 16))

        def step():
            own.model(torch.randn(next(rows), WIDTH).cuda()).sum().backward()

        return step

    assert [each.shape for each in oomph.predict(setup).batch] == [(8, WIDTH), (16, WIDTH)]
    given = oomph.predict(
        workload(
            batch=lambda device: {"x": {"ids": torch.ones(4, 4, device=device)}},
            loss=lambda model, batch: model(batch["x"]["ids"]).sum(),
            model=lambda: nn.Linear(4, 4),
        )
    )
    assert [(each.name, each.shape, each.dtype) for each in given.batch] == [("x.ids", (4, 4), "float32")]


def test_a_stream_of_the_programs_own_has_its_own_memory():
    """The blocks that one stream has freed are not reused on another, and backward runs where forward ran."""

    def setup(several):
        def build():
            own, side = Training(), torch.cuda.Stream()

            def step():
                own.step()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side if several else torch.cuda.current_stream()):
                    loss = own.model(batch()).square().mean()
                torch.cuda.current_stream().wait_stream(side)
                loss.backward()
                own.optimizer.zero_grad()

            return step

        return build

    one, two = oomph.predict(setup(False)), oomph.predict(setup(True))
    assert {each.stream for each in one.allocations} == {0}
    on_side = [each for each in two.allocations if each.stream == 1]
    assert {each.during for each in on_side} >= {"forward activations", "backward"}
    workspaces = [each for each in two.allocations if each.op == "cublas workspace"]
    assert sorted(each.stream for each in workspaces) == [0, 0, 1, 1]  # for each thread and stream
    sizes = sum(each.bytes for each in workspaces[2:])
    assert two.peak.reserved - sizes > one.peak.reserved
    assert two.margin > one.margin


@pytest.mark.parametrize("synchronize", [False, True])
def test_memory_that_two_streams_use_is_reused_after_a_synchronization(synchronize):
    def setup():
        side = torch.cuda.Stream()

        def step():
            for _ in range(6):
                made = batch()
                made.record_stream(side)
                del made
                if synchronize:
                    torch.cuda.synchronize()
            torch.ones(1, device="cuda", requires_grad=True).sum().backward()

        return step

    found = oomph.predict(setup)
    tensor = 4096 * WIDTH * 4
    assert found.peak.allocated < 2 * tensor  # freed as far as torch's counter goes
    blocks = [block for block in found.allocations if block.bytes == tensor]
    assert len(blocks) == 18
    assert found.peak.reserved == (22 if synchronize else 42) * 2**20


def test_numbers_read_from_the_gpu_are_noted_once_with_the_first_line():
    def setup():
        own = Training()

        def step():
            own.model(batch()).sum().item()  # first
            own.model(batch()).mean().item()
            own.step()

        return step

    (note,) = oomph.predict(setup, gpu="h200").notes
    assert "taken as 1.0" in note.text
    assert note.site.line == line_of(setup, "# first")


def on_gpu():
    return nn.Linear(64, 64).cuda()


@dataclass
class Metrics:
    found: object


def train_once(model):
    loss = model(torch.randn(8, 64, device="cuda")).sum()
    loss.backward()
    torch.optim.SGD(model.parameters()).step()
    return loss


@pytest.mark.parametrize(
    ("function", "returned"),
    [
        (lambda: nn.Linear, "returned the class Linear"),
        (lambda: {"w": workload()}, "returned a dict"),
        (lambda: (on_gpu(), 1), r"returned a tuple of a model \(Linear\), an int"),
        (lambda: Metrics(on_gpu()), "returned a Metrics"),
        (lambda: torch.optim.SGD(on_gpu().parameters()), r"returned an optimizer \(SGD\)"),
    ],
)
def test_what_is_no_step_is_named_in_one_line_with_what_is_valid(function, returned):
    with pytest.raises(UserError, match=returned) as caught:
        oomph.predict(function, gpu="24GiB")
    assert "return a function of no arguments that does one training step, or a Workload" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_status == 2


@pytest.mark.parametrize(
    "outcome",
    [
        lambda model, loss: None,
        lambda model, loss: loss,
        lambda model, loss: {"loss": loss, "steps": 1},
        lambda model, loss: model,  # trained, and handed back
        lambda model, loss: (model, train_once),
    ],
    ids=["nothing", "loss", "metrics", "model", "tuple"],
)
def test_a_function_that_trains_by_itself_may_return_what_it_likes(outcome):
    def train():
        model = on_gpu()
        return outcome(model, train_once(model))

    prediction = oomph.predict(train)
    assert prediction.peak.allocated > 3 * 64 * 64 * 4


@pytest.mark.parametrize("kind", [Metrics, frozenset, MappingProxyType])
def test_a_function_that_evaluates_may_return_any_collection_of_numbers(kind):
    def evaluate():
        return kind({"loss": on_gpu()(torch.randn(8, 64, device="cuda")).sum().item()})

    assert "no backward pass ran" in oomph.predict(evaluate).assumptions[0].text


def test_a_function_without_a_backward_pass_is_predicted_and_said_to_be_no_training_step():
    prediction = oomph.predict(lambda: on_gpu()(torch.randn(8, 64, device="cuda")))
    assert "no backward pass ran" in prediction.assumptions[0].text
    assert prediction.steps == ()
    assert dict(prediction.by_stage())["parameters"] >= 64 * 64 * 4  # it is gone by now


def test_memory_that_grows_with_every_step_is_pointed_out_with_its_line():
    def train():
        model = nn.Linear(512, 512).cuda()
        seen = []

        def step():
            out = model(torch.randn(4096, 512, device="cuda"))
            seen.append(out.softmax(-1))  # kept
            out.sum().backward()
            model.zero_grad()

        return step

    prediction = oomph.predict(train, gpu="rtx3090")
    (note,) = (note for note in prediction.notes if "grows" in note.text)
    assert "8.0 MiB with every step" in note.text
    assert note.site.line == line_of(train, "# kept")


def test_a_steady_step_on_a_known_card_needs_no_remark():
    assert oomph.predict(workload(), gpu="rtx3090").notes == ()


def test_a_card_of_unknown_generation_is_said_to_be_modelled_as_another():
    for gpu in (None, "24GiB"):
        assert any("H200" in note.text for note in oomph.predict(workload(), gpu=gpu).notes)


def test_convolution_workspaces_are_said_to_be_estimates():
    image = workload(
        lambda: nn.Conv2d(64, 64, 3, padding=1),
        batch=lambda device: torch.randn(8, 64, 64, 64, device=device),
    )
    assert any("cuDNN" in note.text for note in oomph.predict(image, gpu="a100-80gb").notes)


def test_sizes_of_a_config_are_known_of_a_model_that_is_gone():
    def program():
        model = nn.Linear(8, 8).cuda()
        model.config = SimpleNamespace(hidden_size=8, n_head=2)
        model(torch.randn(4, 8, device="cuda")).sum().backward()

    assert oomph.predict(program).dimensions == (("d", 8), ("H", 2))


def test_what_is_decorated_and_never_called_is_not_compiled():
    def train():
        torch.compile(lambda x: x.sin())  # as libraries do when they are imported
        torch.nn.Linear(8, 8, device="cuda")(torch.ones(8, 8, device="cuda")).sum().backward()

    assert oomph.predict(train).compile_seconds == 0
