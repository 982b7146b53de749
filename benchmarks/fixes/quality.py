"""Is the plan of `oomph fit` as good as the best of all sets of the same fixes? On small models.

python -m benchmarks.fixes.quality [names...] [--jobs N] [--out F]     # results/fit_quality.csv
python -m benchmarks.fixes.quality --peers    # results/fit_peers.csv: settings of other libraries, 1B and 4B

A case is a small model and a limit. Every combination of a few fixes, with several numbers of checkpointed
blocks, is predicted; the best is the fastest that fits. `fit` may use all exact fixes. It is compared with
"checkpoint everything", too, which it must not be worse than in time and memory at once.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks import RESULTS
from benchmarks.accuracy.speed import LLAMA_1B, transformer
from benchmarks.rows import stored, write
from oomph.records import FixUse

THRESHOLD_PERCENT = 2.0


_GPT2 = {"n_embd": 384, "n_layer": 6, "n_head": 6, "vocab_size": 20000}
_LLAMA = {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1536, "vocab_size": 32000}
_LLAMA |= {"num_attention_heads": 8, "num_key_value_heads": 4}
_QWEN3 = {**_LLAMA, "num_hidden_layers": 6, "head_dim": 64}
MODELS = {
    "gpt2": partial(transformer, "GPT2", 8, 1024, dtype=None, **_GPT2),
    "gpt2-bf16": partial(transformer, "GPT2", 16, 1024, **_GPT2),
    "llama": partial(transformer, "Llama", 8, 2048, **_LLAMA),
    "llama-long": partial(transformer, "Llama", 1, 16384, **_LLAMA),
    "qwen3": partial(transformer, "Qwen3", 8, 1024, dtype=None, **_QWEN3),
}
_QWEN3_4B = {"hidden_size": 2560, "num_hidden_layers": 36, "intermediate_size": 9728, "vocab_size": 151936}
_QWEN3_4B |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
PEER_MODELS = {
    "llama-1b": partial(transformer, "Llama", 2, 8192, **LLAMA_1B),
    "qwen3-4b": partial(transformer, "Qwen3", 1, 8192, tie_word_embeddings=True, **_QWEN3_4B),
}
_FUSED = FixUse("fused_optimizer")
PEERS = {  # their own settings, as fixes
    "transformers: gradient_checkpointing": (FixUse("activation_checkpointing"),),
    "torchtitan: full activation checkpointing": (FixUse("activation_checkpointing"), _FUSED),
    "torchtitan: selective activation checkpointing": (
        FixUse("activation_checkpointing", {"keep": "matmuls"}),
        _FUSED,
    ),
}
CASES = [(model, share) for model in MODELS for share in (0.75, 0.5, 0.35)]
_COUNTS = (0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Row:
    """Times are slowdowns by the roofline; sizes in bytes."""

    model: str
    limit: int
    sets: int  # that were predicted
    best: str
    best_slowdown: float
    fit: str
    fit_slowdown: float
    percent_slower: float  # fit than the best; negative: it knows a fix that the comparison does not
    fit_reserved: int
    everything_slowdown: float  # with activation checkpointing of every block
    everything_reserved: int
    worse_than_everything: bool  # in time and memory at once
    fit_seconds: float
    predictions: int


def _sets(workload: Any) -> Iterator[tuple[FixUse, ...]]:
    from oomph.nn.blocks import block_names
    from oomph.prediction import fake_model

    names = block_names(fake_model(workload))
    checkpointing: list[FixUse | None] = [None]
    for keep, share in itertools.product(("nothing", "attention", "matmuls"), _COUNTS):
        blocks = names[: round(share * len(names))]
        checkpointing.append(FixUse("activation_checkpointing", {"keep": keep, "blocks": blocks}))
    others = [FixUse("fused_linear_cross_entropy"), FixUse("micro_batches", {"parts": 2})]
    others += [FixUse("tiled_mlp")] if _has_mlp(workload) else []
    for chosen in itertools.product(checkpointing, *((None, other) for other in others)):
        # What is faster and needs less is in every set.
        yield tuple(use for use in (*chosen, FixUse("fused_optimizer")) if use is not None)


def _has_mlp(workload: Any) -> bool:
    from oomph.fixes.tiled_mlp import find_mlps
    from oomph.prediction import fake_model

    return any(mlp.obstacle() is None for mlp in find_mlps(fake_model(workload)))


def predicted(model: str) -> dict[tuple[FixUse, ...], tuple[float, int, int]]:
    """{fixes: (seconds, reserved, margin)} of every set; () is the step as it is."""
    from oomph import gpus
    from oomph.planning.programs import WorkloadProgram
    from oomph.prediction.isolation import run_isolated
    from oomph.records import Prediction

    workload, card = MODELS[model](), gpus.with_rates(gpus.find("h200"))
    everything = (FixUse("activation_checkpointing"),)
    sets = [(), everything, *_sets(workload)]

    def predict_all(progress: Any) -> Any:
        program, found = WorkloadProgram(workload, card, card.memory), {}
        program.predict()
        for number, one in program.predict_with(sets):
            if isinstance(one, Prediction):
                found[number] = one.step_seconds or 0.0, one.peak.reserved, one.margin
        return found

    found = run_isolated(predict_all, lambda text, fraction: None)
    return {sets[number]: found[number] for number in sorted(found)}


def judged(model: str, share: float, known: dict[tuple[FixUse, ...], tuple[float, int, int]]) -> Row:
    import oomph
    from oomph.report.fixes import fix_word

    before, reserved, _ = known[()]
    limit = int(share * reserved)
    fitting = [fixes for fixes, (_, size, margin) in known.items() if size + margin <= limit]
    best = min(fitting, key=lambda fixes: known[fixes][0], default=())
    began = time.perf_counter()
    plan = oomph.fit(MODELS[model](), gpu="h200", max=limit)
    everything, size, _ = known[(FixUse("activation_checkpointing"),)]
    slowdown = plan.after.slowdown
    ours = plan.after.peak.reserved
    return Row(
        model,
        limit,
        len(known),
        " + ".join(map(fix_word, best)) if fitting else "none fits",
        round(known[best][0] / before, 4),
        " + ".join(map(fix_word, plan.fixes)),
        round(slowdown, 4),
        round(100 * (slowdown * before / known[best][0] - 1), 2) if fitting else 0.0,
        ours,
        round(everything / before, 4),
        size,
        (slowdown > everything / before and ours > size) or (bool(fitting) and not plan.fits),
        round(time.perf_counter() - began, 1),
        plan.predictions,
    )


@dataclass(frozen=True)
class PeerRow:
    """Step times are predicted; sizes in bytes."""

    model: str
    peer: str
    peer_reserved: int
    peer_seconds: float
    fit: str
    fit_reserved: int
    fit_seconds_of_step: float
    percent_faster: float  # fit than the peer, in no more memory
    fit_seconds: float


def compared(model: str) -> Iterator[PeerRow]:
    """The peers' settings, and what fit finds for the memory that each needs."""
    import oomph
    from oomph.report.fixes import fix_word

    workload = PEER_MODELS[model]()
    for peer, fixes in PEERS.items():
        theirs = oomph.predict(oomph.apply(list(fixes), workload), gpu="h200")
        began = time.perf_counter()
        # A plan fits with its margin; so does the peer's own setting.
        plan = oomph.fit(workload, gpu="h200", max=theirs.peak.reserved + theirs.margin)
        ours, seconds = plan.after, theirs.step_seconds or 0.0
        yield PeerRow(
            model,
            peer,
            theirs.peak.reserved,
            round(seconds, 4),
            " + ".join(map(fix_word, plan.fixes)) if plan.fits else "none fits",
            ours.peak.reserved,
            round(ours.step_seconds, 4),
            round(100 * (seconds / ours.step_seconds - 1), 2),
            round(time.perf_counter() - began, 1),
        )


