"""The tasks that the bundled model is trained on: training prompts, held-out prompts, and rewards."""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from typing import Any, Protocol

HELD_OUT = 64

_POSITIVE = """
wonderful excellent delightful superb amazing brilliant charming fantastic pleasant lovely marvelous great
perfect joyful gorgeous impressive magnificent enjoyable remarkable splendid glorious terrific fabulous
outstanding
"""
_NEGATIVE = """
terrible awful horrible dreadful disgusting boring miserable nasty disappointing unpleasant ugly pathetic
atrocious lousy rotten appalling annoying ghastly hideous repulsive abysmal gloomy tedious vile
"""
_WORDS = """
river garden window mountain letter winter bridge candle forest ocean market teacher kitchen summer village
shadow station flower blanket island morning pencil castle harbor thunder meadow basket silver journey lantern
mirror valley engine orange painter rabbit guitar church dragon cotton finger hammer jacket ladder magnet needle
pepper pillow ribbon saddle temple turtle velvet wagon yellow anchor barrel copper donkey feather hunter insect
jungle kettle lemon marble nature oyster parrot rocket spider tunnel violin walnut zipper apple bottle cloud
desert eagle farmer glass honey kitten market number people queen school tower uncle voice water author bread
coffee doctor
"""
POSITIVE, NEGATIVE, WORDS = (sorted(set(text.split())) for text in (_POSITIVE, _NEGATIVE, _WORDS))
_OTHER = {"positive": "negative", "negative": "positive"}
THINGS = ("movie", "meal", "hotel", "book", "concert", "game", "trip", "show")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt. With an empty `scorer`, the client gives the reward; otherwise the server's scorer does, from
    `metadata`. With an `opening`, it is an episode of two turns: the model answers the user's message `opening` first,
    then the message `text`; its second answer is rewarded."""

    text: str
    metadata: dict[str, Any] = field(default_factory=dict)
    scorer: str = ""
    opening: str = ""


@dataclass(frozen=True, slots=True)
class Question:
    """A sentence about a thing, and its class, `positive` or `negative`."""

    text: str
    kind: str
    thing: str


def questions(part: slice) -> list[Question]:
    """Asks for the class of sentences with these adjectives: all positive ones, then all negative ones."""
    return [
        Question(f"The {thing} was {adjective}. Positive or negative?", kind, thing)
        for kind, adjectives in (("positive", POSITIVE[part]), ("negative", NEGATIVE[part]))
        for adjective in adjectives
        for thing in THINGS
    ]


class Task(Protocol):
    """A task. `rewarded` returns an answer's reward; `ended` says whether the answer has an end-of-sequence token."""

    name: str
    max_tokens: int
    updates: int

    def training(self, seed: int) -> Iterator[Prompt]: ...

    def held_out(self) -> list[Prompt]: ...

    def rewarded(self, prompt: Prompt, text: str, ended: bool) -> float: ...


def chat(question: str) -> str:
    """A question in ChatML, without the default system message."""
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


class Sentiment:
    """Classifies adjectives with one word. Held-out adjectives are not trained on. The client gives feedback."""

    name, max_tokens, updates = "sentiment", 12, 100

    def training(self, seed: int) -> Iterator[Prompt]:
        """Alternates positive and negative prompts, because an update from one kind would teach one answer to
        everything."""
        prompts = self._prompts(slice(0, 16))
        half = len(prompts) // 2
        for pair in zip(_shuffled(prompts[:half], seed), _shuffled(prompts[half:], seed + 1000), strict=False):
            yield from pair

    def held_out(self) -> list[Prompt]:
        return random.Random(0).sample(self._prompts(slice(16, None)), HELD_OUT)

    def rewarded(self, prompt: Prompt, text: str, ended: bool) -> float:
        """The right word's share of the answer: 1 if it is the only word, a third among three words. It is halved if
        the answer is cut off, and 0 if the opposite word is in the answer.

        A fixed reward for the word within a sentence would be a plateau that soon every answer of a group reaches.
        """
        words, right, wrong = re.findall(r"[a-z]+", text.lower()), prompt.metadata["right"], prompt.metadata["wrong"]
        if right not in words or wrong in words:
            return 0.0
        return (1.0 if ended else 0.5) / len(words)

    def _prompts(self, part: slice) -> list[Prompt]:
        return [
            Prompt(chat(question.text), {"right": question.kind, "wrong": _OTHER[question.kind]})
            for question in questions(part)
        ]


class Verdict(Sentiment):
    """The same question, with reward 1 or 0 from the server's own scorer. It is solved within a few updates."""

    name, max_tokens, updates = "verdict", 12, 40

    def rewarded(self, prompt: Prompt, text: str, ended: bool) -> float:
        return float(re.search(prompt.metadata["pattern"], text) is not None)

    def _prompts(self, part: slice) -> list[Prompt]:
        return [self._scored(prompt) for prompt in super()._prompts(part)]

    def _scored(self, prompt: Prompt) -> Prompt:
        text = prompt.text.replace("negative?", "negative? Answer with one word.")
        return Prompt(text, {"pattern": rf"(?i)\A\W*{prompt.metadata['right']}\W*\Z"}, "regex")


