"""Of which updates a version consists."""

from __future__ import annotations

from dataclasses import replace

from mlx_parallm.rl.runs.lineage import Lineage, lineage
from mlx_parallm.rl.runs.records import PolicyChange, Rollback, Start, Update


def changes(*bodies: Start | Rollback | Update) -> list[PolicyChange]:
    return [PolicyChange("math", number, 0.0, body) for number, body in enumerate(bodies, 1)]


def update(version: int | None = None, status: str = "published") -> Update:
    return Update((), None, version is not None, version, status if version is not None else "trained", 1)


def known(found: Lineage | None) -> Lineage:
    assert found is not None
    return found


def made_of(found: Lineage | None) -> tuple[str, list[int]]:
    return known(found).start, [change.number for change in known(found).updates]


def test_updates_that_have_changed_the_policy_since_its_start_make_a_version() -> None:
    refused = Update((), None, True, None, "held", 1)
    made = changes(Start(), update(1), update(), refused, update(2), update(3))
    assert made_of(lineage(made, "math@1")) == ("", [2])
    assert made_of(lineage(made, "math@2")) == ("", [2, 3, 5]), "the one without a version counts for the next one"
    assert made_of(lineage(made)) == ("", [2, 3, 5, 6])
    assert [lineage(made, version) for version in ("math@4", "other@1")] == [None, None]


def test_after_a_rollback_the_policy_is_that_of_the_version_that_was_gone_back_to() -> None:
    back = Rollback("checkpoint-1", ("base@0", "math@1"))
    made = changes(Start(), update(1), update(2), back, update(3), Rollback("", ("base@0", "math@1", "math@3")))
    assert made_of(lineage(made, "math@3")) == ("", [2, 5])
    assert made_of(lineage(made)) == ("", [2, 5])
    assert made_of(lineage(made, "math@2")) == ("", [2, 3]), "the rollback came later"
    assert made_of(lineage(made[:4])) == ("", [2])


def test_a_new_start_continues_a_version_that_the_journal_knows_or_begins_at_one_that_it_does_not() -> None:
    made = changes(Start(), update(1), update(2), Start("math@1"), update(3), Start("math@9"), update(10), Start())
    assert made_of(lineage(made, "math@3")) == ("", [2, 5])
    assert made_of(lineage(made, "math@10")) == ("math@9", [7])
    assert made_of(lineage(made)) == ("", [])


def test_a_rollback_to_the_base_model_makes_a_version_that_equals_it() -> None:
    made = changes(Start(), update(1), Rollback("checkpoint-0", ("base@0", "math@2")), update(3))
    saved = {"math@1": 2, "math@2": 2}  # the rollback has saved math@2 before it was written
    assert made_of(lineage(made, "math@3", saved)) == ("", [4])
    assert made_of(lineage(made, "math@2", saved)) == ("", [])
    assert made_of(lineage(made, "math@1", saved)) == ("", [2])


def test_a_version_that_was_made_for_a_checkpoint_is_found_by_the_change_in_it() -> None:
    made = changes(Start(), update(1), update(), update(), Rollback("checkpoint-2", ("math@2",)), update(3))
    assert made_of(lineage(made, "math@2", {"math@2": 3})) == ("", [2, 3])
    assert made_of(lineage(made, "math@3", {"math@2": 3})) == ("", [2, 3, 6])
    assert made_of(lineage(made, "math@3")) == ("math@2", [6]), "without its checkpoint, that version is named"


def test_what_was_removed_is_named_and_not_guessed() -> None:
    whole = changes(Start(), *(update(version) for version in range(1, 6)))
    cut = [whole[1], *whole[3:]]  # a compaction keeps the change that published the newest version then
    found, oldest = known(lineage(cut, "math@5")), known(lineage(cut, "math@1"))
    assert (made_of(found), found.missing, found.is_whole) == (("", [4, 5, 6]), (3, 3), False)
    assert (made_of(oldest), oldest.missing) == (("", [2]), (1, 1))
    back = PolicyChange("math", 7, 0.0, Rollback("checkpoint-2", ("base@0", "math@2")))
    assert made_of(lineage([*cut, back])) == ("math@2", []), "its update was removed: it does not equal the base model"
    unsaid = [*whole, PolicyChange("math", 7, 0.0, Rollback("checkpoint-2"))]
    assert known(lineage(unsaid)).missing == (7, 7)


def test_reduced_updates_are_named() -> None:
    made = changes(Start(), replace(update(1), reduced=True), update(2))
    found = known(lineage(made))
    assert ([change.number for change in found.reduced], found.missing, found.is_whole) == ([2], None, False)
    assert known(lineage(changes(Start(), update(1)))).is_whole
