"""Ours and every installed peer, side by side: times, peaks, errors, predictions, and the thresholds.

    python -m benchmarks.ops [PART ...]               # on a GPU; all parts, or cross_entropy, mlp, kda, ...
    python -m benchmarks.ops --cpu                    # the chunked versions against eager, under a minute
    python -m benchmarks.ops all --tiny               # every contender once at toy sizes, to find mistakes
    python -m benchmarks.ops predict --csv FILE       # anywhere: what oomph.predict says, into stored rows
    python -m benchmarks.ops thresholds --csv FILE          # the thresholds, from stored rows

Peers are found wherever they can be imported; a folder on PYTHONPATH is enough. Rows go to
results/ops_<gpu>.csv, in place of the older rows of the same ops, as each case ends.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks import RESULTS
from benchmarks.ops import (
    attention as op_attention,
    cross_entropy as op_cross_entropy,
    kda as op_kda,
    lif_gate as op_lif,
    mlp as op_mlp,
    modulated as op_modulated,
    nsa as op_nsa,
    rotary as op_rotary,
    selective_scan as op_selective_scan,
)
from benchmarks.ops.peers import Peer, find_peers, fla_peer
from benchmarks.ops.rows import Row, merged, read_rows, table, write_rows
from benchmarks.ops.runs import Case, Machine, predicted, run_case, this_machine, with_predictions
from benchmarks.ops.thresholds import report
from benchmarks.rows import short_name

ErrorRows = Callable[[Machine, Sequence[Peer], bool], Iterator[list[Row]]]
CASES: dict[str, Callable[[Sequence[Peer], bool], list[Case]]] = {
    "cross_entropy": op_cross_entropy.cases,
    "mlp": op_mlp.cases,
    "modulated": lambda peers, tiny: op_modulated.cases(tiny),
    "attention": lambda peers, tiny: op_attention.cases(tiny),
    "rotary": op_rotary.cases,
    "kda": op_kda.cases,
    "nsa": op_nsa.cases,
    "selective_scan": lambda peers, tiny: op_selective_scan.cases(tiny),
    "lif_gate": lambda peers, tiny: op_lif.cases(tiny),
}
SEQUENCE_OPS = {"kda", "nsa", "selective_scan", "lif_gate"}
ERRORS: dict[str, ErrorRows] = {
    "cross_entropy": op_cross_entropy.error_rows,
    "mlp": op_mlp.error_rows,
    "kda": op_kda.error_rows,
    "nsa": op_nsa.error_rows,
    "selective_scan": op_selective_scan.error_rows,
}


def part(
    name: str, machine: Machine, peers: Sequence[Peer], rounds: int, tiny: bool, shapes: str
) -> Iterator[list[Row]]:
    """The rows of one op, case by case; where `shapes` is given, of the shapes that match it alone."""
    for case in CASES[name](peers, tiny):
        if re.search(shapes, case.shape):
            yield run_case(case, machine, rounds)
    if name in ERRORS and (not shapes or re.search(shapes, "errors")):
        yield from ERRORS[name](machine, peers, tiny)


# Sizes where eager fits and a step takes some tenths of a second. Flatness is predicted at multiples of N
# that are larger than any tile.
CPU_CASES: dict[str, Callable[[int], Case]] = {
    "cross_entropy": lambda times: op_cross_entropy.cpu_case((512 * times, 384, 8192)),
    "mlp": lambda times: op_mlp.cpu_case((2048 * times, 256, 1024)),
    "modulated": lambda times: op_modulated.cpu_case((1024 * times, 512, 1408, 16)),
    "attention": lambda times: op_attention.cpu_case((1, 2, 2, 1024 * times, 64)),
    "kda": lambda times: op_kda.cpu_case((1, 4096 * times, 2, 64)),
    "selective_scan": lambda times: op_selective_scan.cpu_case((2, 512 * times, 64, 16)),
}
# The ops over sequences are not among these: they keep states, whose number grows with the tokens.
MULTIPLES = {"cross_entropy": (64, 256), "mlp": (64, 256), "modulated": (16, 64), "attention": (16, 32)}


def on_cpu(name: str, machine: Machine, rounds: int) -> Iterator[list[Row]]:
    """Times against eager, and predictions at multiples of N: do the temporaries grow with it?"""
    case = CPU_CASES[name](1)
    yield run_case(case, machine, rounds)
    for times in MULTIPLES.get(name, ()):
        larger = replace(CPU_CASES[name](times), shape=f"{case.shape} at {times}N")
        for contender in (contender for contender in case.contenders if contender.ours):
            yield [machine.row(larger, contender, predicted_mib=predicted(larger, contender))]


def default_file(machine: Machine) -> Path:
    """`ops_h200.csv`, `ops_cpu.csv`: by the GPU's short name."""
    return RESULTS / f"ops_{short_name(machine.gpu) if machine.cuda else 'cpu'}.csv"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"{', '.join(CASES)}, all, thresholds or predict"
    )
    parser.add_argument("--rounds", type=int, default=10, help="timed rounds of each contender (default 10)")
    parser.add_argument("--shapes", default="", help="a pattern: only shapes that match; `errors` are one")
    parser.add_argument("--csv", type=Path, help="where the rows go (default results/ops_<gpu>.csv)")
    parser.add_argument("--cpu", action="store_true", help="the chunked versions against eager, on the CPU")
    parser.add_argument(
        "--tiny", action="store_true", help="toy sizes, on any machine; stored only with --csv"
    )
    given = parser.parse_args(arguments)
    names = given.parts or ["all"]
    unknown = [name for name in names if name not in (*CASES, "all", "thresholds", "predict")]
    if unknown or given.rounds < 1:
        wrong = f"there is no part {unknown[0]!r}" if unknown else f"--rounds {given.rounds} is less than 1"
        print(f"error: {wrong}; valid: {', '.join(CASES)}, all, thresholds, predict", file=sys.stderr)
        return 2
    if names in (["thresholds"], ["predict"]):
        return _stored(given.csv, names[0])
    if not (given.cpu or given.tiny or torch.cuda.is_available()):
        print(
            "error: this needs a CUDA GPU and torch sees none; --cpu and --tiny run anywhere", file=sys.stderr
        )
        return 2
    machine = this_machine(cpu=given.cpu or not torch.cuda.is_available())
    out = given.csv or (None if given.tiny else default_file(machine))
    chosen = [name for name in (CPU_CASES if given.cpu else CASES) if "all" in names or name in names]
    # The libraries of the other parts take ten seconds to import.
    peers = [] if given.cpu else [fla_peer()] if SEQUENCE_OPS.issuperset(chosen) else find_peers()
    for peer in peers:
        print(peer.line(), flush=True)
    rows: list[Row] = []
    for name in chosen:
        began = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the peers
            groups = (
                on_cpu(name, machine, given.rounds)
                if given.cpu
                else part(name, machine, peers, given.rounds, given.tiny, given.shapes)
            )
            for group in groups:
                rows += group
                if out is not None:  # after each case, so that an interrupted run keeps what it has
                    write_rows(out, merged(read_rows(out), rows, by_shape=bool(given.shapes)))
        print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    print(table(rows), "" if given.tiny else report(rows), sep="\n\n")  # toy sizes reach no thresholds
    if out is not None:
        print(f"{len(rows)} rows: {out}")
    return 0


def _stored(path: Path | None, wish: str) -> int:
    if path is None or not path.exists():
        print(f"error: give the rows to read: {wish} --csv FILE", file=sys.stderr)
        return 2
    rows = read_rows(path)
    if wish == "predict":
        there = {row.op for row in rows}
        cases = [case for name, make in CASES.items() if name in there for case in make([], False)]
        rows = with_predictions(rows, cases)
        write_rows(path, rows)
    print(report(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
