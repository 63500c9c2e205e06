"""Distillation as `mlx_parallm_train` and a server run it: the teacher is the base model with a text of its own."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path

import mlx.core as mx
import pytest
from app.test_server import LORA, RL, free_port, running
from lora import layout_of, merged, random_adapter
from tiny import save_tiny
from training_runs import GROUP, PROMPTS, View, config

from mlx_parallm import RLConfig, RLIntegratedServer
from mlx_parallm.adapters.weights import VersionInfo
from mlx_parallm.app.train import TrainOptions, run
from mlx_parallm.core.trajectories import GivenTrajectory
from mlx_parallm.errors import TrainingFailedError
from mlx_parallm.extras.engines.http import EngineServer
from mlx_parallm.extras.engines.teacher import server_score
from mlx_parallm.rl.teachers import Teacher, engine_score
from mlx_parallm.train.data import answered

pytestmark = pytest.mark.ci


def tasks(folder: Path) -> str:
    """Of which every answer has the same reward."""
    file = folder / "tasks.jsonl"
    rows = [{"prompt": f"{n} + 1 =", "answer": "no answer of so small a model is this"} for n in range(4)]
    file.write_text("\n".join(map(json.dumps, rows)))
    return str(file)


@pytest.mark.timeout(120)
def test_a_run_learns_from_the_base_model_with_a_prompt_of_its_own(tmp_path: Path) -> None:
    file, prompt = tasks(tmp_path), tmp_path / "prompt.txt"
    prompt.write_text("z z z z z z ")
    keys = {"rl_training__environment": file, "rl_training__teacher__prompt": f"@{prompt}"}
    view = View()
    assert run(config(tmp_path, "distillation", **keys), TrainOptions(file, 3, GROUP, PROMPTS), view) == 0
    assert [report.status for report in view.reports] == ["published"] * 3, "equal rewards are no matter"
    assert all(report.metrics["reward_mean"] == 0.0 for report in view.reports)
    assert all(abs(report.metrics["loss"]) > 1e-3 for report in view.reports), "the teacher is not the student"


@pytest.mark.timeout(120)
def test_no_step_is_spent_while_the_teacher_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, prompt, view = tasks(tmp_path), tmp_path / "prompt.txt", View()
    prompt.write_text("z z z z z z ")
    monkeypatch.setattr("mlx_parallm.app.training_run.UNTAUGHT_S", 0.0)
    logprobs, calls = Teacher.logprobs, count()

    async def away_at_first(self, samples):
        return (((),) * len(samples), "away") if next(calls) < 2 else await logprobs(self, samples)

    monkeypatch.setattr(Teacher, "logprobs", away_at_first)
    keys = {"rl_training__environment": file, "rl_training__teacher__prompt": f"@{prompt}"}
    assert run(config(tmp_path, "distillation", **keys), TrainOptions(file, 2, GROUP, PROMPTS), view) == 0
    assert [report.status for report in view.reports] == ["published"] * 2


@pytest.mark.timeout(120)
def test_a_teacher_that_cannot_be_asked_ends_the_run_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, view = tasks(tmp_path), View()
    keys = {
        "rl_training__environment": file,
        "rl_training__teacher__url": f"http://127.0.0.1:{free_port()}",
        "rl_training__teacher__model": "big",
        "rl_training__teacher__timeout_s": 5,
    }
    monkeypatch.setattr("mlx_parallm.app.training_run.UNTAUGHT_S", 0.0)
    with pytest.raises(TrainingFailedError, match="nothing can be learnt: the teacher failed: the teacher's engine at"):
        run(config(tmp_path, "distillation", **keys), TrainOptions(file, 1, GROUP, PROMPTS), view)
    assert not view.reports


@pytest.mark.timeout(120)
async def test_a_server_of_this_kind_can_teach_another_one(tmp_path: Path) -> None:
    """Over HTTP it gives the log-probabilities that its engine has."""
    save_tiny("llama", tmp_path / "model")
    server, port = RLIntegratedServer(tmp_path / "model", LORA, RL, server__kv_cache_memory="16MB"), free_port()
    async with running(server.run_inference(port=port), port=port):
        over_http = EngineServer("teacher's", f"http://127.0.0.1:{port}/v1", "", 30.0)
        ids = (1, 5, 7, 9, 11)
        got = await server_score(over_http, "base")(ids, 1)
        await over_http.close()
        async with server.session() as served:
            want = await engine_score(served.engine, served.adapters, None)(ids, 1)
    assert got[0] is want[0] is None
    assert got[1:] == pytest.approx(want[1:], abs=1e-4)


@pytest.mark.timeout(120)
async def test_an_adapter_of_the_server_teaches_as_the_model_with_its_weights_merged_in(tmp_path: Path) -> None:
    """`--teacher-adapter`. Until the adapter is loaded, updates are skipped and say so."""
    model, prompt, answer = save_tiny("llama", tmp_path / "model"), (1, 5, 7), (9, 11)
    weights = random_adapter(layout_of(model), seed=1)
    keys = {"server__kv_cache_memory": "16MB", "rl_training__teacher__adapter": "tone"}
    rl = RLConfig(algorithm="distillation", learning_rate=1e-3, batch_size=4)
    logits = merged(model, weights)(mx.array([[*prompt, *answer]]))[0].astype(mx.float32)
    logprobs = (logits - mx.logsumexp(logits, axis=-1, keepdims=True)).tolist()
    given = [GivenTrajectory(prompt, answer, sampling_logprobs=(-5.0, -5.0))]
    async with RLIntegratedServer(tmp_path / "model", LORA, rl, **keys).session() as served:
        report = await served.training.update(given=given)
        assert report.status == "skipped"
        assert "the teacher failed: " in report.reason
        assert "tone" in report.reason
        await served.adapters.publish("tone", weights, VersionInfo.of(weights))
        ((first, second),), problem = await served.training.parts.teacher.logprobs([answered(prompt, answer)])
        report = await served.training.update(given=given)
    assert problem == ""
    assert (first, second) == pytest.approx((logprobs[2][9], logprobs[3][11]), abs=1e-4)
    assert report.status == "published"
    assert abs(report.metrics["loss"]) > 1e-3, "the teacher is not the student"
