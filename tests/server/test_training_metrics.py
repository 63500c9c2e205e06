"""What a scrape says of training."""

import pytest

from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.rl.status import EvaluationResult, RolloutStatus, TrainingStatus

POLICY = TrainingStatus(
    state="updating",
    adapter="policy",
    step=6,
    trajectories_collected=640,
    trajectories_waiting=32,
    groups_ready=4,
    groups_open=2,
    updates_total=5,
    updates_per_second=0.125,
    last_update=1_800_000_000.0,
    metrics={
        "loss": -0.5,
        "reward_mean": 0.75,
        "reward_std": 0.25,
        "kl": 0.0625,
        "entropy": 1.5,
        "clip_fraction": 0.375,
        "dual_clip_fraction": 0.125,
        "ratio_mean": 1.0,
        "ratio_max": 7.5,
        "staleness": 0.5,
    },
    drops={"stale": 8, "zero_variance": 16},
    skips={"not_finite": 1},
    rollouts=RolloutStatus("words", "drawing", 9, 6, 2, "", ()),
    diverged={("kl_step", "hold"): 2, ("reward", "roll_back"): 1},
    reward_running_mean=0.875,
    evaluation=EvaluationResult(AdapterRef("policy", 5), 5, 0.5, 0.25, 0.75, 32, 1, 5.0),
    trained=("policy", "code"),
)
CODE = TrainingStatus(state="paused", adapter="code", trajectories_collected=3, trained=("policy", "code"))
NAMES = {
    "trajectories_collected": ("gauge", 640),
    "training_loss": ("gauge", -0.5),
    "updates_per_second": ("gauge", 0.125),
    "trajectories_waiting": ("gauge", 32),
    "groups_open": ("gauge", 2),
    "groups_ready": ("gauge", 4),
    "step": ("gauge", 6),
    "updates_total": ("counter", 5),
    "reward_mean": ("gauge", 0.75),
    "reward_std": ("gauge", 0.25),
    "reward_running_mean": ("gauge", 0.875),
    "kl": ("gauge", 0.0625),
    "entropy": ("gauge", 1.5),
    "clip_fraction": ("gauge", 0.375),
    "dual_clip_fraction": ("gauge", 0.125),
    "ratio": ("gauge", 1.0),
    "ratio_max": ("gauge", 7.5),
    "staleness": ("gauge", 0.5),
    "evaluation_mean": ("gauge", 0.5),
    "evaluation_low": ("gauge", 0.25),
    "evaluation_high": ("gauge", 0.75),
    "evaluation_answers": ("gauge", 32),
    "evaluation_step": ("gauge", 5),
    "last_update_timestamp_seconds": ("gauge", 1_800_000_000),
}


async def rl_lines(client):
    """Every line of ours, comments included."""
    text = (await client.get("/metrics")).text
    return [line for line in text.splitlines() if "mlx_parallm_rl_" in line]


async def samples(client):
    lines = [line.rpartition(" ") for line in await rl_lines(client) if not line.startswith("#")]
    return {name.removeprefix("mlx_parallm_rl_"): float(value) for name, _, value in lines}


async def test_names_kinds_and_figures(client, training):
    training.state = {"policy": POLICY, "code": CODE}
    lines, figures = await rl_lines(client), await samples(client)
    for name, (kind, value) in NAMES.items():
        assert f"# TYPE mlx_parallm_rl_{name} {kind}" in lines
        assert figures[f'{name}{{adapter="policy"}}'] == value
    assert "# TYPE mlx_parallm_rl_dropped_total counter" in lines
    assert figures['dropped_total{adapter="policy",reason="stale"}'] == 8
    assert figures['dropped_total{adapter="policy",reason="zero_variance"}'] == 16
    assert figures['skipped_total{adapter="policy",reason="not_finite"}'] == 1
    assert figures['rollouts_total{adapter="policy",reason="drawn"}'] == 6
    assert figures['rollouts_total{adapter="policy",reason="failed"}'] == 2
    assert figures['state{adapter="policy",state="updating"}'] == 1


async def test_what_is_not_known_yet_has_no_sample(client, training):
    training.state = {"policy": POLICY, "code": CODE}
    of_code = {name for name in await samples(client) if 'adapter="code"' in name}
    assert {name.partition("{")[0] for name in of_code} == {
        *(
            "trajectories_collected",
            "trajectories_waiting",
            "groups_ready",
            "groups_open",
            "step",
            "updates_per_second",
        ),
        *("updates_total", "state"),
    }


@pytest.mark.parametrize("training", [None])
async def test_with_training_off_the_names_are_there_and_nothing_is_collected(client):
    lines = await rl_lines(client)
    for name, (kind, _) in NAMES.items():
        assert f"# TYPE mlx_parallm_rl_{name} {kind}" in lines
    assert [line for line in lines if not line.startswith("#")] == ["mlx_parallm_rl_trajectories_collected 0.0"]


async def test_divergences_are_counted_by_signal_and_action(client, training):
    training.state = {"policy": POLICY, "code": CODE}
    figures = await samples(client)
    assert {name: value for name, value in figures.items() if name.startswith("divergences")} == {
        'divergences_total{action="hold",adapter="policy",signal="kl_step"}': 2,
        'divergences_total{action="roll_back",adapter="policy",signal="reward"}': 1,
    }
