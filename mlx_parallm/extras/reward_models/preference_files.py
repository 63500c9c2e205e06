"""Preferences of a file, in the forms that TRL and the data sets of the Hugging Face hub have.

{"prompt": "Say hello.", "chosen": "Hello!", "rejected": "No."}
{"messages": [{"role": "user", "content": "Say hello."}], "chosen": "Hello!", "rejected": "No."}
{"prompt": [...], "chosen": [{"role": "assistant", "content": "Hello!"}], "rejected": [...]}
{"chosen": [..., {"role": "assistant", "content": "Hello!"}], "rejected": [...]}     whole conversations

A prompt that is a text is one message of the user.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from mlx_parallm.core.text import TextTokenizer, control_ids, end_id
from mlx_parallm.core.tool_text import chat_prompt
from mlx_parallm.errors import ConfigError
from mlx_parallm.extras.reward_models.preferences import Preference
from mlx_parallm.rl.task_files import Message, find_file, read_conversation, read_rows

_PROMPTS = ("prompt", "messages", "prompt_messages", "question")


def read_preferences(name: str, tokenizer: TextTokenizer, context_length: int, setting: str) -> list[Preference]:
    """The preferences of a file, or of a data set of the hub, which is downloaded unless it is in the cache. A row that
    cannot be used is left out, and a line of the log says which.

    Args:
        setting: what errors name.

    Raises:
        ConfigError: the file cannot be read, is too large, or has no preference.
    """
    file = find_file(name, setting) or Path(name)
    found, unusable = read_rows(file, lambda row: _preference(row, tokenizer, context_length), setting)
    if not found:
        first = f" ({unusable[0]})" if unusable else ""
        raise ConfigError(f"{setting}: {file} has no preference; each row needs prompt, chosen and rejected{first}")
    return [*found.values()]


def _preference(row: Mapping[str, Any], tokenizer: TextTokenizer, context_length: int) -> Preference:
    """Raises ValueError, RecursionError or a RequestError: the row lacks something, or cannot be encoded."""
    prompt, chosen, rejected = _texts(row)
    if chosen == rejected:
        raise ValueError("chosen and rejected are the same")
    ids = tuple(chat_prompt(tokenizer, prompt, at_most=context_length))
    better, worse = (_answer_ids(text, tokenizer, context_length) for text in (chosen, rejected))
    preference = Preference(ids, better, worse)
    if (tokens := max(len(preference.chosen), len(preference.rejected))) > context_length:
        raise ValueError(f"it has {tokens} tokens, and the model's context is {context_length}")
    return preference


def _answer_ids(text: str, tokenizer: TextTokenizer, context_length: int) -> tuple[int, ...]:
    """The tokens of a whole answer, with the end-of-sequence token."""
    ids = tokenizer.encode(text, False, context_length)
    if control := control_ids(tokenizer).intersection(ids):
        raise ValueError(f"an answer has the control token {tokenizer.token_string(min(control))!r}; leave it out")
    return (*ids, end_id(tokenizer))


# -- the forms of a row ----------------------------------------------------------------------------


def _texts(row: Mapping[str, Any]) -> tuple[Sequence[Message], str, str]:
    """The messages of the prompt, and the texts of the two answers."""
    given = next((row[key] for key in _PROMPTS if row.get(key) is not None), None)
    chosen, rejected = row.get("chosen"), row.get("rejected")
    if chosen is None or rejected is None:
        raise ValueError(f"there is no {'rejected' if rejected is None else 'chosen'} answer")
    better, worse = read_conversation(chosen), read_conversation(rejected)
    if better is None or worse is None:
        return _prompt(given), _answer_text("chosen", chosen), _answer_text("rejected", rejected)
    shared = [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(better[:-1], worse[:-1], strict=False))]
    if len(shared) != len(better) - 1 or len(shared) != len(worse) - 1:
        raise ValueError("chosen and rejected may differ in their last message only")
    prompt = shared or _prompt(given)
    return prompt, _answer("chosen", better[-1]), _answer("rejected", worse[-1])


def _prompt(given: object) -> Sequence[Message]:
    messages = read_conversation(given)
    if messages is not None:
        if messages[-1]["role"] == "assistant":
            raise ValueError("the prompt's last message is the assistant's; the answers follow the user's")
        return messages
    if not isinstance(given, str) or not given.strip():
        raise ValueError("there is no prompt; give prompt or messages, a text that is not empty or a list of messages")
    return [{"role": "user", "content": given}]


def _answer_text(name: str, given: object) -> str:
    if not isinstance(given, str) or not given:
        raise ValueError(
            f"{name} must be text that is not empty, or a list of messages; chosen and rejected must be of one kind"
        )
    return given


def _answer(name: str, message: Message) -> str:
    if message["role"] != "assistant" or not message["content"] or "tool_calls" in message:
        raise ValueError(f"{name}: the last message must be the assistant's answer, a text without calls")
    return str(message["content"])
