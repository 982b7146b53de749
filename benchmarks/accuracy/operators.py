"""Every differentiable op of torch's own op database, alone, forward and backward.

    python -m benchmarks.accuracy.operators measure FILE.csv            # on a GPU
    python -m benchmarks.accuracy.operators predict FILE.csv [NAME ...] # anywhere: fills in the predictions

The database is the one that torch is tested with (`torch.testing`; it needs the package expecttest). Its
inputs are a few elements long; here they are enlarged until results and temporaries are megabytes.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import itertools
import multiprocessing
import random
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from benchmarks.rows import error_percent, errors_of, median, stored, write

COLUMNS = ("op", "sample", "dtype", "size", "inputs", "measured", "predicted", "error_percent")
# In place of the database's sizes 3, 5, 10 and 20: for inputs of many dimensions, and for those of few.
SIZES = {"small": (12, 56, 128, 256), "large": (32, 360, 640, 1280)}
SMALLEST, LARGEST = 2**18, 2**27  # bytes of one sample
SAMPLES = 3  # for each op
LONGEST_S = 60  # for one op
Function = Callable[[Any], list[dict[str, Any]]]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def database(size: str) -> dict[str, Any]:
    torch.backends.disable_global_flags = lambda: None  # else the import forbids changes of cuDNN's flags
    from torch.testing._internal.common_methods_invocations import op_db

    for name, module in list(sys.modules.items()):
        if name.startswith("torch.testing._internal"):
            for constant, value in zip(("XS", "S", "M", "L"), SIZES[size], strict=True):
                if hasattr(module, constant):
                    setattr(module, constant, value)
    usable = (op for op in op_db if op.supports_autograd and not op.name.startswith("_segment_reduce"))
    return {op.formatted_name: op for op in usable}  # enlarged segments are not valid


def samples(op: Any, dtype: torch.dtype, device: str) -> Iterator[Any]:
    torch.manual_seed(0)
    random.seed(0)
    return iter(op.sample_inputs(device, dtype, requires_grad=True))


def tensors(sample: Any) -> list[torch.Tensor]:
    leaves = tree_leaves((sample.input, sample.args, sample.kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def target(op: Any, index: int, dtype: torch.dtype) -> Callable[[], Callable[[], None]]:
    def build() -> Callable[[], None]:
        sample = next(itertools.islice(samples(op, dtype, "cuda"), index, None))

        def step() -> None:
            made = tree_leaves(op(sample.input, *sample.args, **sample.kwargs))
            results = [leaf for leaf in made if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
            del made
            if results:
                torch.autograd.backward(results, [torch.ones_like(result) for result in results])
            for tensor in tensors(sample):
                tensor.grad = None

        gc.collect()  # what the generator of samples leaves in reference cycles
        return step

    return build


def large_samples(op: Any, dtype: torch.dtype) -> list[int]:
    """A few samples of different inputs, each large enough that rounding to 512 bytes does not matter."""
    found: dict[Any, int] = {}
    for index, sample in enumerate(itertools.islice(samples(op, dtype, "cuda"), 100)):
        shapes = tuple(tuple(tensor.shape) for tensor in tensors(sample))
        if SMALLEST <= sum(tensor.nbytes for tensor in tensors(sample)) <= LARGEST:
            found.setdefault(shapes, index)
    indices = list(found.values())
    return indices[:: max(1, len(indices) // SAMPLES)][:SAMPLES]


def measure_op(work: tuple[str, str, str]) -> list[dict[str, Any]]:
    import oomph

    name, dtype, size = work
    op = database(size)[name]
    if DTYPES[dtype] not in op.supported_backward_dtypes("cuda"):
        return []
    rows = []
    for index in large_samples(op, DTYPES[dtype]):
        row: dict[str, Any] = {"op": name, "sample": index, "dtype": dtype, "size": size}
        sample = next(itertools.islice(samples(op, DTYPES[dtype], "cuda"), index, None))
        row["inputs"] = " ".join("x".join(map(str, tensor.shape)) for tensor in tensors(sample)[:6])
        del sample
        row["measured"] = oomph.measure(target(op, index, DTYPES[dtype])).steps[-1].allocated
        torch.cuda.empty_cache()
        rows.append(row)
    return rows


def predict_row(row: dict[str, Any]) -> list[dict[str, Any]]:
    import oomph

    op = database(row["size"])[row["op"]]
    found = oomph.predict(target(op, int(row["sample"]), DTYPES[row["dtype"]]), gpu="h200")
    predicted = found.steps[-1].allocated
    error = error_percent(predicted, float(row["measured"]))
    return [row | {"predicted": predicted, "error_percent": error}]


def serve(function: Function, work: list[Any], pipe: Any) -> None:
    database("small")
    gc.freeze()  # the database's own objects need not be visited by each collection
    for item in work:
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                pipe.send((function(item), ""))
        except Exception as error:  # one op must not stop the others
            pipe.send(([], f"{type(error).__name__}: {error}".split("\n")[0][:120]))


def each(function: Function, work: list[Any]) -> Iterator[dict[str, Any]]:
    """The rows of all items, made in one process, or in a fresh one after an item that ends it."""
    context = multiprocessing.get_context("spawn")
    while work:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=serve, args=(function, work, theirs))
        process.start()
        theirs.close()
        while work and process.is_alive():
            if not ours.poll(LONGEST_S):
                process.kill()
            try:
                rows, problem = ours.recv()
            except EOFError:
                rows, problem = [], f"ended the process, or took more than {LONGEST_S} s"
                process.kill()
                process.join()
            yield from rows
            if problem:
                print(work[0], problem, flush=True)
            work = work[1:]
        process.join()


def write_sorted(path: Path, rows: list[dict[str, Any]]) -> None:
    write(path, sorted(rows, key=lambda row: [str(row[name]) for name in COLUMNS[:4]]), COLUMNS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("measure", "predict"))
    parser.add_argument("file", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--jobs", type=int, default=12)
    given = parser.parse_args()
    function: Function
    work: list[Any]
    if given.what == "measure":
        function, work = measure_op, list(itertools.product(database("small"), DTYPES, SIZES))
        kept = []
    else:
        function, known = predict_row, stored(given.file)
        work = [row for row in known if not given.names or row["op"] in given.names]
        kept = [row for row in known if row not in work]
    rows: list[dict[str, Any]] = []

    def collect(first: int) -> None:
        for row in each(function, work[first :: given.jobs]):
            rows.append(row)
            if given.what == "measure" and len(rows) % 100 == 0:
                write_sorted(given.file, rows)  # an interrupted run keeps what it has

    with ThreadPoolExecutor(given.jobs) as pool:
        list(pool.map(collect, range(given.jobs)))
    write_sorted(given.file, kept + rows)
    errors = [abs(error) for error in errors_of(rows, "error_percent")]
    if errors:
        exact, close = (sum(error <= bound for error in errors) for bound in (0.1, 2))
        print(
            f"{len(errors)} samples: median {median(errors):.3f} %, {exact} within 0.1 %, {close} within 2 %"
        )


if __name__ == "__main__":
    main()
