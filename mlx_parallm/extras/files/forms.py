"""Examples in the forms that rows of data sets have. Nothing is tokenised here.

SFT   {"messages": […], "tools": […]}                  also ShareGPT's; OpenAI's `weight` 0 trains nothing
      {"prompt": …, "completion": …}                   texts, or lists of messages
      {"instruction": …, "input": …, "output": …}      Alpaca's
      {"text": …}                                      plain text
DPO   {"prompt": …, "chosen": …, "rejected": …}        the prompt may be the beginning of both answers instead
      {"input": {"messages": […]}, "preferred_output": […], "non_preferred_output": […]}          OpenAI's
KTO   {"prompt": …, "completion": …, "label": true}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from functools import lru_cache
from itertools import takewhile
from typing import Any

from mlx_parallm.core.text import Tool
from mlx_parallm.core.tool_text import TemplateMessage
from mlx_parallm.rl.task_files import read_conversation

Part = str | tuple[TemplateMessage, ...]
"""A text, or messages."""


class FileKind(StrEnum):
    """What the rows of a file teach."""

    SFT = "sft"
    DPO = "dpo"
    KTO = "kto"


@dataclass(frozen=True, slots=True)
class Example:
    """What one row teaches.

    Attributes:
        prompt: what comes before the answers; empty: nothing does.
        answers: one, or with DPO the chosen and the rejected one. Of messages, those of the assistant are trained.
        tools: those that the prompt describes.
        untrained: indices of messages of the assistant, in the prompt and the answer together, that are not trained.
        label: 1 if the answer is a good one, -1 if it is a bad one; None: nobody says it.
    """

    prompt: Part
    answers: tuple[Part, ...]
    tools: tuple[Tool, ...] = ()
    untrained: frozenset[int] = frozenset()
    label: float | None = None

    @property
    def question(self) -> str:
        """What examples with the same one are held out or trained on together."""
        part, answer = self.prompt, self.answers[0]
        if not part:
            part = answer if isinstance(answer, str) else tuple(takewhile(_is_asked, answer)) or answer
        return json.dumps(part, sort_keys=True, default=str)


def _is_asked(turn: TemplateMessage) -> bool:
    return bool(turn["role"] != "assistant")


def _is_silent(turn: TemplateMessage) -> bool:
    """Whether it is a message of the assistant that says and calls nothing."""
    return turn["role"] == "assistant" and not any(
        turn.get(name) for name in ("content", "tool_calls", "reasoning_content")
    )


_FORMS: Mapping[FileKind, Sequence[tuple[str, ...]]] = {
    FileKind.SFT: (("messages",), ("conversations",), ("prompt", "completion"), ("instruction", "output"), ("text",)),
    FileKind.DPO: (("chosen", "rejected"), ("preferred_output", "non_preferred_output")),
    FileKind.KTO: (("prompt", "completion", "label"),),
}
"""Columns of the forms. The first form whose columns a row has all is its own."""
_PROMPTS = ("prompt", "input", "messages", "question")
"""Columns that may have the prompt of a preference."""
_OTHERS = (*_PROMPTS, "tools", "system")
"""More columns that forms have."""


def read_example(row: Mapping[str, Any], kind: FileKind) -> Example:
    """The example of a row.

    Raises:
        ValueError, RecursionError: the row has none of the forms, or a field cannot be used.
    """
    form = next((names for names in _FORMS[kind] if all(row.get(name) is not None for name in names)), None)
    if form is None:
        raise ValueError(_missing(row, kind))
    if "" in row:
        raise ValueError("it has more fields than the header names; quote those with a delimiter in them")
    tools = _tools(row.get("tools"))
    if kind is FileKind.SFT:
        return _imitated(row, form, tools)
    if kind is FileKind.DPO:
        return _preference(row, form, tools)
    prompt, answer = _part("prompt", row["prompt"]), _part("completion", row["completion"])
    return _checked(Example(prompt, (answer,), tools, label=_label(row["label"])))


def _missing(row: Mapping[str, Any], kind: FileKind) -> str:
    forms = _FORMS[kind]
    known = list(dict.fromkeys([*(name for names in forms for name in names), *_OTHERS]))
    wanted = " or ".join("+".join(names) for names in forms)
    empty = [name for name in known if name in row and row[name] is None]
    if empty:
        return f"{empty[0]} is empty; a row needs {wanted}"
    for name in map(str, row):
        if name not in known and (meant := _meant(name, tuple(known))):
            return f"it has {name!r}: did you mean {meant!r}? A row needs {wanted}"
    has = ", ".join(map(str, row)) or "nothing"
    return f"it has {has[:200]}; a row needs {wanted}"


@lru_cache  # all rows of a file may have the same mistake
def _meant(name: str, known: tuple[str, ...]) -> str | None:
    return next(iter(get_close_matches(name.lower(), known, n=1, cutoff=0.75)), None)


# -- sft -------------------------------------------------------------------------------------------


def _imitated(row: Mapping[str, Any], form: tuple[str, ...], tools: tuple[Tool, ...]) -> Example:
    match form:
        case ("text",):
            return Example("", (_text("text", row["text"]),))
        case ("messages",) | ("conversations",):
            given = _listed(row[form[0]])
            turns = _conversation(form[0], list(map(_of_share_gpt, given)) if form[0] == "conversations" else given)
            weights = [one.get("weight") if isinstance(one, dict) else None for one in given]
            for weight in weights:
                if weight not in (None, 0, 1):
                    raise ValueError(f"weight must be 0 or 1, got {weight!r}")
            untrained = frozenset(at for at, weight in enumerate(weights) if weight == 0)
            trained = [at for at, turn in enumerate(turns) if turn["role"] == "assistant" and at not in untrained]
            if not any(trained):  # nothing comes before the first message, which is not trained
                raise ValueError("no message of the assistant answers another one, so there is nothing to train")
            if silent := [at for at in trained if at and _is_silent(turns[at])]:
                raise ValueError(f'message {silent[0] + 1} is empty, and would be learnt; give it text, or "weight": 0')
            return Example("", (turns,), tools, untrained)
        case ("instruction", "output"):
            instruction, extra = _text("instruction", row["instruction"]), row.get("input") or ""
            asked = f"{instruction}\n\n{_text('input', extra)}" if extra else instruction
            if system := row.get("system"):
                turns = ({"role": "system", "content": _text("system", system)}, {"role": "user", "content": asked})
                return Example(turns, (({"role": "assistant", "content": _text("output", row["output"])},),))
            return Example(asked, (_text("output", row["output"]),))
        case _:
            prompt, answer = _part("prompt", row["prompt"]), _part("completion", row["completion"])
            return _checked(Example(prompt, (answer,), tools))


_SHARE_GPT = {"human": "user", "gpt": "assistant", "system": "system", "user": "user", "assistant": "assistant"}


def _of_share_gpt(turn: object) -> object:
    """A message of ShareGPT's form as one of OpenAI's."""
    if not isinstance(turn, dict) or "from" not in turn:
        return turn
    return {"role": _SHARE_GPT.get(str(turn["from"]), turn["from"]), "content": turn.get("value")}


# -- preferences -----------------------------------------------------------------------------------


def _preference(row: Mapping[str, Any], form: tuple[str, ...], tools: tuple[Tool, ...]) -> Example:
    given = next((row[name] for name in _PROMPTS if row.get(name)), None)
    if isinstance(given, dict):  # OpenAI's
        tools, given = tools or _tools(given.get("tools")), given.get("messages")
    chosen, rejected = (_part(name, row[name]) for name in form)
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise ValueError(f"{form[0]} and {form[1]} must both be texts, or both lists of messages")
    if chosen == rejected:
        raise ValueError(f"{form[0]} and {form[1]} are the same")
    if not isinstance(chosen, str) and not isinstance(rejected, str) and _is_asked(chosen[0]):  # it has its prompt
        pairs = zip(chosen, rejected, strict=False)
        shared = tuple(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return _checked(Example(shared, (chosen[len(shared) :], rejected[len(shared) :]), tools))
    if given is None:
        raise ValueError("there is no prompt, and the answers are no messages that begin with one")
    return _checked(Example(_part("prompt", given), (chosen, rejected), tools))


def _label(given: object) -> float:
    named = {"true": 1.0, "1": 1.0, "false": -1.0, "0": -1.0}.get(str(given).strip().lower().removesuffix(".0"))
    if named is None:
        raise ValueError(f"label must be true or false, got {given!r}")
    return named


# -- fields ----------------------------------------------------------------------------------------


def _checked(example: Example) -> Example:
    """The example, if its answers follow its prompt. A text that stands beside messages becomes one."""
    prompt, answers = example.prompt, example.answers
    if any(not isinstance(part, str) for part in (prompt, *answers)):
        prompt = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else prompt
        answers = tuple(({"role": "assistant", "content": a},) if isinstance(a, str) else a for a in answers)
    if not prompt:
        raise ValueError("there is no prompt before the answer")
    for answer in answers:
        if not isinstance(answer, str) and not any(turn["role"] == "assistant" for turn in answer):
            raise ValueError("an answer has no message of the assistant")
        if not answer or (not isinstance(answer, str) and any(map(_is_silent, answer))):
            raise ValueError("an answer is empty")
    return Example(prompt, answers, example.tools, example.untrained, example.label)


def _part(name: str, given: object) -> Part:
    turns = read_conversation(given)
    return _text(name, given) if turns is None else turns


def _text(name: str, given: object) -> str:
    if not isinstance(given, str) or not given:
        raise ValueError(f"{name} must be text that is not empty, got {str(given)[:60]!r}")
    return given


def _conversation(name: str, given: object) -> tuple[TemplateMessage, ...]:
    turns = read_conversation(given)
    if turns is None:
        raise ValueError(f"{name} must be a list of messages, each with role and content")
    return turns


def _listed(given: object) -> list[Any]:
    """A list, also of its JSON text."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            given = None
    if not isinstance(given, list):
        raise ValueError("it must be a list, or the JSON text of one")
    return given


def _tools(given: object) -> tuple[Tool, ...]:
    """The tools of a row, as chat templates take them."""
    if given is None or given == "" or given == []:
        return ()
    tools = _listed(given)
    found = tuple({"type": "function", "function": tool} if _is_bare(tool) else tool for tool in tools)
    for tool in found:
        if not isinstance(tool, dict) or not isinstance(tool.get("function"), dict) or "name" not in tool["function"]:
            raise ValueError('each of tools must be {"type": "function", "function": {"name": …, "parameters": …}}')
    return found


def _is_bare(tool: object) -> bool:
    return isinstance(tool, dict) and "function" not in tool and isinstance(tool.get("name"), str)
