"""Several works that share the device time of training."""

from __future__ import annotations

import pytest

from mlx_parallm.train.taking_turns import TakingTurns


class Work:
    """Has so many units to run; one of them may fail."""

    bytes_held, bytes_of_updates, peak_bytes = 1, 2, 3

    def __init__(self, name: str, units: int, log: list[str], fails: bool = False) -> None:
        self.name, self.units, self.log, self.fails = name, units, log, fails

    def waits(self) -> bool:
        return self.units > 0

    def pace(self, seconds: float) -> None:
        self.seconds = seconds

    def advance(self) -> None:
        self.log.append(self.name)
        if self.fails:
            raise RuntimeError(self.name)
        self.units -= 1

    def reset(self) -> None:
        self.log.append(f"reset {self.name}")
        self.units = 0


def test_units_alternate_and_one_that_is_alone_gets_all() -> None:
    log: list[str] = []
    turns = TakingTurns([Work("a", 4, log), Work("b", 2, log)])
    while turns.waits():
        turns.advance()
    assert log == ["a", "b", "a", "b", "a", "a"]
    assert (turns.bytes_held, turns.bytes_of_updates, turns.peak_bytes) == (2, 4, 3)


def test_a_work_that_fails_is_the_one_that_is_reset() -> None:
    log: list[str] = []
    first, second = Work("a", 1, log), Work("b", 1, log, fails=True)
    turns = TakingTurns([first, second])
    turns.advance()
    with pytest.raises(RuntimeError, match="b"):
        turns.advance()
    turns.reset()
    assert log == ["a", "b", "reset b"]
    assert not turns.waits()


def test_the_pace_is_that_of_all() -> None:
    works = [Work("a", 1, []), Work("b", 1, [])]
    TakingTurns(works).pace(0.25)
    assert [work.seconds for work in works] == [0.25, 0.25]
