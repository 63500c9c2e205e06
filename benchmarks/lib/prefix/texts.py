"""Makes conversations of random words whose prompts have a wanted number of tokens.

Every word is one token of the bundled model's tokenizer if a space precedes it, so words count tokens.
"""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.lib.prompts import WORDS

Messages = list[dict[str, str]]

MESSAGE_WORDS = 10


@dataclass(frozen=True, slots=True)
class Script:
    """What one client sends, whatever the server answers: a system prompt, and a message for each turn."""

    system: str
    messages: tuple[str, ...]


class Texts:
    """Texts for one model folder. Equal seeds give equal texts, and different seeds different ones from the first word
    on, with few exceptions."""

    def __init__(self, model: Path) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model)

    def tokens(self, messages: Messages) -> int:
        """Tokens of the prompt that the chat template makes."""
        text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return len(self._tokenizer.encode(text, add_special_tokens=False))

    def opening(self, tokens: int, seed: str) -> Messages:
        """A system prompt and a first message, which make a prompt of exactly `tokens` tokens."""
        message = user(words(MESSAGE_WORDS, f"{seed} message"))
        fixed = self.tokens([system(words(1, seed)), message]) - 1
        opening = [system(words(tokens - fixed, seed)), message]
        assert self.tokens(opening) == tokens
        return opening


def words(count: int, seed: str) -> str:
    """Random words with spaces between them. With the same seed, fewer words are the beginning of more words."""
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(count))


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}
