"""Every differentiable op of torch's own op database, alone, forward and backward.

    python -m benchmarks.accuracy.operators measure --out FILE.csv      # on a GPU
    python -m benchmarks.accuracy.operators predict FILE.csv [NAME ...] # anywhere: fills in the predictions

The database is the one that torch is tested with (`torch.testing`; it needs the package expecttest). Its
inputs are a few elements long; here they are enlarged until results and temporaries are megabytes.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
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
    return {op.formatted_name: op for op in op_db if op.supports_autograd}


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
    error = round(100 * (predicted / float(row["measured"]) - 1), 3)
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
            if isinstance(error, torch.AcceleratorError):
                return  # no further kernel would run in this process


def each(function: Function, work: list[Any]) -> tuple[list[dict[str, Any]], list[Any]]:
    """Run `function` on each item in one process; in a fresh one after an item that ends it. Return the rows,
    and the items that had a process end."""
    context = multiprocessing.get_context("spawn")
    rows: list[dict[str, Any]] = []
    ended: list[Any] = []
    while work:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=serve, args=(function, work, theirs))
        process.start()
        theirs.close()
        try:
            while work:
                if not ours.poll(LONGEST_S):
                    process.kill()
                made, problem = ours.recv()
                rows += made
                if problem:
                    print(work[0], problem, flush=True)
                work = work[1:]
        except EOFError:
            ended.append(work[0])
            work = work[1:]
        process.join()
    return rows, ended


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("measure", "predict"))
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--jobs", type=int, default=12)
    given = parser.parse_args()
    function: Function
    work: list[Any]
    if given.what == "measure":
        function, work = measure_op, list(itertools.product(database("small"), DTYPES, SIZES))
    else:
        stored = list(csv.DictReader(given.file.open()))
        function, work = predict_row, [row for row in stored if not given.names or row["op"] in given.names]
    with ThreadPoolExecutor(given.jobs) as pool:
        parts = list(pool.map(lambda start: each(function, work[start :: given.jobs]), range(given.jobs)))
    # A fault of one process may end others on the same GPU.
    again, ended = each(function, list(itertools.chain(*(part[1] for part in parts))))
    print("ended a process:", ended)
    rows = [*itertools.chain(*(part[0] for part in parts)), *again]
    rows.sort(key=lambda row: (row["op"], row["dtype"], row["size"], int(row["sample"])))
    with (given.out or given.file).open("w") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
