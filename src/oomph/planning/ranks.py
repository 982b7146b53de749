"""How many cards a model needs: the step as one of 2, 4, 8, ... ranks of FSDP2, until it fits."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from oomph.errors import UserError
from oomph.gpus import GPU
from oomph.parallel import Parallel
from oomph.prediction import predict
from oomph.records import Peak, Progress
from oomph.workload import Workload

_MOST_RANKS = 1024
_NO_LESS = 0.99  # x the peak of half as many ranks: more of them change nothing


class RankTrial(NamedTuple):
    """One rank of so many. The batch is that of one rank."""

    ranks: int
    peak: Peak
    fits: bool
    sent: int  # bytes to other ranks in a step
    step_seconds: float | None


def ranks_needed(
    workload: Workload, gpu: str | GPU, max: str | int | None, progress: Progress
) -> list[RankTrial]:
    """What was predicted; the last one fits, unless no number of ranks is enough.

    From some number on, what is left are activations and the gathered blocks, which FSDP2 does not divide.
    """
    if workload.parallel is not None:
        raise UserError("the step is already spread over ranks; give the step of one process")
    tried: list[RankTrial] = []
    ranks = 1
    while ranks <= _MOST_RANKS:
        progress(f"predicting one of {ranks} ranks", None)
        spread = workload if ranks == 1 else replace(workload, parallel=Parallel(ranks))
        found = predict(spread, gpu=gpu, max=max, search=False)
        fits = found.fits is True
        tried.append(RankTrial(ranks, found.peak, fits, found.work.sent, found.step_seconds))
        settled = len(tried) > 2 and found.peak.device >= _NO_LESS * tried[-2].peak.device
        if fits or settled:
            break
        ranks *= 2
    return tried
