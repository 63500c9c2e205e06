"""The model's tokenizer: text to token ids and back on any thread, conversations to token ids by the chat template, and
generated ids to text as they arrive."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_parallm.core import Reasoning
from mlx_parallm.core.tool_text import TemplateMessage, calls_as_text
from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.model.control_text import ControlText
from mlx_parallm.model.hf_tokenizer import FastCodec, codec_of, length_bound_of, parts_of, token_bytes_of
from mlx_parallm.model.tools.formats import ToolFormat, tool_format_of
from mlx_parallm.model.tools.thinking import reasoning_of

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MAX_HELD_TOKENS = 16
"""Most tokens that are held back as parts of an incomplete character, which has at most four."""
_CONTEXT_TOKENS = 6
"""Prompt tokens that are decoded before the first generated one, to see how they join."""


class Tokenizer:
    """A Hugging Face tokenizer as mlx-lm wraps it, safe to share between threads. Implements `core.TextTokenizer`.

    With `add_special_tokens` it adds a BOS token if and only if the model's tokenizer does. Decoding never cleans up
    spaces, so that text streamed token by token joins to the same string.

    Args:
        allow_special_tokens: whether the text of a control token in a chat message becomes that token, as in `encode`.
        tool_parser, reasoning_parser: names of the formats of calls and of reasoning. None: those that the vocabulary
            and the chat template tell of.

    Raises:
        ConfigError: there is no format of this name.
    """

    def __init__(
        self,
        wrapped: TokenizerWrapper,
        allow_special_tokens: bool = False,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
    ) -> None:
        self._hf = wrapped
        self._codec = codec_of(wrapped)
        parts = parts_of(wrapped)
        self._length_bound = None if parts is None else length_bound_of(parts)
        self._token_bytes = None if parts is None else token_bytes_of(parts)
        self.special_ids = frozenset(wrapped.all_special_ids) | _special_added_ids(wrapped)
        self.vocab_size: int = len(wrapped)
        self.eos_token: str | None = wrapped.eos_token
        self.bos_token: str | None = wrapped.bos_token
        self.chat_template: str | None = _default_template(wrapped.chat_template)
        templates = wrapped.chat_template
        template = "".join(templates.values()) if isinstance(templates, dict) else templates or ""
        tool_format = tool_format_of(wrapped, template, tool_parser)
        self.eos_token_ids: frozenset[int] = frozenset(wrapped.eos_token_ids) | self._ids_of(tool_format.stops)
        self.text_bytes: list[bytes] | None = self._without_special_tokens()
        """The bytes that each id adds to a text, none for special tokens. None if they depend on other ids."""
        self.tool_format: ToolFormat = replace(
            tool_format, visible_specials=self._special_ids_in(tool_format.all_marks)
        )
        reasoning = reasoning_of(wrapped, template, reasoning_parser)
        self.reasoning: Reasoning | None = reasoning and replace(
            reasoning, visible_specials=self._special_ids_in(reasoning.all_marks)
        )
        self._fields = TemplateFields(tool_format, reasoning)
        self._control_text = None if allow_special_tokens else self._make_control_text()

    @property
    def vocabulary(self) -> dict[str, int]:
        """The id of each token, special tokens included, by how the vocabulary writes it."""
        return dict(self._hf.get_vocab())

    def encode(self, text: str, add_special_tokens: bool = True, at_most: int | None = None) -> list[int]:
        """Token ids of `text`. The text of a special token becomes that token.

        Raises:
            ContextLengthError: the text is so long that it has more than `at_most` tokens. It is not encoded then.
        """
        if self._length_bound is not None and at_most is not None:
            self._length_bound.check(text, at_most)
        return self._codec.encode(text, add_special_tokens)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of the ids. Bytes that are not UTF-8 become U+FFFD."""
        return self._codec.decode(token_ids, skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, which may be part of a UTF-8 character; for a special token, its own text.

        Empty for the ids that pad a vocabulary.
        """
        if self._token_bytes is None:
            return self.decode([token_id]).encode()
        return self._token_bytes[token_id] if token_id < len(self._token_bytes) else b""

    def token_string(self, token_id: int) -> str:
        """The token as the vocabulary writes it, such as `Ġthe`. Empty for the ids that pad a vocabulary."""
        return self._hf.convert_ids_to_tokens(token_id) or ""

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        at_most: int | None = None,
        *,
        template: str | None = None,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> list[int]:
        """Renders a chat template, by default the model's own, in Transformers' Jinja sandbox and encodes it.

        The template writes the BOS token, if any. Only the template itself can write control tokens: their text in a
        message or in `kwargs` stays text (see `control_text`). `kwargs` are variables of the template; the caller
        decides which of them a client may set. With `continue_final_message`, what the template writes after the text
        of the last message is cut off.

        Raises:
            InvalidRequestError: the model has no template, or the template refuses the messages.
            ContextLengthError: the rendered text has more than `at_most` tokens.
        """
        if template is None and not self._hf.has_chat_template:
            raise InvalidRequestError("this model has no chat template: use /v1/completions", param="messages")
        options: dict[str, Any] = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            **({} if template is None else {"chat_template": template}),  # mlx-lm's own renderers have no such option
        }
        messages = self._fields.fit(messages, kwargs, template or self.chat_template or "")
        control = self._control_text
        guarded = control.guard(messages, kwargs) if control is not None else None
        if control is None or guarded is None:
            text = self._render(messages, kwargs, options)
            ids = self.encode(text, add_special_tokens=False, at_most=at_most)
            return control.encode(text, {}) if control is not None and control.misread(ids, text) else ids
        text = self._render(guarded.messages, guarded.variables, options)
        if self._length_bound is not None and at_most is not None:
            self._length_bound.check(text, at_most)
        return control.encode(text, guarded.stand_ins)

    def _render(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], options: Mapping[str, Any]
    ) -> str:
        turns = [dict(message) for message in messages]
        try:
            text: str = self._hf.apply_chat_template(turns, **{**variables, **options, "tokenize": False})
        except Exception as error:  # a template is the model author's program: it may raise anything
            raise InvalidRequestError(f"the chat template refused the messages: {error}", param="messages") from error
        as_written = self._fields.tool_format.as_written
        return re.sub(*as_written, text) if as_written else text

    def _make_control_text(self) -> ControlText:
        family, added = self._fields.tool_format, self._hf.added_tokens_decoder
        marks = [*family.starts, family.end]
        marks += [self.reasoning.start, self.reasoning.end] if self.reasoning and not self.reasoning.repeats else []
        if family.in_content:
            marks += [token.content for token in added.values() if token.content in family.all_marks]
        backend = self._hf.backend_tokenizer if isinstance(self._codec, FastCodec) else None
        return ControlText(added, backend, marks)

    def _ids_of(self, tokens: Sequence[str]) -> frozenset[int]:
        vocabulary = self._hf.get_vocab() if tokens else {}
        return frozenset(vocabulary[token] for token in tokens if token in vocabulary)

    def _special_ids_in(self, marks: str) -> frozenset[int]:
        """Special tokens, apart from end-of-sequence tokens, whose text is part of `marks`."""
        texts = {i: self.token_bytes(i).decode("utf-8", "replace") for i in self.special_ids - self.eos_token_ids}
        return frozenset(i for i, text in texts.items() if text and text in marks)

    def _without_special_tokens(self) -> list[bytes] | None:
        if self._token_bytes is None:
            return None
        return [b"" if i in self.special_ids else raw for i, raw in enumerate(self._token_bytes)]


def _special_added_ids(wrapped: TokenizerWrapper) -> frozenset[int]:
    """Added tokens that are marked as special, so that decoding skips them. Some have no role such as BOS or EOS."""
    return frozenset(i for i, token in wrapped.added_tokens_decoder.items() if token.special)


def _default_template(template: str | dict[str, str] | None) -> str | None:
    return template.get("default") if isinstance(template, dict) else template


class ByteDetokenizer:
    """Turns one sequence's generated ids into text: the results of `add` and `finish`, joined, are its text.

    For tokenizers whose tokens are fixed runs of bytes (byte-level BPE, SentencePiece). Special tokens add nothing,
    except `visible_specials`, which are text. A first token that begins with a space keeps it. Apart from these two,
    the text equals `Tokenizer.decode(ids, skip_special_tokens=True)`.
    """

    __slots__ = ("_decode", "_text_bytes", "_tokenizer", "_visible_specials")

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], visible_specials: frozenset[int]) -> None:
        assert tokenizer.text_bytes is not None
        self._tokenizer = tokenizer
        self._text_bytes = tokenizer.text_bytes
        self._visible_specials = visible_specials
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def add(self, token_id: int) -> str:
        """The text that this token completes; empty while a UTF-8 character is incomplete."""
        if token_id in self._visible_specials:
            return self._decode(self._tokenizer.token_bytes(token_id))
        # Ids that pad the vocabulary add nothing.
        return self._decode(self._text_bytes[token_id]) if token_id < len(self._text_bytes) else ""

    def finish(self) -> str:
        """The rest of the text: U+FFFD for an incomplete character. Call it last."""
        return self._decode(b"", True)


class PrefixDetokenizer:
    """As `ByteDetokenizer`, for decoders that look at neighbouring tokens: the difference between decoding the last few
    ids with and without new ones. It begins with the end of the prompt.

    ids:  … | start … shown | shown …        `start`: decoding begins here, for context
                                             `shown`: ids before it have been returned as text
    """

    __slots__ = ("_ids", "_shown", "_start", "_tokenizer", "_visible_specials")

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], visible_specials: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._visible_specials = visible_specials
        self._ids = list(prompt_ids[-_CONTEXT_TOKENS:])
        self._start = 0
        self._shown = len(self._ids)

    def add(self, token_id: int) -> str:
        if token_id in self._visible_specials:
            return self.finish() + self._tokenizer.token_bytes(token_id).decode()
        self._ids.append(token_id)
        text = self._new_text()
        held = len(self._ids) - self._shown
        incomplete = (not text or text.endswith(_REPLACEMENT)) and held < _MAX_HELD_TOKENS
        return "" if incomplete else self._show(text)

    def finish(self) -> str:
        return self._show(self._new_text())

    def _show(self, text: str) -> str:
        self._start, self._shown = self._shown, len(self._ids)
        return text

    def _new_text(self) -> str:
        shown = self._decode(self._ids[self._start : self._shown])
        return self._decode(self._ids[self._start :])[len(shown) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)


Detokenizer = ByteDetokenizer | PrefixDetokenizer


def detokenizer_for(tokenizer: Tokenizer) -> Callable[[Sequence[int], frozenset[int]], Detokenizer]:
    """Makes the detokenizer of one sequence, from the ids of its prompt and the special tokens to write as text."""
    return partial(ByteDetokenizer if tokenizer.text_bytes is not None else PrefixDetokenizer, tokenizer)


# -- earlier messages in the form that a model's own template takes --------------------------------


_LOOKED_FOR = {"content": "'thinking'"}
"""Text of the templates that read a field, where its name is not enough."""


@dataclass(frozen=True, slots=True)
class TemplateFields:
    """How the templates of a family take calls, tools and reasoning."""

    tool_format: ToolFormat
    reasoning: Reasoning | None

    def fit(
        self, messages: Sequence[TemplateMessage], variables: Mapping[str, Any], template: str
    ) -> Sequence[TemplateMessage]:
        """The messages for `template`, which gets `variables` too."""
        fitted = list(self._fitted(messages, template))
        if self.tool_format.system_tools and variables.get("tools"):
            tools = json.dumps([tool["function"] for tool in variables["tools"]], ensure_ascii=False)
            if not fitted or fitted[0].get("role") != "system":
                fitted.insert(0, {"role": "system", "content": ""})
            fitted[0] = {**fitted[0], "tools": tools}
        return fitted

    def _fitted(self, messages: Sequence[TemplateMessage], template: str) -> Iterator[TemplateMessage]:
        for message in messages:
            yield self._of_assistant(message, template) if message.get("role") == "assistant" else message

    def _of_assistant(self, message: TemplateMessage, template: str) -> TemplateMessage:
        family, calls = self.tool_format, message.get("tool_calls")
        if calls and family.in_content:
            message = calls_as_text(message, self.tool_format)
        if calls and family.text_arguments:
            message = {**message, "tool_calls": list(map(_as_text, calls))}
        thought, reasoning = message.get("reasoning_content"), self.reasoning
        if not thought or reasoning is None or _LOOKED_FOR.get(reasoning.field, reasoning.field) not in template:
            return message
        return _with_thought(message, thought, reasoning.field)


def _as_text(call: Mapping[str, Any]) -> dict[str, Any]:
    """The call with its arguments as JSON text."""
    arguments = call["function"]["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": text}}


def _with_thought(message: TemplateMessage, thought: str, field: str) -> TemplateMessage:
    """The message with its reasoning in this field."""
    others = {name: value for name, value in message.items() if name != "reasoning_content"}
    if field == "content":
        text = [{"type": "text", "text": message["content"]}] if message.get("content") else []
        return {**others, "content": [{"type": "thinking", "thinking": thought}, *text]}
    if field == "thinking" and others.get("tool_calls") and others.get("content"):
        # gpt-oss' template refuses a message that has thinking, content and calls.
        return {**others, "content": "", "thinking": f"{thought}\n{others['content']}"}
    return {**others, field: thought}
