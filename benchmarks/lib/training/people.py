"""Simulated people who judge or correct the answers of a server that learns from them.

Each of 300 users asks for the class of an adjective in one word. Up to an hour later, by a simulated clock, he gives a
thumb, up if the answer has just one word, or says what the class is. He is right four times in five. Nothing but this
teaches the adapter. The requests and opinions are those of a server without
HTTP, and its own training loop makes the updates.
"""

import asyncio
import random
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice
from statistics import mean

from benchmarks.lib.training.batch import LORA
from benchmarks.lib.training.learning_tasks import Prompt, Sentiment
from mlx_parallm import RLConfig, RLIntegratedServer
from mlx_parallm.app.build import Served
from mlx_parallm.core.requests import (
    CollectionSpec,
    GenerationRequest,
    RequestFailed,
    RequestFinished,
    SamplingParams,
    SequenceOutput,
    StopParams,
)
from mlx_parallm.extras.people.service import Edit

USERS, QUESTIONS_EACH, RIGHT = 300, 2, 0.8
BETWEEN_QUESTIONS_S, LATEST_S = 12.0, 3600.0
AT_ONCE, MAX_TOKENS = 32, 12
IN_TIME, EDITS = 32, 16
"""Answers with thumbs in time, and late ones or corrections, that make an update."""
ADAPTER = "default"


@dataclass(frozen=True, slots=True)
class Taught:
    """The mean score of held-out answers before and after. `learnt`: what the server's report says of each source."""

    part: str
    seed: int
    control: bool
    before: float
    after: float
    updates: int
    learnt: dict[str, dict[str, float]]


@dataclass(slots=True)
class Answer:
    """One answer of the server."""

    prompt: Prompt
    prompt_ids: tuple[int, ...]
    trajectory_id: str = ""
    text: str = ""


@dataclass(order=True, slots=True)
class Opinion:
    """What a user says of an answer, at a simulated time in seconds."""

    at: float
    user: int
    answer: Answer = field(compare=False)


class People:
    """The users, with a clock. `control`: what they say has nothing to do with the answers."""

    def __init__(self, served: Served, part: str, seed: int, control: bool) -> None:
        assert served.training is not None
        self._served, self._part, self._control = served, part, control
        self._service = served.training
        self._dice = random.Random(f"{part}/{seed}")
        self._requests = count()
        self._seed = seed

    async def teach(self, task: Sentiment, questions: int) -> None:
        """Asks all questions, and says what the users think of the answers when their time has come."""
        waiting: list[Opinion] = []
        prompts = task.training(self._seed)
        for start in range(0, questions, AT_ONCE):
            answers = await self._ask(list(islice(prompts, min(AT_ONCE, questions - start))), collected=True)
            for at, answer in enumerate(answers, start):
                said_at = at * BETWEEN_QUESTIONS_S + self._dice.uniform(0, LATEST_S)
                waiting.append(Opinion(said_at, at % USERS, answer))
            await self._say(waiting, (start + AT_ONCE) * BETWEEN_QUESTIONS_S)
        await self._say(waiting, float("inf"))

    async def _say(self, waiting: list[Opinion], until: float) -> None:
        """Says all that is due, and waits for the updates that are made of it."""
        due = sorted(opinion for opinion in waiting if opinion.at < until)
        waiting[:] = [opinion for opinion in waiting if opinion.at >= until]
        for start in range(0, len(due), AT_ONCE):
            await asyncio.gather(*map(self._say_one, due[start : start + AT_ONCE]))
            await self._settled()

    async def _say_one(self, opinion: Opinion) -> None:
        answer, user = opinion.answer, f"user-{opinion.user}"
        honest = self._dice.random() < (0.5 if self._control else RIGHT)
        if self._part == "thumbs":
            good = _has_one_word(answer) > 0
            await self._service.trajectories.feedback(answer.trajectory_id, float(good is honest), user)
            return
        tokenizer = self._served.tokenizer
        word = answer.prompt.metadata["right" if honest else "wrong"]
        ids = (*tokenizer.encode(word, False), max(tokenizer.eos_token_ids))
        edit = Edit(ADAPTER, answer.prompt_ids, ids, chosen_text=word, user=user, about=answer.trajectory_id)
        assert self._served.training is not None
        await self._served.training.extras["people"].edit(edit)

    async def _settled(self) -> None:
        """Returns when no update is due or under way."""
        while True:
            status = self._service.status()
            enough = status.detail["trajectories_with_signal"] >= IN_TIME
            if not enough and max(status.detail["people_waiting"].values()) < EDITS and status.state != "updating":
                return
            await asyncio.sleep(0.05)

    async def held_out(self, task: Sentiment) -> float:
        """The mean score of answers to the held-out prompts."""
        return mean(map(SCORES[self._part], await self._ask(task.held_out(), collected=False)))

    async def _ask(self, prompts: Sequence[Prompt], collected: bool) -> list[Answer]:
        return list(await asyncio.gather(*(self._answer(prompt, collected) for prompt in prompts)))

    async def _answer(self, prompt: Prompt, collected: bool) -> Answer:
        number = next(self._requests)
        answer = Answer(prompt, tuple(self._served.tokenizer.encode(prompt.text, False)))
        with self._served.adapters.lease(None) as adapter:
            request = GenerationRequest(
                f"people-{number}",
                (answer.prompt_ids,),
                SamplingParams(seed=100_000 * self._seed + number, temperature=1.0 if collected else 0.0),
                StopParams(MAX_TOKENS),
                adapter=adapter,
                collection=CollectionSpec() if collected else None,
            )
            async for event in self._served.generate(request):
                if isinstance(event, RequestFailed):
                    raise event.error
                if isinstance(event, SequenceOutput):
                    answer.text += event.text
                elif isinstance(event, RequestFinished) and collected:
                    (answer.trajectory_id,) = event.trajectory_ids
        return answer


