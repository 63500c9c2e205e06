"""What both sides of `studies/beside_trl.py` train on. Plain Python: the side of TRL runs without MLX, ours without
PyTorch.

    cell     one run of one side: a task (or preferences), a seed, so many updates
    order    what a side is told, a JSON file; it writes its results beside it

Both sides get the same prompts in the same order, and begin with the same adapter.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from benchmarks.lib.training.learning_tasks import WORDS, OneWord, Prompt, Sentiment, chat, questions

END = "<|im_end|>"
RESULT, GRADIENTS, ADAPTER = "result.json", "gradients.npz", "adapter"
"""What a side writes into the folder of a cell. The last two only if they are wanted."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The hyper-parameters of both sides. An update learns from `prompts` times `group` answers; of `pairs` pairs with
    DPO, of `answers` answers with KTO."""

    prompts: int = 4
    group: int = 4
    pairs: int = 8
    answers: int = 16
    learning_rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    rank: int = 16
    alpha: float = 32.0
    clip_low: float = 0.2
    clip_high: float = 0.28
    preference_beta: float = 0.1
    threads: int = 1


ROWS = {"sft": "prompts", "dpo": "pairs", "kto": "answers"}
"""The field of `Setting` that says how many rows of a file an update learns from."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """An answer to learn from that is given and not sampled. `mask`: which tokens of the completion are trained.
    `logprobs`: of the tokens of the completion, as they were sampled, 0 for the others."""

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    mask: Sequence[bool]
    reward: float
    logprobs: Sequence[float]


@dataclass(frozen=True, slots=True)
class Order:
    """One cell. `loss`: a name that both sides know, `grpo`, `bnpo`, `dapo`, `dr_grpo`, `dpo` or `kto`; ours also knows
    `cross_entropy`. `task`: its prompts are sampled from; empty: what is learnt from is in `given` (one update) or in
    the file `data`. `adapter`: the one to begin with, in PEFT's format. `setting`: fields of `Setting`. `max_kl_step`:
    how far an update of ours may move the policy, in nats a token; TRL has no such bound. `whole_steps`: ours makes a
    whole step of AdamW, as TRL does, also if only some groups have a signal; their gradients count in part as ever.
    """

    loss: str
    model: str
    adapter: str
    folder: str
    task: str = ""
    seed: int = 0
    updates: int = 1
    scale_rewards: str = "group"
    max_tokens: int = 16
    max_kl_step: float | None = 0.2
    whole_steps: bool = False
    keeps_gradients: bool = False
    data: str = ""
    given: Sequence[Mapping[str, Any]] = field(default_factory=list)
    setting: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path) -> Order:
        return cls(**json.loads(file.read_text()))

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self)))

    @property
    def hyper(self) -> Setting:
        return Setting(**self.setting)

    @property
    def rollouts(self) -> list[Rollout]:
        return [Rollout(**each) for each in self.given]

    def batches(self) -> list[list[dict[str, Any]]]:
        """What each update of the file `data` learns from."""
        batches: list[list[dict[str, Any]]] = json.loads(Path(self.data).read_text())
        return batches[: self.updates]


@dataclass(frozen=True, slots=True)
class Said:
    """One answer of the model. `ended`: it was not cut off."""

    text: str
    ended: bool


class PairedTask(Protocol):
    """A task of both sides. `follow_up` returns the user's next message after the first answer; None: there is none.
    `rewarded` returns the reward of all answers of one conversation together."""

    name: str
    max_tokens: int

    def training(self, seed: int) -> Iterator[Prompt]: ...

    def follow_up(self, prompt: Prompt, first: Said) -> str | None: ...

    def rewarded(self, prompt: Prompt, said: Sequence[Said]) -> float: ...


class OneTurn:
    """A task of one turn of few tokens."""

    def __init__(self, task: Sentiment | OneWord, max_tokens: int) -> None:
        self.name, self.max_tokens, self.training, self._task = task.name, max_tokens, task.training, task

    def follow_up(self, prompt: Prompt, first: Said) -> None:
        return None

    def rewarded(self, prompt: Prompt, said: Sequence[Said]) -> float:
        return self._task.rewarded(prompt, said[-1].text, said[-1].ended)


class Sums:
    """Sums in the form of GSM8K: a question in words, a solution that ends with `#### 7`. The model does not know the
    form before it has seen examples of it. The reward is 1 for the right number after `####`, else 0."""

    name, max_tokens = "sums", 17
    _NAMES = ("Tom", "Anna", "Ben", "Lucy", "Max", "Emma")
    _THINGS = ("apples", "books", "coins", "pens", "cups", "eggs")

    def training(self, seed: int) -> Iterator[Prompt]:
        dice = random.Random(seed)
        while True:
            yield self._problem(dice)

    def follow_up(self, prompt: Prompt, first: Said) -> None:
        return None

    def rewarded(self, prompt: Prompt, said: Sequence[Said]) -> float:
        found = re.search(r"####\s*(-?\d+)\s*$", said[-1].text)
        return float(said[-1].ended and found is not None and int(found[1]) == prompt.metadata["answer"])

    def examples(self, seed: int) -> Iterator[tuple[str, str]]:
        """Prompts with their solutions."""
        for prompt in self.training(seed):
            yield prompt.text, f"{prompt.metadata['solution']}\n#### {prompt.metadata['answer']}"

    def _problem(self, dice: random.Random) -> Prompt:
        name, thing = dice.choice(self._NAMES), dice.choice(self._THINGS)
        first, second = dice.randint(5, 29), dice.randint(5, 29)
        more = dice.random() < 0.5
        if not more and second > first:
            first, second = second, first
        answer = first + second if more else first - second
        change = f"gets {second} more" if more else f"gives away {second}"
        question = f"{name} has {first} {thing} and {change}. How many {thing} has {name} now?"
        solution = f"{first} {'+' if more else '-'} {second} = {answer}"
        return Prompt(chat(question), {"answer": answer, "solution": solution})


class BothWords:
    """Two turns. The model says one of two words; the second message depends on which one it was, and asks for the
    other. Each word alone earns a half, 0.15 if there is more around it."""

    name, max_tokens = "both words", 6

    def training(self, seed: int) -> Iterator[Prompt]:
        dice = random.Random(seed)
        while True:
            words = dice.sample(WORDS, 2)
            yield Prompt(chat(f"Say only one of these words: {words[0]}, {words[1]}."), {"words": words})

    def follow_up(self, prompt: Prompt, first: Said) -> str:
        chosen = self._chosen(prompt, first)
        if chosen is None:
            return f"That was neither. Say only the word {prompt.metadata['words'][0]}."
        return f"You said {chosen}. Say only the other word."

    def rewarded(self, prompt: Prompt, said: Sequence[Said]) -> float:
        one, other = prompt.metadata["words"]
        chosen = self._chosen(prompt, said[0])
        first = self._credit(said[0], chosen) if chosen else 0.0
        return first + self._credit(said[1], other if chosen == one else one)

    def _chosen(self, prompt: Prompt, first: Said) -> str | None:
        named = [word for word in prompt.metadata["words"] if word in _words(first)]
        return named[0] if len(named) == 1 else None

    @staticmethod
    def _credit(said: Said, wanted: str) -> float:
        words = _words(said)
        return 0.5 if words == [wanted] and said.ended else 0.15 * (wanted in words)


def _words(said: Said) -> list[str]:
    return re.findall(r"[a-z]+", said.text.lower())


TASKS: Mapping[str, PairedTask] = {
    task.name: task for task in (OneTurn(Sentiment(), 8), OneTurn(OneWord(), 6), Sums(), BothWords())
}


def between_turns(message: str, ended: bool) -> str:
    """What stands between the tokens of the first answer and the second answer."""
    return f"{'' if ended else END}\n<|im_start|>user\n{message}{END}\n<|im_start|>assistant\n"


@dataclass(frozen=True, slots=True)
class Preference:
    """A question with the right word and the wrong one."""

    prompt: str
    chosen: str
    rejected: str


def preferences(part: slice, seed: int, count: int) -> list[Preference]:
    """Questions with these adjectives, the right class and the wrong one; no question twice."""
    made = [
        Preference(chat(each.text), f"{each.kind.title()}.{END}", f"{other.title()}.{END}")
        for each in questions(part)
        for other in {"positive", "negative"} - {each.kind}
    ]
    return list(islice(random.Random(seed).sample(made, len(made)), count))
