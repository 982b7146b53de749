"""Memory snapshots as PyTorch writes them, whole, damaged and malicious."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from typing import Any

MiB = 2**20
TORCH = "/env/lib/python3.11/site-packages/torch"
USER = {"filename": "/home/me/train.py", "line": 12, "name": "forward"}
FRAMES: dict[str, list[dict[str, Any]]] = {
    "forward": [
        {"filename": "??", "line": 0, "name": "at::_ops::mm::call(at::Tensor const&)"},
        {"filename": f"{TORCH}/nn/modules/linear.py", "line": 134, "name": "forward"},
        USER,
    ],
    "loss": [
        {"filename": f"{TORCH}/nn/functional.py", "line": 3400, "name": "cross_entropy"},
        {"filename": "/home/me/train.py", "line": 20, "name": "step"},
    ],
    "backward": [],  # autograd's thread has no Python stack
    "optimizer": [
        {"filename": f"{TORCH}/optim/adam.py", "line": 150, "name": "_init_group"},
        {"filename": f"{TORCH}/optim/adam.py", "line": 220, "name": "step"},
        {"filename": "/home/me/train.py", "line": 23, "name": "step"},
    ],
}


def snapshot(layers: int = 4, out_of_memory: bool = True) -> dict[str, Any]:
    """Recorded from the middle of a run on: 64 MiB of weights were there before.

    Forward activations of 8 MiB, a loss of 32 MiB, gradients of 8 MiB; the optimizer then makes its state.
    It ends with a request of 48 MiB that fails.
    """
    trace: list[dict[str, Any]] = []
    blocks = [
        {
            "address": 0,
            "size": 64 * MiB,
            "requested_size": 64 * MiB,
            "state": "active_allocated",
            "frames": [],
        }
    ]
    address = 64 * MiB

    def entry(action: str, addr: int, size: int, what: str) -> None:
        trace.append({"action": action, "addr": addr, "size": size, "stream": 0, "frames": FRAMES[what]})

    def alloc(size: int, what: str) -> int:
        nonlocal address
        at, address = address, address + size
        entry("segment_alloc", at, size, what)
        entry("alloc", at, size - 7, what)
        return at

    def free(at: int, size: int) -> None:
        entry("free_requested", at, size - 7, "backward")
        entry("free_completed", at, size - 7, "backward")

    saved = [alloc(8 * MiB, "forward") for _ in range(layers)]
    loss = alloc(32 * MiB, "loss")
    gradients = []
    for at in reversed(saved):
        gradients.append(alloc(8 * MiB, "backward"))
        free(at, 8 * MiB)
    free(loss, 32 * MiB)
    state = [alloc(8 * MiB, "optimizer") for _ in range(layers)]
    if out_of_memory:
        trace.append(
            {"action": "oom", "size": 48 * MiB, "stream": 0, "device_free": 5, "frames": FRAMES["forward"]}
        )
    taken = dict.fromkeys((*gradients, *state), "active_allocated")
    for at, size in ((at, 32 * MiB if at == loss else 8 * MiB) for at in sorted({*saved, loss, *taken})):
        state_word = taken.get(at, "inactive")
        blocks.append(
            {"address": at, "size": size, "requested_size": size, "state": state_word, "frames": []}
        )
    segments = [
        {"device": 0, "address": each["address"], "total_size": each["size"], "stream": 0, "blocks": [each]}
        for each in blocks
    ]
    return {"segments": segments, "device_traces": [trace], "allocator_settings": {}}


class _Calls:
    """Unpickling it calls `function`."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


def malicious(sentinel: str) -> Iterator[bytes]:
    """Pickles that write the file `sentinel` if they are executed, or ask for much memory."""
    import os
    import subprocess

    for call in (
        _Calls(os.system, f"touch {sentinel}"),
        _Calls(subprocess.Popen, ["touch", sentinel]),
        _Calls(eval, f"open({sentinel!r}, 'w')"),
        _Calls(exec, f"open({sentinel!r}, 'w')"),
        _Calls(open, sentinel, "w"),
    ):
        for protocol in (2, 4, 5):
            yield pickle.dumps(call, protocol)
            yield pickle.dumps({**snapshot(), "segments": [call]}, protocol)
            yield pickle.dumps([snapshot(), {"x": call}], protocol)
    yield b"\x80\x04]r\xff\xff\xff\xff."  # a memo of 4 billion entries
    yield b"\x80\x04X\xff\xff\xff\xff."  # a string of 4 GiB
    yield b"\x80\x04\x8a\xff" + b"\xff" * 255 + b"."  # a large number
    yield b"\x80\x04" + b"(" * 200_000 + b"."
    yield b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b"."
    yield b"\x80\x04\x82\x01."  # an extension
    yield b"\x80\x04P42\n."  # a persistent id


def damaged(count: int, seed: int = 0) -> Iterator[bytes]:
    """A snapshot with bytes cut off, changed, doubled or added; and values of other types in it."""
    chance = random.Random(seed)
    whole = pickle.dumps(snapshot(), 4)
    for i in range(count):
        data = bytearray(whole)
        match i % 5:
            case 0:
                del data[chance.randrange(2, len(data)) :]
            case 1:
                for _ in range(chance.choice((1, 3, 30))):
                    data[chance.randrange(1, len(data))] = chance.randrange(256)
            case 2:
                at = chance.randrange(len(data))
                data[at:at] = data[at : at + chance.randrange(1, 200)]
            case 3:
                at = chance.randrange(1, len(data))
                data[at:at] = chance.randbytes(chance.randrange(1, 20))
            case _:
                data = bytearray(pickle.dumps(_changed(snapshot(), chance), 4))
        yield bytes(data)


def _changed(found: Any, chance: random.Random) -> Any:
    """With one value, somewhere, of another type or size."""
    values = (None, -1, 2**70, "x" * 10_000, [], {}, b"", 0.5, True, [None], {"frames": 3})
    where = found
    while True:
        keys = list(where) if isinstance(where, dict) else range(len(where))
        if not keys:
            return found
        key = chance.choice(list(keys))
        if isinstance(where[key], dict | list) and where[key] and chance.random() < 0.8:
            where[key] = where[key].copy()
            where = where[key]
        else:
            where[key] = chance.choice(values)
            return found
