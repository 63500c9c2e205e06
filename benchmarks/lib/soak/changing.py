"""What changes a server while it answers: publishes, updates from every source, and things that are loaded again."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any

from benchmarks.lib.prompts import WORDS
from benchmarks.lib.soak import asking
from benchmarks.lib.soak.asking import GoesOn, ask
from benchmarks.lib.soak.good import ADAPTERS, GREEDY, GUEST, SWAPPED, Clients, Question

OTHER_BASE = "other"
"""Name of the second base model, which is unloaded when it has been idle."""
PUBLISH_S, LEARN_S, GROUP_S, TINKER_S, RELOAD_S = 4.0, 2.0, 6.0, 15.0, 20.0
"""Seconds from the beginning of one change to that of the next of its kind."""
REWARDED = {"scoring_function": "regex", "metadata": {"pattern": "(?s)^(..)*$"}}
ADAM = {"learning_rate": 1e-4}
GROUP_TOKENS = [[5, 6, 8, 2], [5, 6, 9, 2]]


class Changes:
    """The changes, with the keys of somebody who may train and of an admin."""

    def __init__(self, clients: Clients, port: int, train: str, admin: str, goes_on: GoesOn) -> None:
        self.told = clients.told
        self._clients = clients
        self._port, self._train, self._admin, self._goes_on = port, train, admin, goes_on
        self._dice, self._numbers = random.Random(1), count()
        self._environment: int | None = None

    async def run(self) -> None:
        await asyncio.gather(
            self._every(PUBLISH_S, self._publish),
            self._every(LEARN_S, self._learn),
            self._every(GROUP_S, self._send_group),
            self._every(TINKER_S, self._tinker),
            self._every(RELOAD_S, self._reload),
        )

    async def _every(self, seconds: float, change: Callable[[], Awaitable[None]]) -> None:
        while await self._goes_on():
            began, process = time.monotonic(), self._clients.process()
            try:
                await change()
            except _NoAnswerError as error:
                self._environment = None
                if process == self._clients.process():  # a server that was started again has forgotten sessions
                    self.told.faults += error.args
            await asyncio.sleep(max(0.0, began + seconds - time.monotonic()))

    async def post(self, path: str, body: dict[str, Any], key: str = "", *expected: int) -> Any:
        """The decoded answer. Raises _NoAnswerError if there is none to go on with, with the fault unless the status
        is expected."""
        reply = await ask(self._port, path, body, key or self._train)
        if reply.refused:
            self.told.refused.append((reply.sent, reply.ended, reply.about(path, body)))
            raise _NoAnswerError
        self.told.took(f"change: {'/'.join(path.split('/')[:4])}", reply)
        if reply.status in expected:
            raise _NoAnswerError
        if reply.status != 200:
            raise _NoAnswerError(f"no answer: {reply.about(path, body)}")
        return reply.json() if reply.body.startswith((b"{", b"[")) else reply.body

    # -- each kind of change -----------------------------------------------------------------------

    async def _publish(self) -> None:
        """Loads one of the adapters in place of another one, and asks it for an answer at once."""
        adapter, process = ADAPTERS[next(self._numbers) % len(ADAPTERS)], self._clients.process()
        body = {"lora_name": SWAPPED, "lora_path": adapter, "load_inplace": True}
        await self.post("/v1/load_lora_adapter", body)
        self.told.counts["publishes"] += 1
        self._clients.versions.published = process
        body = {"prompt": "a", "max_tokens": 1, "model": SWAPPED, **GREEDY}
        answer = await self._clients.answer(Question(asking.COMPLETIONS, body))
        if answer is not None and (wrong := self._clients.versions.conflict(process, answer.version, [adapter])):
            self.told.faults.append(f"another version after a publish: {wrong}")

    async def _learn(self) -> None:
        """Collects a group of answers, which a scoring function or the client itself rewards."""
        text = " ".join(self._dice.choices(WORDS, k=8))
        scored = bool(self._dice.randrange(2))
        body: dict[str, Any] = {"prompt": text, "n": 4, "max_tokens": 8, "collect_trajectory": True}
        answer = await self.post(asking.COMPLETIONS, body | (REWARDED if scored else {}))
        for trajectory in () if scored else answer["trajectory_ids"]:
            feedback = {"trajectory_id": trajectory, "score": self._dice.random()}
            await self.post("/v1/training/feedback", feedback, "", 409)  # an update has taken the group meanwhile

    async def _send_group(self) -> None:
        """Sends a group as an Atropos environment does."""
        if self._environment is None:
            named = {"max_token_length": 64, "desired_name": "soak", "weight": 1.0, "group_size": 2}
            self._environment = (await self.post("/register-env", named))["env_id"]
        masks = [[-100, -100, *tokens[2:]] for tokens in GROUP_TOKENS]
        group = {"tokens": GROUP_TOKENS, "masks": masks, "scores": [1.0, 0.0], "env_id": self._environment}
        await self.post("/scored_data", group)

    async def _tinker(self) -> None:
        """Makes a model as a Tinker client does, trains it, samples from it, and ends the session."""
        session = (await self._tinker_post("create_session", tags=[], sdk_version="0.24.1"))["session_id"]
        lora = {"session_id": session, "model_seq_id": 0, "base_model": "model", "lora_config": {"rank": 4}}
        model = (await self._result(await self._tinker_post("create_model", **lora)))["model_id"]
        targets = {"data": [6, 8, 2], "dtype": "int64", "shape": [3]}
        weights = {"data": [0.0, 1.0, 1.0], "dtype": "float32", "shape": [3]}
        chunks = [{"type": "encoded_text", "tokens": [5, 6, 8]}]
        datum = {"model_input": {"chunks": chunks}, "loss_fn_inputs": {"target_tokens": targets, "weights": weights}}
        given = {"data": [datum], "loss_fn": "cross_entropy"}
        operations: tuple[tuple[str, dict[str, Any]], ...] = (
            ("forward_backward", {"forward_backward_input": given}),
            ("optim_step", {"adam_params": ADAM}),
            ("save_weights_for_sampler", {"sampling_session_seq_id": 0}),
        )
        for number, (operation, body) in enumerate(operations, 1):
            answer = await self._tinker_post(operation, model_id=model, seq_id=number, **body)
            result = await self._result(answer)
        sampled = {"max_tokens": 8, "seed": 3, "temperature": 0.7}
        sampler = {"sampling_session_id": result["sampling_session_id"], "num_samples": 2, "seq_id": 0}
        await self._result(
            await self._tinker_post("asample", prompt={"chunks": chunks}, sampling_params=sampled, **sampler)
        )
        await self._tinker_post(f"sessions/{session}/finish")
        self.told.counts["Tinker sessions"] += 1

    async def _tinker_post(self, path: str, **body: Any) -> Any:
        return await self.post(f"/api/v1/{path}", body)

    async def _result(self, future: dict[str, Any]) -> Any:
        while True:
            result = await self._tinker_post("retrieve_future", request_id=future["request_id"])
            if result.get("type") != "try_again":
                return result

    async def _reload(self) -> None:
        """Loads an adapter and unloads it, makes the server load its second base model again, and forgets prefixes."""
        await self.post("/v1/load_lora_adapter", {"lora_name": GUEST, "lora_path": ADAPTERS[0], "load_inplace": True})
        await self.post("/v1/unload_lora_adapter", {"lora_name": GUEST})
        body = {"prompt": "a b c", "max_tokens": 4, "model": OTHER_BASE, **GREEDY}
        await self._clients.answer(Question(asking.COMPLETIONS, body))
        await self.post("/reset_prefix_cache", {}, self._admin)
        self.told.counts["reloads"] += 1


class _NoAnswerError(Exception):
    """No answer to go on with. `args`: the fault, if it is one."""