def _has_one_word(answer: Answer) -> float:
    return float(len(_words(answer)) == 1)


def _is_right(answer: Answer) -> float:
    """1 if the right word is in the answer and the wrong one is not, -1 the other way round, else 0."""
    right, wrong = (answer.prompt.metadata[which] in _words(answer) for which in ("right", "wrong"))
    return float(right) - float(wrong)


def _words(answer: Answer) -> list[str]:
    return re.findall(r"[a-z]+", answer.text.lower())


SCORES = {"thumbs": _has_one_word, "corrections": _is_right}


class OneWord(Sentiment):
    """Asks for an answer of one word."""

    def _prompts(self, part: slice) -> list[Prompt]:
        prompts = super()._prompts(part)
        return [
            replace(each, text=each.text.replace("negative?", "negative? Answer with one word.")) for each in prompts
        ]


async def taught(part: str, seed: int, control: bool, questions: int, learning_rate: float) -> Taught:
    """Runs one part. `questions`: of all users together."""
    task = OneWord()
    with tempfile.TemporaryDirectory() as folder:
        server = RLIntegratedServer(
            None,
            LORA,
            RLConfig(learning_rate=learning_rate, batch_size=IN_TIME),
            rl_training__seed=seed,
            rl_training__trajectory_buffer_size=2000,
            rl_training__people__update_frequency=EDITS,
            checkpointing__checkpoint_dir=folder,
        )
        async with server.session() as served:
            people = People(served, part, seed, control)
            before = await people.held_out(task)
            await people.teach(task, questions)
            after = await people.held_out(task)
            assert served.training is not None
            service = served.training
            learnt = dict(_learnt(served.training.extras["people"].signal_report().sources))
            updates = service.status().updates_total
    return Taught(part, seed, control, before, after, updates, learnt)


def _learnt(sources: Sequence[object]) -> Iterator[tuple[str, dict[str, float]]]:
    names = ("arrived", "trained", "updates", "gradient_share")
    for source in sources:
        yield getattr(source, "source"), {name: getattr(source, name) for name in names}  # noqa: B009
