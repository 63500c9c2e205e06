"""Micro-steps sized by the time they take: when their size is decided, and that a restart decides the same."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from trainers import LORA, SETTINGS, learn, leaves, make_policy, make_trainer, samples

from mlx_parallm.errors import AdapterFileError
from mlx_parallm.rl.packing import pack
from mlx_parallm.rl.policy import Policy
from mlx_parallm.rl.samples import UpdateBatch, UpdateOutcome
from mlx_parallm.rl.snapshot import PolicySnapshot
from mlx_parallm.rl.trainer import GRPOTrainer

PACED = replace(SETTINGS, micro_batch_tokens=None)


class Machine:
    """In the place of a trainer's pacer: says how many token equivalents fit. `seen`: sizes of micro-steps."""

    def __init__(self, trainer: GRPOTrainer, size: int, first: int = 1000) -> None:
        self.size, self.first = size, first
        self.seen: list[int] = []
        self.asked: list[float] = []
        trainer._pacer = self  # type: ignore[assignment]

    def observe(self, size: int, seconds: float) -> None:
        assert seconds > 0
        self.seen.append(size)

    def size_within(self, seconds: float) -> int:
        self.asked.append(seconds)
        return self.size

    def first_size(self, seconds: float) -> int:
        return self.first

    def sizes(self) -> list[int]:
        """Since it was last asked."""
        seen, self.seen = self.seen, []
        return seen


def same(one: Policy, other: Policy) -> bool:
    """To the bit, the optimizer's state too."""
    a, b = one.snapshot().optimizer, other.snapshot().optimizer
    return all(np.array_equal(leaf, leaves(other)[name]) for name, leaf in leaves(one).items()) and all(
        np.array_equal(leaf, b[name]) for name, leaf in a.items()
    )


def test_the_size_of_an_update_is_decided_by_the_end_of_the_one_before() -> None:
    trainer, _ = make_trainer(PACED)
    policy, machine = make_policy(trainer), Machine(trainer, size=30)
    learn(trainer, policy, samples(12))
    assert len(machine.sizes()) == 1, "the first is of the size that is guessed"
    assert policy.micro_batch_size == 30
    machine.size = 500
    learn(trainer, policy, samples(12))
    sizes = machine.sizes()
    assert len(sizes) > 2
    assert max(sizes) <= 30
    assert policy.micro_batch_size == 500


def test_a_size_that_changes_within_an_update_changes_nothing_of_it() -> None:
    trainer, _ = make_trainer(PACED)
    policy, machine = make_policy(trainer), Machine(trainer, size=30, first=30)
    learn(trainer, policy, samples(12))
    whole = machine.sizes()
    told: list[UpdateOutcome | Exception] = []
    trainer.begin(policy, UpdateBatch(tuple(samples(12))), told.append)
    trainer.advance()
    machine.size = 1
    trainer.pace(0.001)
    while trainer.waits():
        trainer.advance()
    assert machine.sizes() == whole
    assert isinstance(told[0], UpdateOutcome)
    learn(trainer, policy, samples(12))
    assert len(machine.sizes()) == 12


def test_a_restored_policy_is_split_as_it_would_have_been(tmp_path) -> None:
    """To the bit, though the new trainer has measured nothing, and to others it would have been another update."""
    trainer, _ = make_trainer(PACED)
    policy, machine = make_policy(trainer), Machine(trainer, size=30)
    learn(trainer, policy, samples(12))
    machine.sizes()
    saved = policy.snapshot()
    saved.save(tmp_path)
    loaded = PolicySnapshot.load(tmp_path, saved.weights)
    learn(trainer, policy, samples(12, seed=1))
    split = machine.sizes()

    restarted, _ = make_trainer(PACED)
    again, other = restarted.open("default", loaded), Machine(restarted, size=77)
    learn(restarted, again, samples(12, seed=1)[::-1])
    assert other.sizes() == split
    assert len(split) > 1
    assert same(again, policy)

    forgetful, _ = make_trainer(PACED)
    unlike, others = forgetful.open("default", replace(loaded, micro_batch_size=None)), Machine(forgetful, size=77)
    learn(forgetful, unlike, samples(12, seed=1))
    assert others.sizes() != split
    assert not same(unlike, policy), "the split decides about the last bits, so this test would see one that is lost"


def test_a_policy_that_is_put_back_has_its_size_again() -> None:
    trainer, _ = make_trainer(PACED)
    policy, machine = make_policy(trainer), Machine(trainer, size=30)
    learn(trainer, policy, samples())
    before = policy.snapshot()
    machine.size = 99
    learn(trainer, policy, samples())
    policy.restore(before)
    assert policy.micro_batch_size == 30


