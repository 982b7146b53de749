"""Report 002's check of its chunked loss, with what it left out: gradients, and what is kept for backward.

    python -m oomph.cli.chunked_loss_check

Legend: B batch, T tokens, D hidden size, V vocabulary.
"""

import bisect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from oomph.prediction import predict
from oomph.records import Prediction
from oomph.systems.claims import gib, whole
from oomph.systems.longctx import PRESETS, LongContext
from oomph.systems.longctx.claims import logits_bytes
from oomph.systems.longctx.naive import REPORT

LossForm = Callable[[LongContext, Tensor, Tensor], Tensor]
CHUNK = 4096
_LIMIT = 10 * 2**30  # the report chunks above "10 GB" of logits
_TOLERANCE = 1e-10  # of float64
# Large enough for the blocks of ours to be used (small logits are made in one go), with an odd rest.
_SMALL = replace(PRESETS["tiny"], hidden_size=16, num_layers=1, vocab_size=8192)
_SMALL_TOKENS, _SMALL_CHUNK = 389, 100


def should_chunk(seq_len: int, vocab_size: int, itemsize: int = 2) -> bool:
    """The report's rule. Ours has none: its loss holds no logits at any length."""
    return seq_len * vocab_size * itemsize > _LIMIT


def standard_loss(model: LongContext, hidden_BTD: Tensor, labels_BT: Tensor) -> Tensor:
    """The report's old code: all logits, then their cross-entropy in fp32."""
    logits_BTV = F.linear(hidden_BTD, model.head_weight)
    return _cross_entropy(logits_BTV[..., :-1, :].contiguous(), labels_BT[..., 1:].contiguous(), "mean")


def report_chunked_loss(
    model: LongContext, hidden_BTD: Tensor, labels_BT: Tensor, chunk_size: int = CHUNK, again: bool = False
) -> Tensor:
    """The report's new code: chunk by chunk, summed. `again`: each chunk is computed again in backward."""
    hidden_BTD, labels_BT = hidden_BTD[:, :-1], labels_BT[:, 1:]

    def of_chunk(hidden: Tensor, labels: Tensor) -> Tensor:
        return _cross_entropy(F.linear(hidden, model.head_weight), labels, "sum")

    total = hidden_BTD.new_zeros((), dtype=_wide(hidden_BTD))
    for start in range(0, hidden_BTD.shape[1], chunk_size):
        chunk = hidden_BTD[:, start : start + chunk_size], labels_BT[:, start : start + chunk_size]
        total = total + (checkpoint(of_chunk, *chunk, use_reentrant=False) if again else of_chunk(*chunk))
    return total / (labels_BT != -100).sum()


def _cross_entropy(logits: Tensor, labels: Tensor, reduction: str) -> Tensor:
    wide = logits.flatten(0, -2).to(_wide(logits))
    return F.cross_entropy(wide, labels.flatten(), ignore_index=-100, reduction=reduction)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def forms(chunk_size: int = CHUNK) -> Mapping[str, LossForm]:
    return {
        "standard": standard_loss,
        "the report's chunks": partial(report_chunked_loss, chunk_size=chunk_size),
        "the same, recomputed": partial(report_chunked_loss, chunk_size=chunk_size, again=True),
        "ours": lambda model, hidden, labels: model._compute_loss_chunked(hidden, labels, chunk_size),
    }


def largest_difference(form: LossForm) -> float:
    """Of the loss and its gradients from those of the standard one: float64, on this machine."""
    torch.manual_seed(0)
    model = _SMALL.build().double()
    hidden = torch.randn(2, _SMALL_TOKENS, _SMALL.hidden_size, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, _SMALL.vocab_size, (2, _SMALL_TOKENS))
    labels[:, 50:70] = -100

    def results(one: LossForm) -> list[Tensor]:
        loss = one(model, hidden, labels)
        return [loss.detach(), *torch.autograd.grad(loss, (hidden, model.head_weight))]

    pairs = zip(results(form), results(standard_loss), strict=True)
    return max(float((ours - right).abs().max() / right.abs().max()) for ours, right in pairs)


@dataclass(frozen=True)
class Memory:
    """Of the loss alone, from hidden states to their gradients; the inputs are not counted."""

    kept: int  # when backward begins
    peak: int


def predicted_memory(form: LossForm, seq_len: int = whole(REPORT["tokens"])) -> Memory:
    """At the report's 4B, one row, in bf16."""
    config = replace(PRESETS[str(REPORT["model_size"])], num_layers=1)

    def prepare() -> Callable[[], None]:
        model = config.build().to("cuda", torch.bfloat16)
        hidden = torch.randn(1, seq_len, config.hidden_size, device="cuda", dtype=torch.bfloat16)
        labels = torch.zeros(1, seq_len, device="cuda", dtype=torch.long)
        return lambda: form(model, hidden.requires_grad_(), labels).backward()

    prediction = predict(prepare)
    inputs = _allocated_at(prediction, "step 1")
    return Memory(
        kept=_allocated_at(prediction, "backward") - inputs, peak=prediction.steps[0].allocated - inputs
    )


def _allocated_at(prediction: Prediction, mark: str) -> int:
    """When the first mark of that name is met."""
    index = next(i for i, event in enumerate(prediction.events) if event.label == mark)
    after = bisect.bisect_right(prediction.timeline, index, key=lambda moment: moment.event)
    return prediction.timeline[after - 1].allocated if after else 0


def main() -> int:
    vocabulary = PRESETS[str(REPORT["model_size"])].vocab_size
    for number, seq_len in enumerate((4096, 40_000), 1):
        chunks = should_chunk(seq_len, vocabulary)
        print(f"Test {number}: seq_len={seq_len}, logits={gib(logits_bytes(seq_len))}, should_chunk={chunks}")
        print("  Chunked loss used" if chunks else "  Standard loss used")
    print(f"Test 3: loss and gradients in float64, seq_len={_SMALL_TOKENS}, chunk_size={_SMALL_CHUNK}")
    agree = True
    for name, form in list(forms(_SMALL_CHUNK).items())[1:]:
        error = largest_difference(form)
        agree = agree and error <= _TOLERANCE
        print(f"  {name}: within {error:.1e} of the standard loss{'' if error <= _TOLERANCE else ', WRONG'}")
    print(f"Test 4: memory of the loss at seq_len={REPORT['tokens']}, predicted, its inputs not counted")
    print(f"  {'':22}{'kept for backward':>18}{'peak':>14}")
    for name, form in forms().items():
        memory = predicted_memory(form)
        print(f"  {name:22}{gib(memory.kept):>18}{gib(memory.peak):>14}")
    print("  Chunks by themselves lower the peak; what waits for backward is the same log-softmax.")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
