"""Examples as tokens, and which of them are trained.

Of conversations, the messages of the assistant are trained: content, calls, reasoning if the chat template writes it,
and the token that ends the message. Headers, system prompts, users and results of tools are context. Each answer comes
after the prompt that the model sees when it is asked for this answer:

    answer 1   system, user                              | assistant ⏎
    answer 2   system, user, assistant, tool, ...        | assistant ⏎

`rl.objectives` makes one sequence of them again if each prompt continues the one before. Where a template leaves out
the reasoning of earlier answers, as Qwen3's does, it does not, and each answer is a sequence of its own.

A chat template may itself say what the assistant writes, between {% generation %} and {% endgeneration %}. Then these
tokens are trained, up to the end of the marks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from typing import TYPE_CHECKING

from mlx_parallm.core.text import Tool, end_id
from mlx_parallm.core.tool_text import TemplateMessage, chat_prompt
from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.extras.files.forms import Example, FileKind, Part

if TYPE_CHECKING:
    from mlx_parallm.model.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Encoded:
    """Tokens that are trained after tokens that are context. `mask`: which of them are trained; empty: all."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    mask: tuple[bool, ...] = ()

    def cut(self, length: int) -> Encoded | None:
        """The same without what is beyond `length` tokens; None if nothing is trained then."""
        left = max(0, length - len(self.prompt_ids))
        short = Encoded(self.prompt_ids, self.completion_ids[:left], self.mask[:left])
        return short if left and (any(short.mask) or not self.mask) else None


class Encoder:
    """Makes tokens of examples.

    With a chat template, a prompt that is a text is a message of the user, and its answer one of the assistant. Without
    one, they are one text, which the end-of-sequence token ends; so is plain text always.

    Args:
        longest: most tokens of an example.
        cuts: whether longer ones are cut off there; otherwise they cannot be used.
    """

    def __init__(self, tokenizer: Tokenizer, longest: int, cuts: bool) -> None:
        self._tokenizer, self._longest, self._cuts = tokenizer, longest, cuts
        self._ends = (end_id(tokenizer),) if tokenizer.eos_token_ids else ()
        self._bos = tokenizer.encode(tokenizer.bos_token, False) if tokenizer.bos_token else []
        self.chats = _has_template(tokenizer)

    def encode(self, example: Example) -> list[list[Encoded]]:
        """The turns of each answer.

        Raises:
            ValueError, RequestError: the example cannot be encoded, is too long, or has no token to train.
        """
        return [self._fitting(list(self._turns(example, answer))) for answer in example.answers]

    def _fitting(self, turns: Sequence[Encoded]) -> list[Encoded]:
        longest = self._longest
        tokens = max((len(turn.prompt_ids) + len(turn.completion_ids) for turn in turns), default=0)
        if tokens > longest and not self._cuts:
            raise ValueError(
                f"it has {tokens} tokens of at most {longest}; raise --max-length, or cut with --long-rows cut"
            )
        fitting = [short for turn in turns if (short := turn.cut(longest)) is not None]
        if not fitting:
            why = f"within {longest} tokens" if turns else "after its first one"
            raise ValueError(f"it has no token to train {why}")
        return fitting

    def _turns(self, example: Example, answer: Part) -> Iterator[Encoded]:
        prompt = example.prompt
        if isinstance(prompt, str) and isinstance(answer, str):
            if not prompt or not self.chats:
                yield from self._text(prompt, answer)
                return
            prompt, answer = ({"role": "user", "content": prompt},), ({"role": "assistant", "content": answer},)
        before = () if isinstance(prompt, str) else prompt
        assert not isinstance(answer, str)  # `forms` makes both texts, or both messages
        turns = (*before, *answer)
        asked = [at for at in range(len(before), len(turns)) if at and turns[at]["role"] == "assistant"]
        trained = [at for at in asked if at not in example.untrained]
        if (marked := self._marked(turns, trained, example.tools)) is not None:
            yield marked
            return
        for at in trained:
            yield self._answer(turns, at, example.tools)

    def _text(self, prompt: str, answer: str) -> Iterator[Encoded]:
        ids = self._tokenizer.encode(prompt or answer)
        if ids[:2] == self._bos * 2:  # the text has it too
            ids = ids[1:]
        completion = self._tokenizer.encode(answer, False) if prompt else ids[1:]
        if (completion or ids)[-1:] != list(self._ends):
            completion += self._ends
        if completion and ids:
            yield Encoded(tuple(ids if prompt else ids[:1]), tuple(completion))

    def _answer(self, turns: Sequence[TemplateMessage], at: int, tools: Sequence[Tool]) -> Encoded:
        """The message at `at` after those before it. Raises ValueError: the template does not append it to these."""
        tokenizer = self._tokenizer
        asked = chat_prompt(tokenizer, turns[:at], tools)
        whole = chat_prompt(tokenizer, turns[: at + 1], tools, add_generation_prompt=False)
        start = _shared(asked, whole)
        if start < len(asked) and start < len(chat_prompt(tokenizer, turns[:at], tools, add_generation_prompt=False)):
            raise ValueError(
                f"the model's chat template writes the messages before number {at + 1} differently when it follows"
            )
        ends = (place + 1 for place in range(start, len(whole)) if whole[place] in tokenizer.eos_token_ids)
        return Encoded(tuple(whole[:start]), tuple(whole[start : next(ends, len(whole))]))

    def _marked(
        self, turns: Sequence[TemplateMessage], trained: Sequence[int], tools: Sequence[Tool]
    ) -> Encoded | None:
        """The conversation with what the template marks; None: it has no marks, or not one stretch an answer."""
        found = self._tokenizer.assistant_mask(turns, tools) if trained else None
        if found is None:
            return None
        ids, marks = found
        stretches = [list(places) for marked, places in groupby(range(len(ids)), marks.__getitem__) if marked]
        answers = [at for at, turn in enumerate(turns) if turn["role"] == "assistant"]
        if len(stretches) != len(answers):
            return None
        wanted = {place for at, places in zip(answers, stretches, strict=True) if at in trained for place in places}
        start, stop = min(wanted), max(wanted) + 1
        if not start:
            return None
        mask = tuple(place in wanted for place in range(start, stop))
        return Encoded(tuple(ids[:start]), tuple(ids[start:stop]), mask)


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _has_template(tokenizer: Tokenizer) -> bool:
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}])
    except InvalidRequestError:
        return False
    return True


def check_usable(kind: FileKind, encoder: Encoder, example: Example) -> str:
    """Why no row like this can be used with this model; "" if one may be."""
    parts = (example.prompt, *example.answers)
    if encoder.chats or all(isinstance(part, str) for part in parts):
        return ""
    plain = "text" if kind is FileKind.SFT else "prompts and answers that are texts"
    return (
        "the rows are conversations, and this model has no chat template; give rows with "
        f"{plain}, or a model that has one, such as an Instruct model"
    )
