"""`oomph explain` of the text of an error."""

import io
import json
import sys

import pytest

from oomph.cli.main import run
from oomph.report import error_text

NEW = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of "
    "{capacity} of which {free} is free. {others}Including non-PyTorch memory, this process has {used} "
    "memory in use. {allowed}Of the allocated memory {tensors} is allocated by PyTorch, and {unused} is "
    "reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
)
SIZES = {
    "asked": "3.07 GiB",
    "capacity": "23.64 GiB",
    "free": "1.12 GiB",
    "used": "22.51 GiB",
    "tensors": "20.10 GiB",
    "unused": "1.93 GiB",
    "others": "",
    "allowed": "",
}
OLD = (
    "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 1; 7.79 GiB total capacity; 5.59 GiB "
    "already allocated; 18.94 MiB free; 6.83 GiB reserved in total by PyTorch) If reserved memory is large"
)


def message(**sizes):
    return NEW.format(**{**SIZES, **sizes})


def cause(**sizes):
    return error_text.causes(error_text.read(message(**sizes)))[0]


def test_the_largest_of_several_causes_is_named():
    # Free and unused memory together are 20 MiB too small: expandable segments would not help.
    name, text = cause()
    assert name == "too large"
    assert "about 20 MiB less" in text
    assert cause(asked="3.00 GiB")[0] == "fragmentation"
    assert cause(asked="1.50 GiB", free="0 bytes", used="23.64 GiB")[0] == "fragmentation"
    assert cause(asked="32.00 GiB")[0] == "one tensor is larger than the GPU"
    assert cause(allowed="22.50 GiB allowed; ")[0] == "a limit of the process"
    other = {
        "others": "Process 4711 has 12.00 GiB memory in use. ",
        "used": "10.51 GiB",
        "tensors": "10.00 GiB",
    }
    name, text = cause(**other, unused="20.00 MiB")
    assert name == "other processes"
    assert "process 4711: 12.0 GiB" in text


def test_messages_of_all_versions_are_read():
    old = error_text.read(OLD)
    assert (old.gpu, old.requested, old.free) == (1, 20 * 2**20, int(18.94 * 2**20))
    assert old.unused == pytest.approx(1.24 * 2**30, rel=1e-3)
    assert error_text.read(OLD.replace("reserved in total by PyTorch", "cached")).unused == old.unused
    typo = error_text.read(message().replace("capacity", "capacty").replace(". ", ".\n"))  # of torch 2.1
    assert typo == error_text.read(message())
    other = "Allocation on device 0 would exceed allowed memory.\nRequested  : 2.25 GiB\n"
    assert error_text.read(other).requested == 2.25 * 2**30
    pools = message().replace("by PyTorch, and", "by PyTorch, with 1.20 GiB allocated in private pools, and")
    assert ("CUDA graphs" in dict(error_text.causes(error_text.read(pools)))) is True


LOG = """2026-01-01 12:00:00 - INFO - step 3
[rank3]: Traceback (most recent call last):
[rank1]: Traceback (most recent call last):
[rank3]:   File "/home/u/train.py", line 120, in <module>
[rank1]:   File "/home/u/other.py", line 1, in <module>
[rank3]:   File "/home/u/train.py", line 88, in main
[rank3]:     loss.backward()
[rank3]:   File "/x/site-packages/torch/_tensor.py", line 522, in backward
[rank3]: {message}
[rank1]: {message}
"""
IN_A_NOTEBOOK = """OutOfMemoryError     Traceback (most recent call last)
Cell In[7], line 12
---> 12     out = model(x)
File ~/x/site-packages/torch/nn/modules/module.py:1511, in Module._wrapped_call_impl(self, *args)
{message}
"""


def test_the_line_and_what_the_program_did_are_found_in_a_traceback():
    found = error_text.read(LOG.format(message=message()))
    assert (found.rank, found.messages, found.site.place) == (3, 2, "train.py:88")
    assert (found.script, found.phase) == ("train.py", "backward")
    found = error_text.read(IN_A_NOTEBOOK.format(message=message()))
    assert (found.site.place, found.phase) == ("notebook.ipynb cell 7, line 12", "forward")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`", "nvidia-smi"),
        ("RuntimeError: CUDA error: out of memory", "nvidia-smi"),
        ("XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 bytes", "XLA_PYTHON"),
        ("triton OutOfResources: out of resource: shared memory, Required: 131072", "num_stages"),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=1.0", "of the host"),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes", "of the host"),
        ("DataLoader worker (pid 1) is killed by signal: Bus error.", "--shm-size"),
        ("NCCL WARN Cuda failure 2 'out of memory'", "NCCL"),
    ],
)
def test_other_errors_of_memory_have_a_fitting_answer(tmp_path, capsys, text, expected):
    (tmp_path / "error.txt").write_text(text)
    assert run(["explain", str(tmp_path / "error.txt")]) == 0
    assert expected in capsys.readouterr().out


def piped(monkeypatch, text):
    stream = io.TextIOWrapper(io.BytesIO(text.encode()))
    monkeypatch.setattr(sys, "stdin", stream)


def test_the_text_is_read_from_standard_input(monkeypatch, capsys):
    for words in (["explain"], ["explain", "-"]):
        piped(monkeypatch, LOG.format(message=message()))
        assert run(words) == 0
        text = capsys.readouterr().out
        assert "3.07 GiB were asked for at train.py:88, in backward; on rank 3" in text
        assert "oomph fit train.py --gpu rtx" in text
    piped(monkeypatch, "all is well")
    assert run(["explain"]) == 2
    assert "standard input has no out-of-memory error" in capsys.readouterr().err


def test_a_terminal_is_not_waited_for(monkeypatch, capsys):
    piped(monkeypatch, "")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert run(["explain", "train.py"]) == 2
    assert "explain needs a file" in capsys.readouterr().err


def test_a_log_may_begin_with_a_dictionary(monkeypatch, capsys):
    piped(monkeypatch, "{'loss': 2.1}\n" + LOG.format(message=message()))
    assert run(["explain", "--quiet"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert "3.07 GiB were asked for at train.py:88" in line


def test_a_page_needs_the_program(tmp_path, capsys):
    (tmp_path / "oom.txt").write_text(message())
    words = ["explain", str(tmp_path / "oom.txt"), "--html", str(tmp_path / "report.html")]
    assert run(words) == 2
    assert "--html needs the program" in capsys.readouterr().err


TRAINING = """import sys, torch
model = torch.nn.Linear(1024, 50257).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(9):
    y = model(torch.randn(int(sys.argv[1]), 1024, device="cuda"))
    torch.nn.functional.cross_entropy(y, y.argmax(1)).backward()
    optimizer.step()
"""


def test_with_the_program_the_request_is_found_in_its_prediction(program, tmp_path, capsys):
    program(TRAINING)
    trace = 'Traceback (most recent call last):\n  File "/u/train.py", line 6, in <module>\n'
    (tmp_path / "oom.txt").write_text(trace + message(asked="394.00 MiB"))  # 2048 x 50257 x 4 bytes
    assert run(["explain", "oom.txt", "train.py", "--json", "--", "2048"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["prediction"]["gpu"] == "rtx3090"  # by the memory of the message
    assert (found["requests"][0]["shape"], found["requests"][0]["line"]) == ([2048, 50257], 6)
    assert run(["explain", "oom.txt", "train.py", "--gpu", "rtx4090", "--", "64"]) == 0
    text = capsys.readouterr().out
    assert "No request of it has 394 MiB" in text
    assert "oomph fit train.py --gpu rtx4090 -- 64" in text
