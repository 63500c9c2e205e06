"""Our side of `studies/beside_trl.py`: one cell.

    python -m benchmarks.lib.programs.our_side ORDER.json

A program like `examples/serve_and_train.py`: the engine samples, this program gives the rewards, and the training of
the same process makes one update of all of them. All settings that TRL has no counterpart of keep their defaults.
"""

import asyncio
import json
import resource
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS

from mlx.utils import tree_map  # isort: skip

from benchmarks.lib.training.beside_tasks import (
    ADAPTER,
    GRADIENTS,
    RESULT,
    TASKS,
    Order,
    PairedTask,
    Rollout,
    Said,
    between_turns,
)
from benchmarks.lib.training.learning_tasks import Prompt
from mlx_parallm import LoRAConfig, RLConfig, RLIntegratedServer
from mlx_parallm.adapters.formats import write_peft
from mlx_parallm.app.build import Served
from mlx_parallm.config import OptimizerConfig
from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.requests import (
    FinishReason,
    GenerationRequest,
    RequestFailed,
    SamplingParams,
    SequenceOutput,
    StopParams,
)
from mlx_parallm.core.trajectories import GivenTrajectory
from mlx_parallm.rl.status import UpdateReport
from mlx_parallm.train.context import Params
from mlx_parallm.train.policy import Policy, PolicyState

POLICY = "default"
KEPT = ("loss", "grad_norm", "step_scale", "kl_step", "entropy")
"""Metrics of an update that the record keeps."""