def test_a_skipped_update_leaves_the_size() -> None:
    trainer, _ = make_trainer(PACED)
    policy, machine = make_policy(trainer), Machine(trainer, size=30)
    learn(trainer, policy, samples())
    machine.size = 99
    drawn = samples()
    assert learn(trainer, policy, [replace(drawn[0], advantage=float("nan")), *drawn[1:]]).skipped
    assert policy.micro_batch_size == 30


def test_a_new_pace_holds_from_the_next_update_on() -> None:
    trainer, _ = make_trainer(PACED)
    policy, fresh = make_policy(trainer), make_policy(trainer, name="fresh")
    machine = Machine(trainer, size=30)
    learn(trainer, policy, samples())
    assert machine.asked[-1] == 0.5
    machine.size = 7
    trainer.pace(0.5)
    assert policy.micro_batch_size == 30, "nothing new"
    trainer.pace(0.1)
    assert (policy.micro_batch_size, machine.asked[-1]) == (7, 0.1)
    assert fresh.micro_batch_size is None, "its first update is guessed, as it would be after a restart"


def test_a_given_size_is_kept_to_and_no_other_is_decided() -> None:
    trainer, _ = make_trainer(replace(SETTINGS, micro_batch_tokens=30))
    policy, machine = make_policy(trainer), Machine(trainer, size=1)
    policy.micro_batch_size = 3
    trainer.pace(0.001)
    learn(trainer, policy, samples(12))
    assert 1 < len(machine.sizes()) < 12
    assert policy.micro_batch_size == 3


def test_sizes_are_those_of_trunk_and_head() -> None:
    """What the pacer is told of: every token that passes the trunk, and every trained position by its weight."""
    trainer, _ = make_trainer(PACED)
    policy, machine = make_policy(trainer), Machine(trainer, size=1000)
    drawn = samples(3, groups=1)
    learn(trainer, policy, drawn)
    tokens = pack(sorted(drawn, key=lambda sample: len(sample.completion_ids))).tokens.size
    targets = sum(len(sample.completion_ids) for sample in drawn)
    head, trunk = 64 * 263, 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96)
    weight = 3 * head / (2 * trunk)  # not checkpointed, and no reference in the loss
    assert machine.sizes() == [tokens + math.ceil(weight * targets)]


def test_micro_steps_come_to_take_the_time_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that counts one millisecond a token equivalent and ten a micro-step."""
    trainer, _ = make_trainer(PACED)
    policy, now = make_policy(trainer), [0.0]
    monkeypatch.setattr("mlx_parallm.rl.trainer.time.monotonic", lambda: now[0])
    inner, units = trainer._add_up, []

    def counted(parts) -> None:
        units.append(0.01 + 0.001 * sum(portion.size for _, portion in parts))
        now[0] += units[-1]
        inner(parts)

    monkeypatch.setattr(trainer, "_add_up", counted)
    trainer.pace(0.1)
    for seed in range(6):
        units.clear()
        learn(trainer, policy, samples(60, seed=seed, groups=4))
    assert len(units) > 2
    assert 0.06 < max(units) <= 0.1


def test_a_checkpoint_of_an_earlier_version_has_no_size(tmp_path) -> None:
    trainer, _ = make_trainer(PACED)
    saved = make_policy(trainer).snapshot()
    saved.save(tmp_path)
    assert json.loads((tmp_path / "trainer.json").read_text()) == {"step": 0, "micro_batch_size": None}
    (tmp_path / "trainer.json").write_text('{"step": 4}\n')
    loaded = PolicySnapshot.load(tmp_path, saved.weights)
    assert (loaded.step, loaded.micro_batch_size) == (4, None)
    assert Policy(trainer.model.layout, LORA, SETTINGS.optimizer, loaded).micro_batch_size is None


@pytest.mark.parametrize(
    "text", ['{"step": 4, "micro_batch_size": "x"}', "[4]", "4", '{"step": 4, "micro_batch_size": [1]}', "", "{}"]
)
def test_damaged_facts_are_refused(tmp_path, text: str) -> None:
    trainer, _ = make_trainer(PACED)
    saved = make_policy(trainer).snapshot()
    saved.save(tmp_path)
    (tmp_path / "trainer.json").write_text(text)
    with pytest.raises(AdapterFileError, match="no usable state of a trainer"):
        PolicySnapshot.load(tmp_path, saved.weights)
