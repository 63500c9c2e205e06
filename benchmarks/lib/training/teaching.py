"""What the bundled model learns from preferences alone, and from a teacher: itself with a long prompt.

Preferences are learnt on the engine without HTTP; the teacher's prompt by `mlx_parallm_train`.
"""

import asyncio
import random
import re
from collections.abc import Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS
from benchmarks.lib.training.batch import LORA
from benchmarks.lib.training.command import SHARE_OF_WORDS, SPLIT, checked, held_out_rows, logged, prepare, row, train
from benchmarks.lib.training.learning_tasks import HELD_OUT, WORDS, Sentiment, chat, questions
from mlx_parallm.adapters.weights import VersionInfo
from mlx_parallm.app.build import RunningEngine, Served
from mlx_parallm.config import configure
from mlx_parallm.core.adapters import BASE_ADAPTER
from mlx_parallm.core.requests import (
    CollectionSpec,
    FinishReason,
    GenerationRequest,
    RequestFailed,
    SamplingParams,
    SequenceOutput,
    StopParams,
)
from mlx_parallm.core.trajectories import GivenTrajectory
from mlx_parallm.rl.service import TrainingService

# ---- answers -------------------------------------------------------------------------------------


@dataclass(slots=True)
class Answer:
    """One answer. `logprobs`: of the distribution that it was sampled from."""

    prompt_ids: tuple[int, ...]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    ended: bool = False


class Pupil:
    """The engine and its trainer."""

    def __init__(self, served: Served, training: TrainingService) -> None:
        self.served = served
        self.training = training
        self.adapter = training.default_adapter
        self._requests = count()

    async def draw(
        self, prompts: Sequence[str], n: int, max_tokens: int, seed: int, base: bool = False
    ) -> list[Answer]:
        """`n` answers to each prompt, at temperature 1, of the live version or of the base model."""
        asked = [self._answers(prompt, n, max_tokens, seed + at * n, base) for at, prompt in enumerate(prompts)]
        return [answer for answers in await asyncio.gather(*asked) for answer in answers]

    async def _answers(self, prompt: str, n: int, max_tokens: int, seed: int, base: bool) -> list[Answer]:
        ids = tuple(self.served.tokenizer.encode(prompt, False))
        answers = [Answer(ids) for _ in range(n)]
        with self.served.adapters.lease(BASE_ADAPTER.name if base else None) as adapter:
            request = GenerationRequest(
                request_id=f"r{next(self._requests)}",
                prompts=(ids,),
                sampling=SamplingParams(seed=seed),
                stopping=StopParams(max_tokens),
                n=n,
                adapter=adapter,
                collection=CollectionSpec(),  # for the logprobs; the engine alone collects nothing
            )
            async for event in self.served.engine.generate(request):
                if isinstance(event, RequestFailed):
                    raise event.error
                if isinstance(event, SequenceOutput):
                    _add(answers[event.index], event)
        return answers

    async def publish(self) -> None:
        """Makes the policy in training live."""
        weights = self.training.parts.learner.weights(self.adapter)
        await self.served.adapters.publish(self.adapter, weights, VersionInfo.of(weights))


def _add(answer: Answer, output: SequenceOutput) -> None:
    answer.token_ids += output.token_ids
    answer.logprobs += output.sampling_logprobs
    answer.text += output.text
    answer.ended = output.finish_reason is FinishReason.STOP


@asynccontextmanager
async def pupil(seed: int, **settings: Any) -> Any:
    """The bundled model with a new adapter in training. `settings`: keys of the section `rl_training`, with two
    underscores for dots."""
    training = {"seed": seed, "gradient_checkpointing": False, **settings}
    engine = RunningEngine(configure(None, LORA, **{f"rl_training__{key}": value for key, value in training.items()}))
    served = await asyncio.to_thread(engine.start)
    assert served.training is not None
    try:
        await served.training.start_adapter("default")
        yield Pupil(served, served.training)
    finally:
        await served.training.close()
        await asyncio.to_thread(engine.stop)


# ---- preferences ---------------------------------------------------------------------------------

PAIRS, PAIRS_AT_ONCE, EPOCHS = 200, 16, 2
SENTENCE_TOKENS = 48
DRAWN, PROMPTS_AT_ONCE = 4, 32
"""Answers to each prompt, of which the longest and the shortest make a pair; prompts that are asked at once."""
_ASKED = ("Write one short sentence about a {}.", "What is a {}? Answer briefly.", "Tell me something about a {}.")


@dataclass(frozen=True, slots=True)
class Preferred:
    """How often the policy's answer to a held-out prompt is preferred to the base model's, before and after. Ties count
    half. `tokens`: mean length of its answers."""

    seed: int
    pairs: int
    updates: int
    before: float
    after: float
    tokens_before: float
    tokens_after: float