def compare(out: Path, names: list[str]) -> int:
    rows: list[PeerRow] = []
    wanted = names or list(PEER_MODELS)
    kept = [row for row in stored(out) if row["model"] not in wanted]
    for row in (row for model in wanted for row in compared(model)):
        rows.append(row)
        print(f"{row.model} {row.peer}: {row.percent_faster:+.1f} % faster with {row.fit[:100]}", flush=True)
        write(out, [*kept, *rows])
    return 1 if any(row.percent_faster <= 0 for row in rows) else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="models (default: all)")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--peers", action="store_true", help="compare with other libraries' settings")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    out = given.out or RESULTS / ("fit_peers.csv" if given.peers else "fit_quality.csv")
    if given.peers:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return compare(out, given.names)
    cases = [case for case in CASES if not given.names or case[0] in given.names]
    rows: list[Row] = []
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # predictions may run in forks then
    with ProcessPoolExecutor(given.jobs, mp_context=get_context("spawn")) as pool:
        sets = {pool.submit(predicted, model): model for model in dict.fromkeys(model for model, _ in cases)}
        waiting = []
        for done in as_completed(sets):
            model = sets[done]
            waiting += [
                pool.submit(judged, model, share, done.result()) for name, share in cases if name == model
            ]
        for future in as_completed(waiting):
            rows.append(row := future.result())
            print(f"{row.model:12} {row.percent_slower:+6.2f} %  {row.fit}  |  {row.best}", flush=True)
            write(out, sorted(rows, key=lambda each: (each.model, -each.limit)))
    missed = [row for row in rows if row.percent_slower > THRESHOLD_PERCENT or row.worse_than_everything]
    print(f"{len(rows) - len(missed)} of {len(rows)} within {THRESHOLD_PERCENT} % of the best")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
