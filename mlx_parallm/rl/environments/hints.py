"""`hints`: two turns. After a wrong answer the model gets a hint, and answers again."""

from __future__ import annotations

import re
from collections.abc import Iterator
from random import Random

from mlx_parallm.core import CollectionSpec
from mlx_parallm.rl.environments.protocol import Answer, RolloutClient, Task

_KINDS = {
    "animal": "horse tiger rabbit monkey eagle dolphin sheep camel zebra lion goat wolf",
    "fruit": "apple banana cherry lemon mango orange peach grape plum kiwi melon pear",
    "color": "red green blue yellow purple black white brown pink gray violet beige",
    "tool": "hammer saw drill wrench shovel axe screwdriver pliers rake ladder chisel file",
}
_FIRST, _SECOND = 1.0, 0.5
"""The rewards of a right answer without the hint, and with it."""


class Hints:
    """Each task asks which of three words is, for example, an animal. The answer is that word and nothing else."""

    def tasks(self, seed: int) -> Iterator[Task]:
        dice = Random(seed)
        while True:
            kind, *others = dice.sample(sorted(_KINDS), 3)
            words = [dice.choice(_KINDS[each].split()) for each in (kind, *others)]
            right, shown = words[0], ", ".join(dice.sample(words, 3))
            text = f"Which of these is the {kind}: {shown}? Answer with one word."
            yield Task(({"role": "user", "content": text},), CollectionSpec(metadata={"answer": right}))

    async def rollout(self, client: RolloutClient, task: Task) -> float:
        right = str(task.collection.metadata["answer"])
        first = await client.ask(task.messages)
        if _says(first, right):
            return _FIRST
        hint = f"No. It begins with the letter {right[0]}. Answer with that word alone."
        second = await client.ask([*task.messages, first.message, {"role": "user", "content": hint}])
        return _SECOND if _says(second, right) else 0.0


def _says(answer: Answer, word: str) -> bool:
    """Whether an answer is this word alone."""
    return re.findall(r"\w+", answer.text.lower()) == [word]
