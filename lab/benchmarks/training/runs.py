"""The runs that lab.benchmarks.training makes: every real config of the reports, as short as still tells."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Run:
    """`changes`: overrides of the config, all that differs from what the file says."""

    name: str
    config: str
    changes: tuple[str, ...] = ()
    limit_s: int = 300
    eight_photographs: bool = False  # instead of two

    @property
    def overrides(self) -> tuple[str, ...]:
        return (*_ALWAYS, *self.changes)


# No checkpoints: 24 GB of state would be most of the time. An evaluation at the end only.
_ALWAYS = ("training.save=false", "training.eval_every=null", "training.log_every=1")
# One shape, so that a run's tokens per second are of that shape.
_FIRST_STAGE = ("data.curriculum=null", "data.seq_len=256", "data.batch_size=16", "training.accumulate=2")
_GINR = ("training.steps=1000", "training.log_every=10", "training.eval_batches=8")
# A few percent in so few steps, less than one batch differs from another: the same ones before and after.
_NO_GRAPH = "training.cuda_graph=false"
_NPT = ("training.accumulate=4", "training.eval_batches=20", "training.eval_at_start=true")

_IN_24_GIB = (
    'fixes=["{}", activation_offloading, optimizer_8bit, stochastic_rounding, optimizer_in_backward, '
    '"allocator:expandable_segments=true"]'
)
_RUNS = (
    Run("hn_xs", "hn_xs", (*_FIRST_STAGE, "training.steps=50")),
    Run(
        "hn_xs, recomputed",
        "hn_xs",
        (*_FIRST_STAGE, "training.steps=50", "training.cuda_graph=false", "fixes=[activation_checkpointing]"),
    ),
    Run(
        "hn_xs naive",
        "hn_xs",
        (*_FIRST_STAGE, "form=naive", "training.steps=10", "training.cuda_graph=false"),
    ),
    Run(
        "hn_s",
        "hn_s",
        (
            *("data.curriculum=null", "data.seq_len=4096", "data.batch_size=1", "training.accumulate=1"),
            "training.steps=50",
        ),
    ),
    Run("pythia_70m", "pythia_70m", ("data.source=stdlib", "training.steps=200")),
    Run("pythia_70m_published", "pythia_70m_published", ("training.steps=60",)),
    Run("npt_default", "npt_default", (*_NPT, "training.steps=80")),
    Run("npt_default 8-bit", "npt_default", (*_NPT, "training.steps=50", "use_8bit=true")),
    Run("npt_optimized", "npt_optimized", (*_NPT, "training.steps=100")),
    Run("npt_small", "npt_small", (*_NPT, "training.steps=100")),
    Run("npt_small, no CUDA graphs", "npt_small", (*_NPT, "training.steps=100", "training.cuda_graph=false")),
    Run("longctx_0.6b", "longctx_0.6b", ("training.steps=50", "training.accumulate=1")),
    Run(
        "longctx_4b",
        "longctx_4b",
        (
            "training.steps=5",
            "training.accumulate=1",
            "training.warmup=2",
            "training.memory_limit=80GiB",
            "data.validation=0",
        ),
        270,
    ),
    Run(
        "longctx_4b_24gb",
        "longctx_4b_24gb",
        ("training.steps=5", "training.warmup=2", "training.memory_limit=23GiB", "data.validation=0"),
        320,
    ),
    *(
        Run(f"ginr {mixing}", "ginr", (*_GINR, f"model.query_mixing={mixing}"), 330)
        for mixing in ("self", "cross", "feedforward", "residual")
    ),
    *(
        Run(name, name, ("training.steps=60", "training.eval_batches=4"))
        for name in (
            *(f"ginr_solution_{number}" for number in (1, 2, 3, 4, 5)),
            "ginr_scent_queries",
            "ginr_residual",
        )
    ),
)
_PHOTOGRAPHS = {  # package -> files in it
    "sklearn": ("datasets/images/china.jpg", "datasets/images/flower.jpg"),
    "skimage": tuple(
        f"data/{name}"
        for name in (
            "astronaut.png",
            "chelsea.png",
            "coffee.png",
            "hubble_deep_field.jpg",
            "motorcycle_left.png",
            "rocket.jpg",
        )
    ),
}
# Report 004's solutions after equal steps; gradient checkpointing is the report's model itself.
_QUALITY = {
    **{mixing: (f"model.query_mixing={mixing}",) for mixing in ("self", "cross", "feedforward", "residual")},
    "batch 16": ("data.batch_size=16",),
    "resolution 16": ("model.preset=solution_5_resolution",),
    "queries": ("model.queries_per_step=256",),
}
_RUNS += tuple(
    Run(
        f"ginr {name}, seed {seed}",
        "ginr",
        ("training.steps=200", "training.eval_batches=8", f"training.seed={seed}", *changes),
        330,
        eight_photographs=True,
    )
    for name, changes in _QUALITY.items()
    for seed in range(3)
)
_RUNS += (
    Run(
        "hn_xs curriculum",
        "hn_xs",
        (
            "data.curriculum=[{seq_len: 256, batch_tokens: 4096, steps: 10}, "
            "{seq_len: 512, batch_tokens: 5120, steps: 10}, {seq_len: 768, batch_tokens: 4608, steps: 10}, "
            "{seq_len: 1024, batch_tokens: 5120}]",
            "training.accumulate=2",
            "training.steps=40",
            "training.warmup=10",
        ),
    ),
    Run(
        "hn_xs sequential",
        "hn_xs",
        (*_FIRST_STAGE, "training.steps=6", "model.kda_mode=sequential", _NO_GRAPH),
    ),
    Run("hn_xs chunked", "hn_xs", (*_FIRST_STAGE, "training.steps=50", "model.kda_mode=chunked")),
    Run(
        "longctx_4b_24gb_nsa",
        "longctx_4b_24gb_nsa",
        ("training.steps=4", "training.warmup=2", "training.memory_limit=23GiB", "data.validation=0"),
        320,
    ),
    Run(
        "longctx_8b",
        "longctx_8b",
        ("training.steps=2", "training.warmup=1", "training.memory_limit=80GiB", "data.validation=0"),
        320,
    ),
    Run(
        "longctx_4b_24gb, attention kept",
        "longctx_4b_24gb",
        (
            "training.steps=3",
            "training.warmup=1",
            "training.memory_limit=23GiB",
            "data.validation=0",
            _IN_24_GIB.format("activation_checkpointing:keep=attention"),
        ),
        320,
    ),
    Run(
        "longctx_8b 262144",
        "longctx_8b",
        (
            "data.seq_len=262144",
            "training.steps=1",
            "training.warmup=0",
            "training.memory_limit=80GiB",
            "data.validation=0",
            _IN_24_GIB.format("activation_checkpointing"),
        ),
        400,
    ),
)
_EXACT = ("hn_xs", "pythia_70m_published", "longctx_0.6b")  # what the same bits at every run cost
_RUNS += tuple(
    replace(run, name=f"{run.name}, deterministic", changes=(*run.changes, "training.deterministic=true"))
    for run in _RUNS
    if run.name in _EXACT
)
RUNS = {run.name: run for run in _RUNS}

_NO_CUDA_GRAPHS = ("training.cuda_graph=false",)
_OVERHEADS = (
    Run("hn_xs", "hn_xs", ("data.seq_len=256", "data.batch_size=16")),
    Run("pythia_70m_published", "pythia_70m_published"),
    Run("pythia_70m_published, no CUDA graphs", "pythia_70m_published", _NO_CUDA_GRAPHS),
    Run("ginr", "ginr"),
    Run("ginr, no CUDA graphs", "ginr", _NO_CUDA_GRAPHS),
)
OVERHEADS = {run.name: run for run in _OVERHEADS}  # what the loop itself costs, in steps of two batches


@contextmanager
def trained_tokenizer(config: Any, run: Path) -> Iterator[None]:
    """Reuse the tokenizer that an earlier run trained; training one takes longer than most runs.

    `run` is the folder of the run that starts inside the block.
    """
    kept = Path(tempfile.gettempdir()) / f"oomph-{config.data.tokenizer}-{config.data.vocab_size}"
    if kept.exists():
        shutil.copytree(kept, run)
    yield
    if config.data.tokenizer is not None and not kept.exists():
        partly = Path(tempfile.mkdtemp(dir=kept.parent))
        for file in run.glob("tokenizer*.json"):
            shutil.copy(file, partly)
        try:
            partly.rename(kept)
        except OSError:  # another run was first
            shutil.rmtree(partly)


def copy_photographs(folder: Path) -> Path:
    """Those of scikit-learn and scikit-image, in one folder."""
    folder.mkdir()
    for package, files in _PHOTOGRAPHS.items():
        spec = find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise SystemExit(f"this run reads photographs of the package {package}, which is not installed")
        for file in files:
            shutil.copy(Path(spec.submodule_search_locations[0], file), folder)
    return folder
