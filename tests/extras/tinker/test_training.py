"""The Tinker API of a whole server with a tiny model: it learns, what it samples agrees with what it trains, and two
clients do not disturb each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from app.test_server import serving
from tiny import save_tiny

from mlx_parallm import LoRAConfig, RLConfig, RLIntegratedServer

pytestmark = [pytest.mark.ci, pytest.mark.timeout(120)]
PROMPT, ANSWER = [10, 11, 12, 13], [40, 41, 42, 43, 44]


def make(tmp_path: Path, **keys: Any) -> RLIntegratedServer:
    if not (tmp_path / "model").exists():
        save_tiny("llama", tmp_path / "model")
    return RLIntegratedServer(
        tmp_path / "model",
        LoRAConfig(rank=4, alpha=8.0),
        RLConfig(batch_size=4),
        server__kv_cache_memory="16MB",
        checkpointing__checkpoint_dir=tmp_path / "checkpoints",
        debug__check_when_idle=True,
        **keys,
    )


class Model:
    """One model of a client, with its numbered requests."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http
        self.session = self.model = ""
        self.number = 0

    async def post(self, path: str, /, **body: Any) -> dict[str, Any]:
        response = await self.http.post(f"/api/v1/{path}", json=body)
        assert response.status_code == 200, response.text
        return response.json()

    async def result(self, request_id: str) -> dict[str, Any]:
        while (answer := await self.post("retrieve_future", request_id=request_id)).get("type") == "try_again":
            pass
        return answer

    async def start(self, seed: int = 1, rank: int = 4) -> Model:
        self.session = (await self.post("create_session"))["session_id"]
        body = {"session_id": self.session, "model_seq_id": 0, "base_model": "base-model"}
        asked = await self.post("create_model", **body, lora_config={"rank": rank, "seed": seed})
        self.model = (await self.result(asked["request_id"]))["model_id"]
        return self

    async def begin(self, path: str, /, **body: Any) -> str:
        self.number += 1
        return (await self.post(path, model_id=self.model, seq_id=self.number, **body))["request_id"]

    async def ask(self, path: str, /, **body: Any) -> dict[str, Any]:
        answer = await self.result(await self.begin(path, **body))
        assert "error" not in answer, answer
        return answer

    async def update(self, data: list[Any], loss: str, rate: float) -> float:
        scored = await self.begin("forward_backward", forward_backward_input={"data": data, "loss_fn": loss})
        stepped = await self.begin("optim_step", adam_params={"learning_rate": rate})
        value = (await self.result(scored))["metrics"]["loss:sum"]
        assert (await self.result(stepped))["metrics"]["grad_norm"] > 0
        return value

    async def sample(self, sampler: str, number: int, count: int = 8, **params: Any) -> dict[str, Any]:
        prompt = {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]}
        asked = await self.post(
            "asample",
            prompt=prompt,
            num_samples=count,
            sampling_params={"max_tokens": 4, "seed": 100 * number, **params},
            sampling_session_id=sampler,
            seq_id=number,
            prompt_logprobs=True,
        )
        answer = await self.result(asked["request_id"])
        assert "error" not in answer, answer
        return answer


def floats(*values: float) -> dict[str, Any]:
    return {"data": list(values), "dtype": "float32", "shape": [len(values)]}


def ints(*values: int) -> dict[str, Any]:
    return {"data": list(values), "dtype": "int64", "shape": [len(values)]}


def taught(prompt: list[int], answer: list[int]) -> dict[str, Any]:
    """A datum of supervised learning, as the cookbook makes it."""
    tokens = [*prompt, *answer]
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(answer)
    inputs = {"target_tokens": ints(*tokens[1:]), "weights": floats(*weights)}
    return {"model_input": {"chunks": [{"tokens": tokens[:-1]}]}, "loss_fn_inputs": inputs}