@dataclass(slots=True)
class Sampled:
    """One answer while it is sampled."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    ended: bool = False

    @property
    def said(self) -> Said:
        return Said(self.text, self.ended)


@dataclass(slots=True)
class Played:
    """A conversation of one or two answers. `between`: what stands between them."""

    prompt: Prompt
    prompt_ids: tuple[int, ...]
    answers: list[Sampled]
    between: tuple[int, ...] = ()

    @property
    def tokens(self) -> tuple[int, ...]:
        """All up to the second answer."""
        return (*self.prompt_ids, *self.answers[0].tokens, *self.between)

    def trajectory(self, task: PairedTask, group_id: str, version: AdapterRef) -> GivenTrajectory:
        first, *rest = self.answers
        second = rest[0] if rest else Sampled()
        ones, zeros, twos = len(first.tokens), len(self.between), len(second.tokens)
        return GivenTrajectory(
            self.prompt_ids,
            (*first.tokens, *self.between, *second.tokens),
            task.rewarded(self.prompt, [each.said for each in self.answers]),
            group_id=group_id,
            sampling_logprobs=(*first.logprobs, *((0.0,) * zeros), *second.logprobs),
            adapter=version,
            mask=(True,) * ones + (False,) * zeros + (True,) * twos,
        )


class Side:
    """The running server with its policy."""

    def __init__(self, served: Served, order: Order) -> None:
        self._served, self._order = served, order
        self._requests = count()
        self.tokens = 0
        self.rollouts: list[Rollout] = []
        self.gradients: dict[str, np.ndarray[Any, Any]] = {}
        assert served.training is not None
        self._training = served.training

    async def begin(self) -> None:
        """Trains on from the adapter of the order."""
        await self._served.adapters.publish_folder(POLICY, Path(self._order.adapter))
        await self._training.start(POLICY)
        policy = self._training.parts.learner.trainer.policies[POLICY]
        if self._order.whole_steps:
            _make_whole_steps(policy)
        if self._order.keeps_gradients:
            self._keep_gradients(policy)

    async def learn(self) -> AsyncIterator[dict[str, float]]:
        """Makes the updates of the order."""
        began, spent = time.perf_counter(), time.process_time()
        for number, given in enumerate(self._batches()):
            trajectories = [each async for each in given]
            if self._order.keeps_gradients:
                self.rollouts = [_rollout(each) for each in trajectories]
            report = await self._training.update(POLICY, trajectories)
            rewards = [each.reward for each in trajectories if each.reward is not None]
            yield {
                "seconds": time.perf_counter() - began,
                "processor": time.process_time() - spent,
                "reward": float(np.mean(rewards)) if rewards else 0.0,
                **_figures(report, number),
            }

    def _batches(self) -> list[AsyncIterator[GivenTrajectory]]:
        order = self._order
        if order.given:
            return [_each(_of_rollouts(order.rollouts, order.hyper.group))]
        if order.data:
            return [_each(self._of_rows(rows)) for rows in order.batches()]
        task = TASKS[order.task]
        prompts, wanted = task.training(order.seed), order.hyper.prompts
        return [self._played(task, [next(prompts) for _ in range(wanted)]) for _ in range(order.updates)]

    # -- given answers ---------------------------------------------------------------------------

    def _of_rows(self, rows: Sequence[dict[str, Any]]) -> list[GivenTrajectory]:
        """Rows as TRL takes them: `chosen` and `rejected`, or `completion` with a `label` or without."""
        made: list[GivenTrajectory] = []
        for number, row in enumerate(rows):
            answers: list[tuple[str, float | None]]
            if "chosen" in row:
                answers = [(row["chosen"], 1.0), (row["rejected"], 0.0)]
            else:
                answers = [(row["completion"], float(row["label"]) if "label" in row else None)]
            made += [
                GivenTrajectory(self._ids(row["prompt"]), self._ids(text), reward, group_id=str(number))
                for text, reward in answers
            ]
        return made

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._served.tokenizer.encode(text))

    # -- sampled answers -------------------------------------------------------------------------

    async def _played(self, task: PairedTask, prompts: Sequence[Prompt]) -> AsyncIterator[GivenTrajectory]:
        """The answers to these prompts, sampled from the live version, and their rewards."""
        group, most = self._order.hyper.group, self._order.max_tokens
        with self._served.adapters.lease(POLICY) as version:
            ids = [self._ids(prompt.text) for prompt in prompts]
            firsts = await self._sample(ids, group, most, version)
            every = [(prompt, of_prompt) for prompt, of_prompt in zip(prompts, ids, strict=True) for _ in range(group)]
            played = [Played(prompt, ids, [first]) for (prompt, ids), first in zip(every, firsts, strict=True)]
            asked = [each for each in played if self._asks_again(task, each)]
            if asked:
                seconds = await self._sample([each.tokens for each in asked], 1, most, version)
                for each, second in zip(asked, seconds, strict=True):
                    each.answers.append(second)
            for number, each in enumerate(played):
                yield each.trajectory(task, str(number // group), version)

    def _asks_again(self, task: PairedTask, played: "Played") -> bool:
        """Adds the user's next message to the conversation, if there is one."""
        message = task.follow_up(played.prompt, played.answers[0].said)
        if message is not None:
            played.between = self._ids(between_turns(message, played.answers[0].ended))
        return message is not None

    async def _sample(
        self, prompts: Sequence[tuple[int, ...]], n: int, max_tokens: int, version: AdapterRef
    ) -> list[Sampled]:
        number = next(self._requests)
        seed = 1_000_000 * self._order.seed + 1000 * number
        answers = [Sampled() for _ in range(n * len(prompts))]
        request = GenerationRequest(
            str(number),
            tuple(prompts),
            SamplingParams(seed=seed, top_logprobs=0, processed_logprobs=True),
            StopParams(max_tokens),
            n=n,
            adapter=version,
        )
        async for event in self._served.generate(request):
            if isinstance(event, RequestFailed):
                raise event.error
            if isinstance(event, SequenceOutput):
                answer = answers[event.index]
                answer.tokens += event.token_ids
                answer.logprobs += [each.logprob for each in event.logprobs]
                answer.text += event.text
                answer.ended = answer.ended or event.finish_reason is FinishReason.STOP
        self.tokens += sum(len(answer.tokens) for answer in answers)
        return answers

    # -- what is kept ----------------------------------------------------------------------------

    async def save(self, folder: Path) -> None:
        """Writes the adapter in PEFT's format."""
        trainer = self._training.parts.learner.trainer
        with self._served.known.registry.lease(POLICY) as version:
            weights = await self._served.adapters.weights(version)
        folder.mkdir(parents=True, exist_ok=True)
        write_peft(folder, weights, trainer.model.layout, self._order.model)

    def _keep_gradients(self, policy: Policy) -> None:
        stepped = policy.stepped

        def watched(gradients: Params, settings: OptimizerConfig, scale: float = 1.0) -> PolicyState:
            if not self.gradients:
                self.gradients = {
                    f"{path}.lora_{name}": np.array(each) for path, of in gradients.items() for name, each in of.items()
                }
            return stepped(gradients, settings, scale)

        policy.stepped = watched  # type: ignore[method-assign]


