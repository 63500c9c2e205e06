"""How models mark their thinking, as data. Adding a family: add an entry, with the marks that tell it from others."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from typing import TypeVar

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_parallm.core.text import Reasoning
from mlx_parallm.errors import ConfigError

Entry = TypeVar("Entry")

_THINK = Reasoning("<think>", "</think>")
_HARMONY_CHANNELS = tuple(
    f"<|channel|>{channel}{kind}<|message|>"
    for channel in ("final", "commentary")
    for kind in ("", " <|constrain|>json", " json")
)

REASONINGS: Mapping[str, Reasoning] = {
    "openai_gptoss": Reasoning(
        "<|channel|>analysis<|message|>",
        "<|end|>",
        ("<|start|>assistant", *_HARMONY_CHANNELS, "<|end|>"),
        repeats=True,
        opening="<|start|>assistant<|channel|>final<|message|>",
        field="thinking",
    ),
    "mistral": Reasoning("[THINK]", "[/THINK]", field="content"),
    "cohere_command": Reasoning(
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
        opening="<|START_RESPONSE|>",
        field="tool_plan",
    ),
    "granite": Reasoning("Here is my thought process:", "Here is my response:"),
    "granite3_3": Reasoning("<think>", "</think>", ("<response>", "</response>")),
    "gemma4": Reasoning("<|channel>thought", "<channel|>"),
    "longcat": Reasoning("<longcat_think>", "</longcat_think>"),
    **dict.fromkeys(("deepseek_r1", "deepseek_v3", "qwen3", "glm45", "kimi_k2", "minimax_m2", "poolside_v1"), _THINK),
}
"""Keyed by vLLM's names."""

OTHER_NAMES: Mapping[str, str] = {
    "gptoss": "openai_gptoss",
    "gpt_oss": "openai_gptoss",
    "cohere_command3": "cohere_command",
    "cohere_command4": "cohere_command",
}

_BY_TOKENS = ("openai_gptoss", "mistral", "cohere_command")
_BY_TEXT = ("granite", "granite3_3")
_TOKEN = re.compile(r"<\|\w+\|>|\[/?\w+\]")


def reasoning_of(wrapped: TokenizerWrapper, template: str, name: str | None = None) -> Reasoning | None:
    """The marks of a model: those of this name, or those that its vocabulary and its chat template tell of.

    Raises:
        ConfigError: there are none of this name.
    """
    if name is not None:
        return named(REASONINGS, OTHER_NAMES, name, "model.reasoning_parser")
    vocabulary: Container[str] = wrapped.get_vocab()
    for found in map(REASONINGS.__getitem__, _BY_TOKENS):
        if all(token in vocabulary for token in _TOKEN.findall(found.start + found.end)):
            return found
    if wrapped.has_thinking:
        return Reasoning(wrapped.think_start, wrapped.think_end, tuple(wrapped.structural_markers))
    for found in map(REASONINGS.__getitem__, _BY_TEXT):
        if all(text in template for text in (found.start, found.end, *found.around)):
            return found
    return None


def named(entries: Mapping[str, Entry], others: Mapping[str, str], name: str, setting: str) -> Entry:
    """The entry of a name.

    Raises:
        ConfigError: there is none.
    """
    entry = entries.get(others.get(name, name))
    if entry is None:
        raise ConfigError(f"{setting}: there is no {name}; there are {', '.join(sorted({*entries, *others}))}")
    return entry
