"""The model's tokenizer: text to token ids and back on any thread, conversations to token ids by the chat template, and
generated ids to text as they arrive."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import AddedToken

from mlx_parallm.core.text import Reasoning, Tool, is_free_variable
from mlx_parallm.core.tool_text import TemplateMessage, calls_as_text
from mlx_parallm.errors import ConfigError, ContextLengthError, InvalidRequestError
from mlx_parallm.model.encoding import ControlText, StandIns, codec_of, token_bytes_of
from mlx_parallm.model.tools.formats import ToolFormat, tool_format_of
from mlx_parallm.model.tools.thinking import reasoning_of

_CHARACTERS_A_TOKEN = 32
"""Of a text with more characters for each token that it may have, the beginning is encoded first. Most texts have 2 to
5 a token; only runs of white space have more."""
_CUT_TOKENS = 64
"""Tokens by which the beginning of a text may have more than the same part of the whole text."""
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MAX_HELD_TOKENS = 16
"""Most tokens that are held back as parts of an incomplete character, which has at most four."""
_GENERATION = re.compile(r"\{%-?\s*generation\b")
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
        template_variables: of every conversation, where the caller of `apply_chat_template` does not set them.

    Raises:
        ConfigError: there is no format of this name, or a variable is not free.
    """

    def __init__(
        self,
        wrapped: TokenizerWrapper,
        allow_special_tokens: bool = False,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        template_variables: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        if taken := [name for name in template_variables if not is_free_variable(name)]:
            raise ConfigError(
                f"model.chat_template_kwargs: {taken[0]} is no free variable of a chat template; remove it"
            )
        self._hf = wrapped
        self._variables = template_variables
        self._codec = codec_of(wrapped)
        self._token_bytes = token_bytes_of(wrapped)
        added = wrapped.added_tokens_decoder  # special ones may have no role, such as BOS or EOS
        self.special_ids = frozenset(wrapped.all_special_ids) | {i for i, token in added.items() if token.special}
        self.text_bytes: list[bytes] | None = self._token_bytes and [
            b"" if i in self.special_ids else raw for i, raw in enumerate(self._token_bytes)
        ]
        """The bytes that each id adds to a text, none for special tokens. None if they depend on other ids."""
        self.vocab_size: int = len(wrapped)
        self.eos_token: str | None = wrapped.eos_token
        self.bos_token: str | None = wrapped.bos_token
        templates = wrapped.chat_template
        several = isinstance(templates, dict)
        self.chat_template: str | None = templates.get("default") if several else templates
        template = "".join(templates.values()) if several else templates or ""
        tool_format = tool_format_of(wrapped, template, tool_parser)
        vocabulary = wrapped.get_vocab() if tool_format.stops else {}
        stops = {vocabulary[token] for token in tool_format.stops if token in vocabulary}
        self.eos_token_ids: frozenset[int] = frozenset(wrapped.eos_token_ids) | stops
        self.tool_format = replace(tool_format, visible_specials=self._special_ids_in(tool_format.all_marks))
        reasoning = reasoning_of(wrapped, template, reasoning_parser)
        self.reasoning: Reasoning | None = reasoning and replace(
            reasoning, visible_specials=self._special_ids_in(reasoning.all_marks)
        )
        self._control_text = None if allow_special_tokens else self._make_control_text(added)

    @property
    def vocabulary(self) -> dict[str, int]:
        """The id of each token, special tokens included, by how the vocabulary writes it."""
        return dict(self._hf.get_vocab())

    def encode(self, text: str, add_special_tokens: bool = True, at_most: int | None = None) -> list[int]:
        """Token ids of `text`. The text of a special token becomes that token.

        Raises:
            ContextLengthError: the text is so long that its beginning alone has more than `at_most` tokens. The rest is
                not encoded then.
        """
        self._check_length(text, at_most)
        return self._codec.encode(text, add_special_tokens)

    def _check_length(self, text: str, at_most: int | None) -> None:
        if at_most is None or len(text) <= _CHARACTERS_A_TOKEN * at_most:
            return
        tokens = len(self._codec.encode(text[: _CHARACTERS_A_TOKEN * at_most], add_special_tokens=False)) - _CUT_TOKENS
        if tokens > at_most:
            raise ContextLengthError(
                f"This model's maximum context length is {at_most} tokens, and the prompt has {len(text)} characters, "
                f"which are at least {tokens} tokens. Shorten the prompt."
            )

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
        message or in `kwargs` stays text (see `ControlText`). `kwargs` are variables of the template; the caller
        decides which of them a client may set. With `continue_final_message`, what the template writes after the text
        of the last message is cut off.

        Raises:
            InvalidRequestError: the model has no template, or the template refuses the messages.
            ContextLengthError: the rendered text is so long that its beginning alone has more than `at_most` tokens.
        """
        if template is None and not self._hf.has_chat_template:
            raise InvalidRequestError("this model has no chat template: use /v1/completions", param="messages")
        options: dict[str, Any] = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tokenize": False,
            **({} if template is None else {"chat_template": template}),  # mlx-lm's own renderers have no such option
        }
        control, variables = self._control_text, {**self._variables, **kwargs}
        messages = _fitted(messages, variables, template or self.chat_template or "", self.tool_format, self.reasoning)
        stand_ins: StandIns = {}
        try:
            if control is not None:
                messages, variables, stand_ins = control.guard(messages, variables)
            text: str = self._hf.apply_chat_template([dict(each) for each in messages], **{**variables, **options})
        except Exception as error:  # a template is the model author's program: it may raise anything
            if isinstance(error, OSError) and error.errno is not None:  # of the machine, such as too many open files
                raise
            raise InvalidRequestError(f"the chat template refused the messages: {error}", param="messages") from error
        if self.tool_format.as_written:
            text = re.sub(*self.tool_format.as_written, text)
        self._check_length(text, at_most)
        return self._codec.encode(text, False) if control is None else control.encode(text, stand_ins)

    def assistant_mask(
        self, messages: Sequence[TemplateMessage], tools: Sequence[Tool] = ()
    ) -> tuple[list[int], list[bool]] | None:
        """The tokens of a conversation, and which of them the model's own template marks as the assistant's, between
        `{% generation %}` and `{% endgeneration %}`. None: it has no such marks, or they cannot be found in the tokens
        of `apply_chat_template`, because a message has the text of a control token.
        """
        has_calls = bool(tools) or any("tool_calls" in each or each.get("role") == "tool" for each in messages)
        if _GENERATION.search(self.chat_template or "") is None or (has_calls and not self.tool_format.in_template):
            return None
        variables: Mapping[str, Any] = {"tools": list(tools)} if tools else {}
        expected = self.apply_chat_template(messages, add_generation_prompt=False, **variables)
        variables = {**self._variables, **variables}
        fitted = _fitted(messages, variables, self.chat_template or "", self.tool_format, self.reasoning)
        options = {**variables, "return_dict": True, "return_assistant_tokens_mask": True}
        found = self._hf._tokenizer.apply_chat_template([dict(each) for each in fitted], **options)
        ids, marks = found["input_ids"], found["assistant_masks"]
        return (expected, list(map(bool, marks))) if list(ids) == expected else None

    def _make_control_text(self, added: Mapping[int, AddedToken]) -> ControlText:
        family, reasoning = self.tool_format, self.reasoning
        marks = [*family.starts, family.end]
        marks += [reasoning.start, reasoning.end] if reasoning and not reasoning.repeats else []
        if family.in_content:
            marks += [token.content for token in added.values() if token.content in family.all_marks]
        return ControlText(added, self._codec, marks)

    def _special_ids_in(self, marks: str) -> frozenset[int]:
        """Special tokens, apart from end-of-sequence tokens, whose text is part of `marks`."""
        texts = {i: self.token_bytes(i).decode("utf-8", "replace") for i in self.special_ids - self.eos_token_ids}
        return frozenset(i for i, text in texts.items() if text and text in marks)


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


# -- earlier messages in the form that a model's own template takes ------------------------------

_LOOKED_FOR = {"content": "'thinking'"}
"""Text of the templates that read a field, where its name is not enough."""


def _fitted(
    messages: Sequence[TemplateMessage],
    variables: Mapping[str, Any],
    template: str,
    tool_format: ToolFormat,
    reasoning: Reasoning | None,
) -> Sequence[TemplateMessage]:
    """The messages for `template`, which gets `variables` too, so that it writes what the model wrote."""
    field = reasoning.field if reasoning and _LOOKED_FOR.get(reasoning.field, reasoning.field) in template else None
    fitted = [_of_assistant(each, tool_format, field) if each.get("role") == "assistant" else each for each in messages]
    if tool_format.system_tools and variables.get("tools"):
        tools = json.dumps([tool["function"] for tool in variables["tools"]], ensure_ascii=False)
        if not fitted or fitted[0].get("role") != "system":
            fitted.insert(0, {"role": "system", "content": ""})
        fitted[0] = {**fitted[0], "tools": tools}
    return fitted


def _of_assistant(message: TemplateMessage, tool_format: ToolFormat, field: str | None) -> TemplateMessage:
    """An assistant's message with its calls and, if the template reads it, its reasoning in this field."""
    calls = message.get("tool_calls")
    if calls and tool_format.in_content:
        message = calls_as_text(message, tool_format)
    if calls and tool_format.text_arguments:
        message = {**message, "tool_calls": list(map(_with_text_arguments, calls))}
    thought = message.get("reasoning_content")
    if not thought or field is None:
        return message
    others = {name: value for name, value in message.items() if name != "reasoning_content"}
    if field == "content":
        text = [{"type": "text", "text": message["content"]}] if message.get("content") else []
        return {**others, "content": [{"type": "thinking", "thinking": thought}, *text]}
    if field == "thinking" and others.get("tool_calls") and others.get("content"):
        # gpt-oss' template refuses a message that has thinking, content and calls.
        return {**others, "content": "", "thinking": f"{thought}\n{others['content']}"}
    return {**others, field: thought}


def _with_text_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": text}}