def _make_whole_steps(policy: Policy) -> None:
    """Scales the gradients of the policy's steps as ever, and not the steps themselves."""
    stepped = policy.stepped

    def whole(gradients: Params, settings: OptimizerConfig, scale: float = 1.0) -> PolicyState:
        return stepped(tree_map(lambda each: scale * each, gradients), settings)

    policy.stepped = whole  # type: ignore[method-assign]


def _figures(report: UpdateReport, number: int) -> dict[str, Any]:
    metrics = report.metrics
    kept = {name: metrics[name] for name in KEPT if name in metrics}
    if report.status not in ("published", "trained"):
        print(f"update {number + 1}: {report.status}, {report.reason}", flush=True)
    return {**kept, "status": report.status, "reason": report.reason}


def _of_rollouts(rollouts: Sequence[Rollout], group: int) -> list[GivenTrajectory]:
    return [
        GivenTrajectory(
            tuple(each.prompt_ids),
            tuple(each.completion_ids),
            each.reward,
            group_id=str(number // group),
            mask=tuple(each.mask),
        )
        for number, each in enumerate(rollouts)
    ]


def _rollout(sampled: GivenTrajectory) -> Rollout:
    reward = sampled.reward or 0.0
    return Rollout(sampled.prompt_ids, sampled.completion_ids, sampled.mask, reward, sampled.sampling_logprobs)


async def _each(given: Sequence[GivenTrajectory]) -> AsyncIterator[GivenTrajectory]:
    for one in given:
        yield one


async def run(order: Order) -> None:
    setting, folder = order.hyper, Path(order.folder)
    server = RLIntegratedServer(
        lora_config=LoRAConfig(rank=setting.rank, alpha=setting.alpha),
        rl_config=RLConfig(
            algorithm=order.loss,
            learning_rate=setting.learning_rate,
            batch_size=setting.prompts * setting.group,
            clip_low=setting.clip_low,
            clip_high=setting.clip_high,
            scale_rewards=order.scale_rewards,
            seed=order.seed,
        ),
        rl_training__max_completion_tokens=order.max_tokens,
        rl_training__loss__preference_beta=setting.preference_beta,
        rl_training__optimizer__beta1=setting.beta1,
        rl_training__optimizer__beta2=setting.beta2,
        rl_training__optimizer__eps=setting.eps,
        rl_training__optimizer__weight_decay=setting.weight_decay,
        rl_training__optimizer__max_grad_norm=setting.max_grad_norm,
        checkpointing__checkpoint_dir=str(folder / "run"),
        rl_training__optimizer__max_kl_step=order.max_kl_step,
    )
    async with server.session() as served:
        side = Side(served, order)
        await side.begin()
        updates = [update async for update in side.learn()]
        await side.save(folder / ADAPTER)
    if order.keeps_gradients:
        np.savez(folder / GRADIENTS, **side.gradients)  # type: ignore[arg-type]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    result = {"updates": updates, "peak_mb": peak, "tokens": side.tokens}
    if side.rollouts:
        result["rollouts"] = [asdict(each) for each in side.rollouts]
    (folder / RESULT).write_text(json.dumps(result))


if __name__ == "__main__":
    asyncio.run(run(Order.read(Path(sys.argv[1]))))