async def test_a_supervised_run_is_saved_loaded_and_sampled(tmp_path: Path) -> None:
    data = [taught(PROMPT, ANSWER), taught([20, 21], [50, 51])]
    async with serving(make(tmp_path), trains=False) as http:
        model = await Model(http).start()
        losses = [await model.update(data, "cross_entropy", 0.005)]
        while losses[-1] > 0.5 and len(losses) < 200:
            losses.append(await model.update(data, "cross_entropy", 0.005))
        assert losses[-1] <= 0.5, "in all, so each token of both answers has more than half of the probability"
        scored = await model.ask("forward", forward_input={"data": data[:1], "loss_fn": "cross_entropy"})
        logprobs = scored["loss_fn_outputs"][0]["logprobs"]["data"]
        assert scored["metrics"]["loss:sum"] == pytest.approx(-sum(logprobs[len(PROMPT) - 1 :]), rel=1e-5)
        assert min(logprobs) < 0, "of the prompt too"

        saved = (await model.ask("save_weights_for_sampler", sampling_session_seq_id=0))["sampling_session_id"]
        answer = await model.sample(saved, 1, temperature=0.0)
        tokens = answer["sequences"][0]["tokens"]
        assert tokens[:3] == ANSWER[:3]
        given = {"data": [taught(PROMPT, tokens)], "loss_fn": "cross_entropy"}
        (output,) = (await model.ask("forward", forward_input=given))["loss_fn_outputs"]
        sampled = [*answer["prompt_logprobs"][1:], *answer["sequences"][0]["logprobs"]]
        assert answer["prompt_logprobs"][0] is None
        assert sampled == pytest.approx(output["logprobs"]["data"], abs=1e-5), "sampled and trained logprobs agree"

        path = (await model.ask("save_weights", path="taught"))["path"]
        again = Model(http)
        again.session = model.session
        asked = await again.post(
            "load_weights", session_id=model.session, model_seq_id=1, path=path, optimizer=True, base_model="base-model"
        )
        again.model = (await again.result(asked["request_id"]))["model_id"]
        same = await again.ask("forward", forward_input={"data": data[:1], "loss_fn": "cross_entropy"})
        assert same["loss_fn_outputs"] == scored["loss_fn_outputs"]
        ahead = [await each.update(data, "cross_entropy", 0.01) for each in (model, again) for _ in range(2)]
        assert ahead[:2] == ahead[2:], "the optimizer's state was loaded too"
        chat = {"model": str(again.model).replace(":train:", "-") + "@1", "prompt": PROMPT, "max_tokens": 1}
        assert (await http.post("/v1/completions", json=chat)).status_code == 404, "it was never published"

    async with serving(make(tmp_path, checkpointing__resume=True), trains=False) as http:
        model = Model(http)
        session = (await model.post("create_session"))["session_id"]
        made = await model.post(
            "create_sampling_session", session_id=session, sampling_session_seq_id=0, model_path=path
        )
        answer = await model.sample(made["sampling_session_id"], 1, temperature=0.0)
        assert answer["sequences"][0]["tokens"] == tokens, "after a restart too"


async def test_limits_of_ranks_and_models(tmp_path: Path) -> None:
    async with serving(make(tmp_path, rl_training__tinker__max_models=1), trains=False) as http:
        model = await Model(http).start()

        async def create(number: int, **lora: Any) -> dict[str, Any]:
            body = {"session_id": model.session, "model_seq_id": number, "base_model": "base-model"}
            return await model.result((await model.post("create_model", **body, lora_config=lora))["request_id"])

        assert "--max-lora-rank 64" in (await create(1, rank=64))["error"]
        assert "max_models" in (await create(2, rank=2))["error"]
        info = await model.post("get_info", model_id=model.model)
        assert info["model_data"]["tokenizer_id"] == str((tmp_path / "model").resolve())
        assert info["lora_rank"] == 4
        await model.post(f"sessions/{model.session}/finish")
        model = await Model(http).start()
        failed = await model.result(await model.begin("optim_step", adam_params={}))
        assert (failed["category"], "gradients" in failed["error"]) == ("user", True)
