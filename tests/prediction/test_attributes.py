"""What a program sees of torch.cuda, torch.distributed and Python is the same inside a prediction as outside.

The record is of a machine with an H200 (benchmarks/accuracy/attributes.py). Here torch is another
release, and a build for CPUs: an attribute may also be as it is outside a prediction on this machine.
"""

import gzip
import json
import re
from pathlib import Path

import pytest
from benchmarks.accuracy.attributes import comparable, record, why_different

import oomph

RECORDED = Path(__file__).parent / "data" / "attributes_h200_torch2.11.json.gz"


def outside(part):
    return json.loads(json.dumps(record([part])[part], default=str))


def inside(parts, capfd):
    """What `record` finds in a prediction."""
    capfd.readouterr()

    def program():
        import torch

        print("FOUND", json.dumps(record(parts), default=str))
        torch.nn.Linear(8, 8).cuda()(torch.ones(2, 8).cuda()).sum().backward()

    oomph.predict(program, gpu="h200")
    lines = capfd.readouterr().out.splitlines()
    return json.loads(next(line for line in lines if line.startswith("FOUND")).removeprefix("FOUND"))


pytestmark = pytest.mark.filterwarnings("ignore")  # modules of torch that are deprecated


@pytest.mark.parametrize("part", ["cuda", "distributed"])
def test_modules_of_torch_have_the_attributes_that_they_have_with_cuda(part, capfd):
    recorded = json.loads(gzip.decompress(RECORDED.read_bytes()))[part]
    found, here = inside([part], capfd)[part], outside(part)
    different = [
        (name, comparable(recorded[name]), comparable(found.get(name)))
        for name in recorded.keys() & here.keys()
        if comparable(found.get(name)) not in (comparable(recorded[name]), comparable(here[name]))
    ]
    assert [each for each in different if not why_different(each[0])] == []


@pytest.mark.parametrize("part", ["cuda_calls", "distributed_calls"])
def test_calls_answer_as_with_cuda(part, capfd):
    recorded = json.loads(gzip.decompress(RECORDED.read_bytes()))[part]
    found = inside([part], capfd)[part]
    different = [
        (name, recorded[name], found[name])
        for name in recorded.keys() & found.keys()
        if comparable(found[name]) != comparable(recorded[name])
    ]
    assert [each for each in different if not why_different(each[0])] == []
    assert len(recorded.keys() & found.keys()) > 200


def test_functions_of_python_look_as_outside(capfd):
    found, here = inside(["python"], capfd)["python"], outside("python")
    public = [name for name in here if not re.search(r"^\w+\._", name)]
    different = [name for name in public if comparable(found.get(name)) != comparable(here[name])]
    assert [(name, found.get(name), here[name]) for name in different if not why_different(name)] == []
