"""The first line of every report: does it fit, how much does it need, where is the peak."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from oomph.errors import UserError
from oomph.records import Growth, Peak, Prediction, Stage
from oomph.report.paths import place
from oomph.units import format_bytes, parse_bytes

Outcome = Literal[
    "fits", "fits for now", "fits, but only by returning cached memory", "does not fit", "needs"
]

# What the program was doing at the peak, as it reads after "peak in".
_DOING: dict[Stage, str] = {
    "parameters": "loading the model",
    "batch": "making the batch",
    "forward activations": "forward",
    "loss": "the loss",
    "backward": "backward",
    "gradients": "backward",
    "optimizer state": "the optimizer step",
    "optimizer step": "the optimizer step",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """`outcome` and `growth` are worth colouring, with `rest` between them they are the line; `refusal` is a
    second line. All but the first may be empty."""

    outcome: Outcome
    rest: str
    refusal: str = ""
    growth: str = ""

    @property
    def line(self) -> str:
        return f"{self.outcome}{self.rest}{self.growth}"


def verdict(prediction: Prediction) -> Verdict:
    """What is needed against its bound: the card's memory, or what `--max` lets the allocator have."""
    found = _of_these_steps(prediction)
    if prediction.growth is None or prediction.fits is False:
        return found
    outcome: Outcome = "fits for now" if found.outcome == "fits" else found.outcome
    return replace(found, outcome=outcome, growth=_growth(prediction, prediction.growth))


def _of_these_steps(prediction: Prediction) -> Verdict:
    peak = _where(prediction.peak)
    if prediction.fits is None:
        return Verdict("needs", f" {format_bytes(prediction.peak.device)}{peak}")
    needed, bound, bound_name = _figures(prediction)
    if prediction.fits:
        return _fits(needed, bound, bound_name, peak)
    refusal = _refusal(prediction)
    if needed > bound:
        need_text, bound_text = tell_apart(needed, bound)
        rest = f": needs {need_text} of {bound_name.format(bound_text)}{peak}"
    else:
        # The total is within the bound, but no free stretch is long enough: only the refusal explains it.
        need_text, bound_text = tell_apart(needed, bound)
        rest = f": {need_text} of {bound_name.format(bound_text)} would do, but not in the pieces left{peak}"
    return Verdict("does not fit", rest, refusal)


def _fits(needed: int, bound: int, bound_name: str, peak: str) -> Verdict:
    need_text, bound_text = tell_apart(needed, bound)
    if needed > bound:
        rest = f": would take {need_text} of {bound_name.format(bound_text)} otherwise{peak}"
        return Verdict("fits, but only by returning cached memory", rest)
    spare = f"; {format_bytes(bound - needed)} to spare"
    return Verdict("fits", f": needs {need_text} of {bound_name.format(bound_text)}{spare}{peak}")


def _growth(prediction: Prediction, growth: Growth) -> str:
    """`; grows by 144 MiB with every step, out of memory after about 150`"""
    text = f"; grows by {format_bytes(growth.bytes)} with every step"
    if prediction.limit is None or prediction.limit < prediction.peak.reserved:
        return text
    more = (prediction.limit - prediction.peak.reserved) // growth.bytes
    return f"{text}, out of memory after about {len(prediction.steps) + more:,}"


def tell_apart(one: int, other: int) -> tuple[str, str]:
    """Both sizes for people, with as many decimals as it takes to see which is larger."""
    texts = format_bytes(one), format_bytes(other)
    if one == other or texts[0] != texts[1]:
        return texts
    for decimals in (2, 3, 4):
        texts = f"{one / 2**30:.{decimals}f} GiB", f"{other / 2**30:.{decimals}f} GiB"
        if texts[0] != texts[1]:
            return texts
    return f"{one:,} bytes", f"{other:,} bytes"


def _figures(prediction: Prediction) -> tuple[int, int, str]:
    """What is needed, the bound, and the bound's name with a place for its size."""
    peak, capacity, limit = prediction.peak, prediction.capacity, prediction.limit
    context = peak.device - peak.reserved
    if capacity is not None and limit in (None, capacity - context):
        if _is_size(prediction.gpu):
            return peak.device, capacity, "{}"
        return peak.device, capacity, f"the {prediction.gpu_title}'s {{}}"
    # `--max` was given: it is what `fits` was decided on, whatever the card.
    assert limit is not None
    return peak.reserved, limit, "the {} allowed"


def _is_size(gpu: str | None) -> bool:
    """Whether the card was given as a size, so that it has no name to speak of."""
    try:
        return gpu is None or parse_bytes(gpu) >= 0
    except UserError:
        return False


def _where(peak: Peak) -> str:
    at = f", at {place(peak.site)}" if peak.site else ""
    doing = _DOING.get(peak.stage) if peak.stage else None
    if peak.step == 0:
        when = f"{doing}, before the first step" if doing else ""
        return f"; peak in {when}{at}" if when else (f"; peak{at}" if at else "")
    return f"; peak in {doing} of step {peak.step}{at}" if doing else f"; peak in step {peak.step}{at}"


def _refusal(prediction: Prediction) -> str:
    refused = prediction.refused
    if refused is None:
        return ""
    at = f" at {place(refused.site)}" if refused.site else f" in {refused.op}"
    step = f", step {refused.step}" if refused.step else ""
    return f"the allocator would fail{at} asking for {format_bytes(refused.bytes)}{step}"
