"""Training on several ranks of this machine: the versions, checkpoints and answers are those of one rank."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from main_job.ranks import flags_of, rank_environments, started
from main_job.serving import Server, in_thread

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

UPDATES = 3
PROMPTS = (
    "The quick brown fox jumps over the lazy dog",
    "Once upon a time there was a king who",
    "2 + 2 = 4, and 3 + 3",
)
TRAIN = ("--enable-rl-training", "--lora-rank", "4", "--lora-alpha", "8")
TARGETS = ("--lora-target-modules", "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj")
TRAIN_COMMAND = (sys.executable, "-c", "import sys; from mlx_parallm.cli.main import train; sys.exit(train())")
CLIPPED = 0.1
"""The norm to which gradients are scaled down: those of all updates here are larger."""


def flags(folder: Path) -> tuple[str, ...]:
    """Checkpoints after every update, in this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "config.yaml"
    optimizer = f"rl_training:\n  optimizer:\n    max_grad_norm: {CLIPPED}\n"
    config.write_text(f"checkpointing:\n  interval: 1\n{optimizer}")
    checkpoints = ("--config", str(config), "--checkpoint-dir", str(folder / "checkpoints"))
    return (*TRAIN, *TARGETS, *checkpoints, "--learning-rate", "0.01", "--log-level", "warning")


def trajectories(step: int) -> list[dict[str, Any]]:
    """Two groups of four, the same in every run."""
    dice = random.Random(step)
    prompts = [[dice.randrange(10, 250) for _ in range(12)] for _ in range(2)]
    return [
        {
            "prompt_token_ids": prompt,
            "completion_token_ids": [dice.randrange(10, 250) for _ in range(dice.randrange(4, 12))],
            "reward": dice.random(),
            "group_id": str(group),
        }
        for group, prompt in enumerate(prompts)
        for _ in range(4)
    ]


def update(server: Server, step: int) -> dict[str, Any]:
    answer = server.post("/v1/training/update", trajectories=trajectories(step))
    assert answer["step"] == step
    return answer  # type: ignore[no-any-return]


def trained(server: Server) -> list[float]:
    """The logprobs of the prompts under the adapter after `UPDATES` updates, of which all were clipped."""
    for step in range(1, UPDATES + 1):
        assert update(server, step)["metrics"]["grad_norm"] > CLIPPED
    return scored(server)


def scored(server: Server, model: str = "default", prompts: Sequence[str] = PROMPTS) -> list[float]:
    """The logprobs of the tokens of these prompts, without the first one of each."""
    body = {"model": model, "prompt": list(prompts), "max_tokens": 0, "echo": True, "logprobs": 0}
    choices = server.post("/v1/completions", **body)["choices"]
    return [value for choice in choices for value in choice["logprobs"]["token_logprobs"][1:]]


def far(one: Sequence[float], other: Sequence[float]) -> float:
    return max(abs(mine - its) for mine, its in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return flags_of("llama", tmp_path_factory.mktemp("model"))


def test_two_ranks_learn_what_one_learns_and_one_goes_on_from_their_checkpoint(
    model: list[str], tmp_path: Path
) -> None:
    with in_thread(*model, *flags(tmp_path / "one")) as server:
        before, want = scored(server, "base"), trained(server)
    with started([*model, *flags(tmp_path / "two")], tmp_path) as (server, _):
        got = trained(server)
    print(f"tiny: {far(got, want):.2e} apart, {far(want, before):.2e} learnt")
    assert far(want, before) > 0.01
    assert far(got, want) < 1e-4
    with in_thread(*model, *flags(tmp_path / "two")) as server:
        assert far(scored(server), got) < 1e-4
        assert update(server, UPDATES + 1)["status"] == "published"


def test_the_train_command_runs_on_two_ranks_and_one_serves_its_checkpoint(model: list[str], tmp_path: Path) -> None:
    tasks, rewards = tmp_path / "tasks.jsonl", tmp_path / "rewards.py"
    rewards.write_text("def score(completion):\n    return len(set(completion)) / 8\n")
    tasks.write_text("".join(json.dumps({"prompt": f"{at} + 1 =", "answer": f"{at + 1}"}) + "\n" for at in range(4)))
    steps = ("--environment", str(tasks), "--reward", f"{rewards}:score", "--steps", "2", "--group-size", "4")
    command = (*TRAIN_COMMAND, *model, *flags(tmp_path / "run")[1:], *steps, "--max-tokens", "8")
    ranks = [
        subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, env=environment)
        for environment in rank_environments(2, tmp_path)
    ]
    try:
        printed, _ = ranks[0].communicate(timeout=200)
        assert (ranks[0].returncode, ranks[1].wait(30)) == (0, 0)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert "2 published" in printed
    with in_thread(*model, "--checkpoint-dir", str(tmp_path / "run" / "checkpoints")) as server:
        assert far(scored(server), scored(server, "base")) > 0.001
