"""Work in threads whose results come in order, with what it raises in its turn."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from oomph.training.data.ahead import in_order, threads_to_use


def test_results_come_in_the_order_of_the_items_however_long_each_takes() -> None:
    def slow_if_even(number: int) -> int:
        time.sleep(0.01 if number % 2 == 0 else 0)
        return number * number

    found = list(in_order(slow_if_even, range(40), threads=4, ahead=8))
    assert found == [number * number for number in range(40)]


def test_no_more_than_that_many_are_begun_ahead() -> None:
    begun: list[int] = []
    taken = in_order(lambda number: number, _noted(begun), threads=2, ahead=5)
    assert next(taken) == 0
    assert begun == [0, 1, 2, 3, 4]
    assert next(taken) == 1
    assert begun == [0, 1, 2, 3, 4, 5]


def test_the_next_are_made_while_the_last_one_is_used() -> None:
    made = threading.Event()

    def note(number: int) -> int:
        if number == 3:
            made.set()
        return number

    taken = in_order(note, range(10), threads=1, ahead=4)
    next(taken)
    assert made.wait(5)  # and nobody asked for it yet


def test_an_item_that_cannot_be_read_fails_after_all_before_it() -> None:
    def items() -> Iterator[int]:
        yield from range(3)
        raise OSError("the disk is gone")

    taken = in_order(lambda number: number, items(), threads=2, ahead=10)
    assert [next(taken) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match="the disk is gone"):
        next(taken)


def test_work_that_fails_is_raised_in_its_turn() -> None:
    taken = in_order(lambda number: 1 // (2 - number), range(5), threads=2, ahead=5)
    assert [next(taken) for _ in range(2)] == [0, 1]
    with pytest.raises(ZeroDivisionError):
        next(taken)


def test_its_threads_end_with_it() -> None:
    everyone_works = threading.Barrier(3)
    workers: set[threading.Thread] = set()

    def note_who(number: int) -> None:
        workers.add(threading.current_thread())
        if number < 3:
            everyone_works.wait(30)

    taken = in_order(note_who, range(1000), threads=3, ahead=10)
    for _ in range(3):
        next(taken)
    assert len(workers) == 3
    taken.close()  # type: ignore[attr-defined]
    for worker in workers:
        worker.join(30)
    assert not any(worker.is_alive() for worker in workers)


def test_a_core_is_left_to_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, threads in ((1, 1), (2, 1), (4, 3), (64, 8)):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, cores=cores: set(range(cores)), raising=False)
        assert threads_to_use() == threads


def _noted(begun: list[int]) -> Iterator[int]:
    for number in range(100):
        begun.append(number)
        yield number