class Hint(Sentiment):
    """Two turns: the first message has the adjective, and the second asks for its class. Only a policy that reads the
    first turn can answer. Held-out adjectives are not trained on. The client gives one reward to each episode."""

    name, max_tokens, updates = "hint", 12, 60

    def _prompts(self, part: slice) -> list[Prompt]:
        return [self._in_two_turns(prompt) for prompt in super()._prompts(part)]

    def _in_two_turns(self, prompt: Prompt) -> Prompt:
        told = prompt.text.partition("user\n")[2].partition(" Positive or")[0]
        opening = f"A hint for later: {told} Say only OK."
        return Prompt("Was it positive or negative?", prompt.metadata, opening=opening)


class Ending:
    """Asks for a short sentence that ends with a given word. The client gives feedback."""

    name, max_tokens, updates = "ending", 20, 100

    def training(self, seed: int) -> Iterator[Prompt]:
        return _shuffled([self._prompt(word) for word in WORDS[:-HELD_OUT]], seed)

    def held_out(self) -> list[Prompt]:
        return [self._prompt(word) for word in WORDS[-HELD_OUT:]]

    def rewarded(self, prompt: Prompt, text: str, ended: bool) -> float:
        """1 for a sentence that ends with the word, less if the word is elsewhere in it, 0 if the sentence is cut
        off."""
        words, wanted = re.findall(r"[a-z]+", text.lower()), prompt.metadata["word"]
        if not ended or len(words) < 3:
            return 0.0
        return 1.0 if words[-1] == wanted else 0.2 * (wanted in words)

    def _prompt(self, word: str) -> Prompt:
        return Prompt(chat(f"Write a short sentence ending with the word {word}."), {"word": word})


class OneWord:
    """Asks for one word. The client gives feedback, with partial credit: a policy that says the word and continues
    until it is cut off earns 0.3 with every answer."""

    name, max_tokens = "one word", 8

    def __init__(self, updates: int = 20) -> None:
        self.updates = updates

    def training(self, seed: int) -> Iterator[Prompt]:
        return _shuffled([self.prompt(word) for word in WORDS[:-HELD_OUT]], seed)

    def held_out(self) -> list[Prompt]:
        return [self.prompt(word) for word in WORDS[-HELD_OUT:]]

    def rewarded(self, prompt: Prompt, text: str, ended: bool) -> float:
        """1 for the word alone, 0.3 for an answer that contains it."""
        words, wanted = re.findall(r"[a-z]+", text.lower()), prompt.metadata["word"]
        if wanted not in words:
            return 0.0
        return 1.0 if ended and len(words) == 1 else 0.3

    @staticmethod
    def prompt(word: str) -> Prompt:
        return Prompt(chat(f"Say only the word {word}."), {"word": word})


class RandomRewards(Sentiment):
    """The control: the same prompts, with random rewards."""

    name, updates = "random rewards", 40

    def __init__(self) -> None:
        self._dice = random.Random(1)

    def training(self, seed: int) -> Iterator[Prompt]:
        self._dice = random.Random(seed)
        return super().training(seed)

    def feedback(self) -> float:
        return self._dice.random()


class ReasoningGym:
    """A task of reasoning-gym with its own scorer. Held-out entries come from another seed."""

    def __init__(self, task: str, max_tokens: int = 16, updates: int = 100, **options: Any) -> None:
        self.name, self.max_tokens, self.updates = f"reasoning_gym:{task}", max_tokens, updates
        self._task, self._options = task, options

    def training(self, seed: int) -> Iterator[Prompt]:
        return cycle(self._prompts(1000 + seed, 400))

    def held_out(self) -> list[Prompt]:
        return self._prompts(7, HELD_OUT)

    def rewarded(self, prompt: Prompt, text: str, ended: bool) -> float:
        return float(self._dataset(0, 1).score_answer(text, prompt.metadata["entry"]))

    def _prompts(self, seed: int, size: int) -> list[Prompt]:
        entries = self._dataset(seed, size)
        return [Prompt(chat(entry["question"]), {"entry": entry}, self.name) for entry in entries]

    def _dataset(self, seed: int, size: int) -> Any:
        import reasoning_gym

        return reasoning_gym.create_dataset(self._task, seed=seed, size=size, **self._options)


def _shuffled(prompts: list[Prompt], seed: int) -> Iterator[Prompt]:
    order = random.Random(seed)
    while True:
        yield from order.sample(prompts, len(prompts))


TASKS = {
    "sentiment": Sentiment,
    "ending": Ending,
    "hint": Hint,
    "gym": partial(ReasoningGym, "syllogism"),
    "control": RandomRewards,
    "sums": partial(ReasoningGym, "chain_sum", updates=15, min_terms=2, max_terms=2, min_digits=1, max_digits=1),
    "letters": partial(ReasoningGym, "letter_counting", updates=15),
}
