"""Makes prompts that are the same in every run and all different within a run.

Different prompts give each server the same work: mlx_lm.server keeps a prompt cache, and an exact hit ends it.
"""

import random

TEXT = (
    "river stone window morning letter garden engine silver paper doctor winter market island bridge teacher forest "
    "music kitchen summer captain yellow village mountain story hammer science butter ticket shadow pocket harbour "
    "the a of and to in with for from by that which over under after before while because every small great old "
    "writes carries finds opens builds follows remembers changes asks answers moves begins grows keeps turns"
)
WORDS = TEXT.split()
FEWEST_WORDS, MOST_WORDS = 5, 60
FIRST_PLAIN_TOKEN, LAST_PLAIN_TOKEN = 1000, 40_000


def short_prompts(count: int, seed: str) -> list[str]:
    """Texts of 5 to 60 words. Equal seeds give equal texts."""
    rng = random.Random(seed)
    return [_sentence(rng, rng.randint(FEWEST_WORDS, MOST_WORDS)) for _ in range(count)]


def long_prompt(tokens: int, seed: str) -> list[int]:
    """A prompt of token ids, so that its length does not depend on the tokenizer."""
    rng = random.Random(seed)
    return [rng.randint(FIRST_PLAIN_TOKEN, LAST_PLAIN_TOKEN) for _ in range(tokens)]


def _sentence(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words)).capitalize()
