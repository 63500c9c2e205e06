"""Checkpoints come back as they were saved; steps, tags and pruning follow a simple model."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from saves import (
    NAME,
    Q_PROJ,
    assert_holds,
    hidden,
    manager,
    names,
    ref,
    weights,
    write_optimizer,
)

from mlx_parallm.adapters.cards import CheckpointCard
from mlx_parallm.adapters.checkpoints import CheckpointStore
from mlx_parallm.adapters.weights import AdapterWeights, LoRAPair
from mlx_parallm.errors import (
    ConflictError,
    InvalidRequestError,
    UnknownModelError,
)

TAG_NAMES = st.sampled_from(["best", "good"])
KEEP = 2


@pytest.fixture
def checkpoints(tmp_path: Path) -> CheckpointStore:
    return manager(tmp_path)


# ---- what is saved is what is loaded -----------------------------------------------------------------


def test_checkpoint_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    saved = manager(tmp_path).save_checkpoint(ref(3), weights(1), tags=["best"], metrics={"reward": 0.1, "kl": 1e-9})
    again = manager(tmp_path)
    loaded = again.load_checkpoint(NAME)
    assert_holds(loaded, seed=1)
    assert loaded.card == saved == again.find(NAME, "best") == again.find(NAME, "checkpoint-1")
    assert (saved.adapter, saved.step, saved.tags) == (ref(3), 1, ("best", "latest"))
    assert saved.metrics == {"reward": 0.1, "kl": 1e-9}
    assert Path(saved.path) == tmp_path / NAME / "checkpoint-1"


def test_newest_version_counts_pruned_checkpoints(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path, keep=1)
    assert checkpoints.newest_version(NAME) == 0
    for version in (9, 2):
        checkpoints.save_checkpoint(ref(version), weights(version))
    assert len(checkpoints.cards()) == 1
    assert checkpoints.newest_version(NAME) == 9


def test_adapters_are_kept_apart(checkpoints: CheckpointStore) -> None:
    checkpoints.save_checkpoint(ref(1), weights(1), tags=["best"])
    checkpoints.save_checkpoint(ref(5, "law"), weights(2))
    assert checkpoints.find("law", "best") is None
    assert_holds(checkpoints.load_checkpoint("law"), seed=2)
    assert_holds(checkpoints.load_checkpoint(NAME), seed=1)
    assert [card.adapter for card in checkpoints.cards("law")] == [ref(5, "law")]
    with pytest.raises(ConflictError, match="share a folder"):
        checkpoints.save_checkpoint(ref(1, "LAW"), weights(1))


@pytest.mark.parametrize("which", ["checkpoint-2", "best", "", "../math/checkpoint-1", "latest\n"])
def test_unknown_checkpoint(checkpoints: CheckpointStore, which: str) -> None:
    checkpoints.save_checkpoint(ref(1), weights(1))
    assert checkpoints.find(NAME, which) is None
    with pytest.raises(UnknownModelError):
        checkpoints.load_checkpoint(NAME, which)
    with pytest.raises(UnknownModelError):
        checkpoints.tag(NAME, which, "good")
    with pytest.raises(UnknownModelError):
        checkpoints.load_checkpoint("law", "latest")


# ---- one step twice, tags, pruning -------------------------------------------------------------------


def test_same_step_again_keeps_equal_content_and_refuses_other(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    first = checkpoints.save_checkpoint(ref(1), weights(1), step=5, metrics={"reward": 1.0}, extra=write_optimizer)
    again = checkpoints.save_checkpoint(ref(2), weights(1), step=5, tags=["good"], extra=write_optimizer)
    assert (again.adapter, again.created, again.metrics) == (first.adapter, first.created, first.metrics)
    assert again.tags == ("good", "latest")
    with pytest.raises(ConflictError, match="checkpoint-5"):
        checkpoints.save_checkpoint(ref(2), weights(2), step=5, tags=["best"], extra=write_optimizer)
    with pytest.raises(ConflictError, match="checkpoint-5"):
        checkpoints.save_checkpoint(ref(2), weights(1), step=5)
    assert checkpoints.find(NAME, "best") is None
    assert_holds(checkpoints.load_checkpoint(NAME), seed=1)
    assert checkpoints.saves_total == 1
    assert hidden(tmp_path / NAME) == []


def test_latest_can_be_moved_back_and_moves_on_with_the_next_save(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        checkpoints.save_checkpoint(ref(seed), weights(seed))
    assert checkpoints.set_latest(NAME, "checkpoint-2").tags == ("latest",)
    assert_holds(manager(tmp_path).load_checkpoint(NAME), seed=2)
    with pytest.raises(UnknownModelError):
        checkpoints.set_latest(NAME, "checkpoint-9")
    assert checkpoints.find(NAME, "latest").step == 2
    assert checkpoints.save_checkpoint(ref(4), weights(4)).tags == ("latest",)
    assert manager(tmp_path).load_checkpoint(NAME).card.step == 4


@pytest.mark.parametrize("tag", ["latest", "checkpoint-3", "a/b", "", ".x", "base"])
def test_tags_are_plain_names(checkpoints: CheckpointStore, tag: str) -> None:
    checkpoints.save_checkpoint(ref(1), weights(1))
    with pytest.raises(InvalidRequestError):
        checkpoints.tag(NAME, "latest", tag)
    with pytest.raises(InvalidRequestError):
        checkpoints.save_checkpoint(ref(1), weights(1), tags=[tag])
    assert names(checkpoints.cards()) == ["checkpoint-1"]


def test_prune_keeps_the_newest_the_tagged_and_those_in_use(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path, keep=2)
    checkpoints.in_use = lambda path: path.endswith("checkpoint-3")
    for seed in range(1, 7):
        checkpoints.save_checkpoint(ref(seed), weights(seed), tags=["best"] if seed == 2 else [])
    expected = ["checkpoint-2", "checkpoint-3", "checkpoint-5", "checkpoint-6"]
    assert names(checkpoints.cards()) == names(manager(tmp_path).cards()) == expected
    assert sorted(entry.name for entry in (tmp_path / NAME).iterdir()) == [*expected, "latest", "tags.json"]
    checkpoints.tag(NAME, "checkpoint-5", "best")
    checkpoints.in_use = lambda path: False
    checkpoints.save_checkpoint(ref(7), weights(7))
    assert names(checkpoints.cards()) == ["checkpoint-5", "checkpoint-6", "checkpoint-7"]


# ---- what may not be saved ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        {"metrics": {"reward": float("nan")}},
        {"metrics": {"reward": float("inf")}},
        {"metrics": {"reward": 10**400}},
        {"metrics": {"\ud800": 1.0}},
        {"metrics": {"": 1.0}},
        {"metrics": {str(index): 0.0 for index in range(300)}},
        {"step": -1},
        {"step": 10**15},
        {"adapter": ref(1, "base")},
        {"adapter": ref(1, "../math")},
        {"weights": weights(1, rank=9)},
        {"weights": AdapterWeights({Q_PROJ: LoRAPair(np.full((8, 1), np.nan), np.ones((1, 8)), 1.0)})},
    ],
)
def test_what_could_not_be_loaded_is_not_saved(
    checkpoints: CheckpointStore, tmp_path: Path, bad: dict[str, object]
) -> None:
    with pytest.raises(InvalidRequestError):
        checkpoints.save_checkpoint(**{"adapter": ref(1), "weights": weights(1), **bad})
    assert checkpoints.cards() == manager(tmp_path).cards() == ()
    assert not list(tmp_path.glob("**/adapters.safetensors"))


@pytest.mark.parametrize("name", [".hidden", "sub/", "manifest.json", "a b"])
def test_extra_files_are_plain(tmp_path: Path, name: str) -> None:
    def extra(folder: Path) -> None:
        (folder / name).mkdir() if name.endswith("/") else (folder / name).write_text("x")

    checkpoints = manager(tmp_path)
    with pytest.raises(ValueError, match=r"plain files|match pattern"):
        checkpoints.save_checkpoint(ref(1), weights(1), extra=extra)
    assert checkpoints.cards() == ()
    assert hidden(tmp_path / NAME) == []


# ---- against a simple model --------------------------------------------------------------------------


class Saves(RuleBasedStateMachine):
    """Saves, tags and restarts in any order, while the clock is set back now and then; the model is a dict of seeds and
    a list of names in order."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.clock = 1000
        self.seeds: dict[int, int] = {}
        self.created: dict[int, int] = {}
        self.tags: dict[str, int] = {}
        self.latest: int | None = None
        self.checkpoints = manager(self.folder, keep=KEEP)

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @rule(seed=st.integers(1, 3), step=st.none() | st.integers(0, 5), tags=st.sets(TAG_NAMES), later=st.integers(-1, 2))
    def save(self, seed: int, step: int | None, tags: set[str], later: int) -> None:
        self.clock += later
        wanted = max(self.seeds, default=0) + 1 if step is None else step
        if self.seeds.get(wanted, seed) != seed:
            with pytest.raises(ConflictError):
                self._save(seed, step, tags)
            return
        new = wanted not in self.seeds
        self._note(wanted, seed, tags)
        assert self._save(seed, step, tags).step == wanted
        if new:
            self._prune()

    def _save(self, seed: int, step: int | None, tags: set[str]) -> CheckpointCard:
        with patch("time.time", return_value=float(self.clock)), patch("os.fsync"):
            return self.checkpoints.save_checkpoint(ref(seed), weights(seed), step, sorted(tags))

    def _note(self, step: int, seed: int, tags: set[str]) -> None:
        self.tags.update(dict.fromkeys(tags, step))
        if step not in self.seeds:
            created = max(self.clock, *(self.created[other] for other in self.seeds), 0)
            self.seeds[step], self.created[step], self.latest = seed, created, step
        elif self._age(step) > self._age(self.latest):
            self.latest = step

    def _age(self, step: int) -> tuple[int, int]:
        return self.created[step], step

    def _prune(self) -> None:
        kept = {*sorted(self.seeds, key=self._age)[-KEEP:], *self.tags.values(), self.latest}
        self.seeds = {step: seed for step, seed in self.seeds.items() if step in kept}

    @precondition(lambda self: self.seeds)
    @rule(data=st.data(), tag=TAG_NAMES)
    def tag(self, data: st.DataObject, tag: str) -> None:
        step = data.draw(st.sampled_from(sorted(self.seeds)))
        with patch("os.fsync"):
            self.checkpoints.tag(NAME, f"checkpoint-{step}", tag)
        self.tags[tag] = step

    @rule()
    def restart(self) -> None:
        self.checkpoints = manager(self.folder, keep=KEEP)

    @invariant()
    def cards_and_files_are_the_models(self) -> None:
        expected = sorted(self.seeds, key=self._age)
        assert [card.step for card in self.checkpoints.cards(NAME)] == expected
        for step in expected:
            labels = {tag for tag, target in {**self.tags, "latest": self.latest}.items() if target == step}
            loaded = self.checkpoints.load_checkpoint(NAME, f"checkpoint-{step}")
            assert set(loaded.card.tags) == labels
            assert_holds(loaded, self.seeds[step])
        for which, step in {**self.tags, "latest": self.latest}.items():
            found = self.checkpoints.find(NAME, which)
            assert (found and found.step) == step


Saves.TestCase.settings = settings(max_examples=60, stateful_step_count=15, deadline=None)
test_any_order_of_saves_tags_and_restarts = Saves.TestCase
