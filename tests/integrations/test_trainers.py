"""Trainers of transformers and Lightning, predicted as they are."""

from types import SimpleNamespace

import pytest
import torch

import oomph
from oomph.prediction.compat.registry import next_evaluation


@pytest.fixture
def trainer(tmp_path):
    pytest.importorskip("accelerate", reason="the Trainer of transformers needs accelerate")
    import transformers

    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=2, n_embd=32, n_head=2, vocab_size=200, bos_token_id=0, eos_token_id=0
        )
    )
    given = transformers.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=4, report_to=[], max_steps=100, disable_tqdm=True
    )
    rows = [{"input_ids": torch.zeros(64).long(), "labels": torch.zeros(64).long()} for _ in range(16)]
    return transformers.Trainer(model, given, train_dataset=rows)


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_is_predicted_and_left_alone(trainer):
    found = oomph.predict(trainer, gpu="rtx3090")
    parameters = sum(one.nbytes for one in trainer.model.parameters())
    sizes = dict(found.by_stage())
    assert sizes["parameters"] >= parameters
    assert sizes["optimizer state"] >= 2 * parameters  # of AdamW: three steps were made
    assert (found.batch[0].shape, found.fits) == ((4, 64), True)
    assert trainer.optimizer is None
    assert trainer.args.max_steps == 100
    assert {one.device.type for one in trainer.model.parameters()} == {"cpu"}


def test_a_trainer_of_lightning_says_what_to_give():
    lightning = type("Trainer", (), {"__module__": "lightning.pytorch.trainer.trainer"})
    with pytest.raises(oomph.UserError, match="calls fit"):
        oomph.predict(lightning())


@pytest.mark.parametrize(
    ("strategy", "done", "step"), [("epoch", 2, 8), ("steps", 2, 5), ("steps", 5, None), ("no", 2, None)]
)
def test_the_step_of_the_first_evaluation(strategy, done, step):
    one = type("Trainer", (), {"__module__": "transformers.trainer", "run": lambda self: next_evaluation()})()
    one.args = SimpleNamespace(eval_strategy=strategy, eval_steps=5, gradient_accumulation_steps=2)
    one.state = SimpleNamespace(global_step=done, eval_steps=None, max_steps=30)
    one.callback_handler = SimpleNamespace(train_dataloader=range(15))
    assert one.run() == step
    assert next_evaluation() is None
