"""The history of training: what is kept, for how long, and what a restart finds of it."""

from __future__ import annotations

from pathlib import Path

from mlx_parallm.rl.events import EventHistory
from mlx_parallm.rl.status import TrainingEvent
from mlx_parallm.rl.tracking import JsonlTracker, Tracking, recorded_events


def update(version: int, adapter: str = "tone", status: str = "published", at: float = 7.5) -> TrainingEvent:
    kind = {"held": "held", "skipped": "skipped"}.get(status, "update")
    data = {"adapter": adapter, "version": f"{adapter}@{version}", "step": version, "status": status, "reason": ""}
    return TrainingEvent(kind, at, {**data, "metrics": {"loss": 0.5}}, f"a-{version}")


def versions(history: EventHistory, adapter: str = "tone", limit: int = 100) -> list[object]:
    return [event.data["version"] for event in history.of(adapter, limit, "").data]


def test_an_average_is_in_the_history_of_the_adapters_that_it_is_of() -> None:
    history = EventHistory()
    data = {"adapter": "mean", "adapters": ["tone@2", "math@1", "math@3"], "version": "mean@1"}
    history.on_event(TrainingEvent("averaged", 9.0, data))
    assert versions(history) == versions(history, "math") == versions(history, "mean") == ["mean@1"]
    assert versions(history, "new") == []


def test_only_the_newest_events_of_an_adapter_are_kept_and_it_says_so() -> None:
    history = EventHistory(max_events=3)
    for number in range(1, 4):
        history.on_event(update(number))
    assert not history.of("tone", 3, "").truncated
    assert (versions(history, limit=2), history.of("tone", 2, "").truncated) == (["tone@2", "tone@3"], True)
    history.on_event(update(4))
    assert (versions(history), history.of("tone", 3, "").truncated) == (["tone@2", "tone@3", "tone@4"], True)


def test_a_restart_finds_the_updates_and_evaluations_of_the_run(tmp_path: Path) -> None:
    tracking = Tracking({"jsonl": lambda: JsonlTracker(tmp_path / "metrics.jsonl")})
    evaluation = {"adapter": "tone", "version": "tone@2", "step": 2, "metrics": {"eval_mean": 0.75}}
    told = [update(1), update(1, status="held"), update(2), TrainingEvent("evaluation", 9.0, evaluation)]
    for event in told:
        tracking.on_event(event)
    tracking.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('[1]\n{"at": 9, "kind": "upd')
    found = recorded_events(tmp_path / "metrics.jsonl")
    assert [(event.kind, event.at, event.data) for event in found] == [(each.kind, each.at, each.data) for each in told]
    assert recorded_events(tmp_path / "none.jsonl") == []


def test_what_was_made_again_after_a_crash_is_there_once() -> None:
    history = EventHistory()
    history.on_event(update(2))
    history.restore([update(1), update(2)])
    history.on_event(update(3))
    assert versions(history) == ["tone@1", "tone@2", "tone@3"]