async def preferences(seed: int) -> Preferred:
    """Learns from pairs of the base model's answers, of which the shorter is preferred. No reward says so."""
    settings = {"algorithm": "dpo", "optimizer__learning_rate": 2e-4, "update_frequency": 2 * PAIRS_AT_ONCE}
    prompts = [chat(form.format(word)) for word in WORDS for form in _ASKED]
    dice = random.Random(seed)
    held_out = random.Random(0).sample(prompts, HELD_OUT)
    training = dice.sample(sorted(set(prompts) - set(held_out)), len(prompts) - HELD_OUT)
    async with pupil(seed, **settings) as one:
        pairs: list[tuple[GivenTrajectory, GivenTrajectory]] = []
        for start in range(0, len(training), PROMPTS_AT_ONCE):
            if len(pairs) < PAIRS:
                asked, first_seed = training[start : start + PROMPTS_AT_ONCE], 10_000 * (seed + 1) + DRAWN * start
                pairs += _pairs(await one.draw(asked, DRAWN, SENTENCE_TOKENS, first_seed, base=True), start)
        pairs = pairs[:PAIRS]
        base = await one.draw(held_out, 1, SENTENCE_TOKENS, seed=1, base=True)
        before = await one.draw(held_out, 1, SENTENCE_TOKENS, seed=2)
        updates = 0
        for _ in range(EPOCHS):
            for start in range(0, len(pairs), PAIRS_AT_ONCE):
                given = [each for pair in pairs[start : start + PAIRS_AT_ONCE] for each in pair]
                report = await one.training.update(given=given)
                updates += report.status == "published"
                print(
                    f"  preferences, seed {seed}: {report.status}, loss {report.metrics.get('loss', 0):.3f}", flush=True
                )
        after = await one.draw(held_out, 1, SENTENCE_TOKENS, seed=2)
    lengths = [mean(len(answer.token_ids) for answer in answers) for answers in (before, after)]
    return Preferred(seed, len(pairs), updates, _wins(before, base), _wins(after, base), *lengths)


def _pairs(answers: Sequence[Answer], first: int) -> Iterator[tuple[GivenTrajectory, GivenTrajectory]]:
    """The longest answer to each prompt, and the shortest, which is preferred. Prompts whose answers have one length
    are left out. `first`: the number of the first prompt."""
    for at in range(0, len(answers), DRAWN):
        short, *_, long = sorted(answers[at : at + DRAWN], key=lambda answer: len(answer.token_ids))
        if len(short.token_ids) < len(long.token_ids):
            pair = f"pair-{first + at // DRAWN}"
            yield _given(long, 0.0, pair), _given(short, 1.0, pair)


def _given(answer: Answer, reward: float, pair: str) -> GivenTrajectory:
    return GivenTrajectory(answer.prompt_ids, tuple(answer.token_ids), reward, pair)


def _wins(answers: Sequence[Answer], base: Sequence[Answer]) -> float:
    pairs = [(len(mine.token_ids), len(theirs.token_ids)) for mine, theirs in zip(answers, base, strict=True)]
    return mean(1.0 if mine < theirs else 0.5 if mine == theirs else 0.0 for mine, theirs in pairs)


# ---- distillation --------------------------------------------------------------------------------

ROUNDS, AT_ONCE, ANSWERS = 50, 8, 4
_SYSTEM = "You label reviews. Answer with exactly one word in lower case, positive or negative. Write no other word."
_EXAMPLES = """
The pen was wonderful: positive. The soup was terrible: negative. The park was beautiful: positive.
The bus was filthy: negative. The song was sweet: positive. The knife was useless: negative.
The cake was tasty: positive. The road was dangerous: negative.
"""

_CONFIG = """\
rl_training:
  gradient_checkpointing: false
  evaluation:
    temperature: 1
"""


@dataclass(frozen=True, slots=True)
class Distilled:
    """Mean held-out rewards: of the base model without and with the long prompt, and of the adapter without it."""

    seed: int
    rounds: int
    base: float
    teacher: float
    pupil: float


async def distillation(seed: int) -> Distilled:
    """Distils a long prompt into an adapter, by `mlx_parallm_train`: the adapter answers without the prompt, and
    imitates the base model's logprobs of its answers with the prompt. Rewards are only measured."""
    before, after = await asyncio.to_thread(_distilled, seed)
    task = Sentiment()
    async with pupil(seed) as one:
        tokenizer = one.served.tokenizer
        messages = [[{"role": "user", "content": row["prompt"]}] for row in held_out_rows()]
        prompts = [tokenizer.decode(tokenizer.apply_chat_template(each)) for each in messages]
        asked = [_teacher_prompt() + prompt for prompt in prompts]
        answers = await one.draw(asked, 1, task.max_tokens, seed=1, base=True)
    rewards = [task.rewarded(p, a.text, a.ended) for p, a in zip(task.held_out(), answers, strict=True)]
    return Distilled(seed, ROUNDS, before, mean(rewards), after)


def _distilled(seed: int) -> tuple[float, float]:
    """Trains, and returns the held-out rewards before and after."""
    with TemporaryDirectory(prefix="teaching_benchmark_") as name:
        folder = Path(name)
        prepare(folder, _CONFIG, SHARE_OF_WORDS, map(row, questions(slice(0, SPLIT))), held_out_rows())
        (folder / "teacher.txt").write_text(_teacher_prompt())
        flags = {"rl-algorithm": "distillation", "teacher-prompt": "@teacher.txt", "temperature": 1, "steps": ROUNDS}
        flags |= {"prompts-per-step": AT_ONCE, "group-size": ANSWERS, "learning-rate": 5e-4, "seed": seed}
        flags |= {"reward": "rewards.py:score", "eval-tasks": "held_out.jsonl", "eval-every": ROUNDS}
        checked(train(folder, flags))
        rewards = [line["eval_mean"] for line in logged(folder) if "eval_mean" in line]
    return rewards[0], rewards[-1]


def _teacher_prompt() -> str:
    """A system message and eight examples as earlier turns, some 200 tokens."""
    examples = re.findall(r"(The \w+ was \w+): (\w+)\.", _EXAMPLES)
    turns = (f"{chat(f'{said}. Positive or negative?')}{label}<|im_end|>\n" for said, label in examples)
    return f"<|im_start|>system\n{_SYSTEM}<|im_end|>\n{''.join(turns)}"
