"""Updates of rewarded answers in this process: a trainer, the rewards that it remembers, and a plain sampler.

What an update learns is computed as in a server that gets the rewards as feedback. There is no server: a second copy of
the model, with the adapter merged into its weights, samples all answers in one batch.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS

import mlx.core as mx  # isort: skip
from mlx_lm.models.cache import make_prompt_cache

from mlx_parallm.app.parts import Parts
from mlx_parallm.app.training import footprint_of, trainable
from mlx_parallm.config import ModelConfig, RLTrainingConfig
from mlx_parallm.core.requests import CollectionSpec, FinishReason
from mlx_parallm.core.trajectories import Trajectory
from mlx_parallm.model.manager import SharedModelManager
from mlx_parallm.rl.objectives import ScoredGroup, prepare
from mlx_parallm.rl.rewards import RewardHistory
from mlx_parallm.rl.trajectories import FEEDBACK, Episode
from mlx_parallm.rl.updates.plateau import Plateau
from mlx_parallm.train.context import Params
from mlx_parallm.train.data import UpdateOutcome, answered
from mlx_parallm.train.policy import Policy
from mlx_parallm.train.trainer import GRPOTrainer

T = TypeVar("T")
MEMORY = 8 << 30
MICRO_BATCH_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Answer:
    """One sampled answer: its tokens, with that which ended it, their logprobs, and its text."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    ended: bool


class Sampler:
    """Samples answers of a policy at temperature 1."""

    def __init__(self) -> None:
        manager = SharedModelManager(progress=False)
        self.tokenizer = manager.tokenizer
        self._model = manager.model
        self._modules = dict(manager.model.named_modules())
        self._weights: dict[str, mx.array] = {}
        (self._end,) = manager.tokenizer.encode("<|im_end|>")

    def put(self, params: Params, scale: float) -> None:
        """Merges these factors into the weights."""
        for path, pair in params.items():
            plain = self._weights.setdefault(path, self._modules[path].weight)
            self._modules[path].weight = plain + (scale * (pair["a"] @ pair["b"])).T
        mx.eval([self._modules[path].weight for path in params])

    def sample(self, prompts: Sequence[str], count: int, max_tokens: int, key: mx.array) -> list[list[Answer]]:
        """`count` answers to each prompt. All prompts have the same number of tokens."""
        ids = [tuple(self.tokenizer.encode(prompt)) for prompt in prompts]
        cache = make_prompt_cache(self._model)
        logits = self._model(mx.array(ids), cache=cache)[:, -1]
        for layer in cache:
            layer.keys, layer.values = mx.repeat(layer.keys, count, 0), mx.repeat(layer.values, count, 0)
        logits, tokens, logprobs = mx.repeat(logits, count, 0), [], []
        for at in range(max_tokens):
            if at:
                logits = self._model(tokens[-1][:, None], cache=cache)[:, -1]
            known = logits.astype(mx.float32) - mx.logsumexp(logits.astype(mx.float32), -1, keepdims=True)
            key, dice = mx.random.split(key)
            tokens.append(mx.random.categorical(known, key=dice))
            logprobs.append(mx.take_along_axis(known, tokens[-1][:, None], -1)[:, 0])
            mx.eval(tokens[-1], logprobs[-1])
        rows = list(zip(mx.stack(tokens, 1).tolist(), mx.stack(logprobs, 1).tolist(), strict=True))
        return [
            [self._answer(prompt, *row) for row in rows[at * count : (at + 1) * count]] for at, prompt in enumerate(ids)
        ]

    def _answer(self, prompt: tuple[int, ...], tokens: list[int], logprobs: list[float]) -> Answer:
        ended = self._end in tokens
        length = tokens.index(self._end) + 1 if ended else len(tokens)
        text = self.tokenizer.decode([token for token in tokens[:length] if token != self._end])
        return Answer(prompt, tuple(tokens[:length]), tuple(logprobs[:length]), text, ended)


class InProcess:
    """One policy with its trainer. `update` makes an update as a server does with feedback.

    Attributes:
        policy: it equals the base model after `restart`.
        events: what training has reported.

    Args:
        manager: the base model, without a bank or with one; None: the bundled one.
    """

    policy: Policy
    events: list[str]

    def __init__(self, config: RLTrainingConfig, lora: ModelConfig, manager: SharedModelManager | None = None) -> None:
        manager = manager or SharedModelManager(progress=False)
        float32 = manager.plan.layout.dtype == mx.float32
        self.training = config.resolved(float32, micro_batch_tokens=MICRO_BATCH_TOKENS)
        bank = manager.bank or manager.install_bank(1, lora.lora_rank)
        footprint = footprint_of(manager.model, manager.plan, bank)
        model = trainable(self.training, footprint, manager, bank, MEMORY, Parts())
        self.trainer = GRPOTrainer(model, self.training, lora, measure_kl=False)
        self.trainer.pace(1e9)  # there are no requests
        self.restart(0)

    def restart(self, seed: int) -> None:
        """Begins with a new policy. `seed`: of its initial weights."""
        self.policy, self.events = self.trainer.open("one", seed=seed), []
        self._history = RewardHistory()
        self._plateau = Plateau("one", self.training.plateau, self._emit, lambda: self.training.update_frequency)

    def _emit(self, kind: str, **_: object) -> None:
        self.events.append(kind)

    def update(
        self, groups: Sequence[tuple[Sequence[Answer], Sequence[float]]], on_policy: bool = True
    ) -> UpdateOutcome | None:
        """Learns from answers and their rewards. None: they teach nothing. `on_policy`: the policy as it is has sampled
        them."""
        scored = [self._scored(answers, rewards, on_policy) for answers, rewards in groups]
        for group in scored:
            self._plateau.observe(group)
        if explores := self._plateau.explores:
            scored += self._plateau.better
        wanted = self.training.update_frequency
        batch = prepare(scored, self.training.loss, self._history, wanted, explores=explores).batch
        if not batch.teaches:
            return None
        return self._done(self.trainer.begin(self.policy, batch))

    def logprobs(self, answers: Sequence[Answer]) -> list[tuple[float, ...]]:
        """Those of the tokens of each answer under the policy, in nats, as training computes them."""
        data = [answered(each.prompt, each.tokens) for each in answers]
        return self._done(self.trainer.logprobs(self.policy, data))

    def _done(self, asked: Future[T]) -> T:
        while self.trainer.waits():
            self.trainer.advance()
        return asked.result()

    def _scored(self, answers: Sequence[Answer], rewards: Sequence[float], on_policy: bool) -> ScoredGroup:
        episodes = tuple(Episode((_trajectory(answer),)) for answer in answers)
        return ScoredGroup(episodes, tuple(rewards), FEEDBACK, on_policy=on_policy)


def _trajectory(answer: Answer) -> Trajectory:
    return Trajectory(
        trajectory_id="",
        group_id="",
        group_size=1,
        adapter=None,
        prompt_ids=answer.prompt,
        completion_ids=answer.tokens,
        sampling_logprobs=answer.logprobs,
        temperature=1.0,
        text=answer.text,
        finish_reason=FinishReason.STOP if answer.ended else FinishReason.LENGTH,
        collection=CollectionSpec(),
        created=0.0,
    )
