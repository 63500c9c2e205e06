"""Text to token ids and back, from any thread (`core.TextTokenizer`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_parallm.core import Reasoning, ToolFormat
from mlx_parallm.errors import ContextLengthError, InvalidRequestError
from mlx_parallm.model.codec import FastCodec, codec_of
from mlx_parallm.model.control_text import ControlText
from mlx_parallm.model.text_length import text_length_of
from mlx_parallm.model.token_bytes import pieces_of
from mlx_parallm.model.tools.families import family_of


class Tokenizer:
    """A Hugging Face tokenizer as mlx-lm wraps it, made safe to share.

    Encoding is the tokenizer's own: with `add_special_tokens` it adds a BOS if and only if the model's tokenizer does.
    Decoding never cleans spaces up, so that text streamed token by token joins to the same string.

    Args:
        allow_special_tokens: the text of a control token in a message becomes that token, as in `encode`.
    """

    def __init__(self, wrapped: TokenizerWrapper, allow_special_tokens: bool = False) -> None:
        self._hf = wrapped
        self._codec = codec_of(wrapped)
        self._text_length = text_length_of(wrapped)
        self.special_ids = frozenset(wrapped.all_special_ids) | _special_added_ids(wrapped)
        self._pieces = pieces_of(wrapped)
        self.vocab_size: int = len(wrapped)
        self.eos_token: str | None = wrapped.eos_token
        self.bos_token: str | None = wrapped.bos_token
        self.eos_token_ids: frozenset[int] = frozenset(wrapped.eos_token_ids)
        self.chat_template: str | None = _default_template(wrapped.chat_template)
        self.text_pieces: list[bytes] | None = self._without_special(self._pieces)
        """What each id adds to a text's bytes (special tokens nothing); None where that depends on its neighbours."""
        self.tool_format: ToolFormat = family_of(wrapped, self.chat_template, self._spelled_in)
        self.reasoning: Reasoning | None = self._reasoning(wrapped)
        self._control_text = None if allow_special_tokens else self._make_control_text(wrapped)

    def encode(self, text: str, add_special_tokens: bool = True, at_most: int | None = None) -> list[int]:
        """Token ids of `text`; special tokens written in it are recognised.

        Raises:
            ContextLengthError: the text is so long that it must have more than `at_most` tokens; it was not encoded.
        """
        self.check_length(text, at_most)
        return self._codec.encode(text, add_special_tokens)

    def check_length(self, text: str, at_most: int | None) -> None:
        """Raises ContextLengthError: `text` must have more than `at_most` tokens. See `text_length`."""
        least = 0 if at_most is None or self._text_length is None else self._text_length.least_tokens(text)
        if at_most is not None and least > at_most:
            raise ContextLengthError(
                f"The prompt has {len(text)} characters, which are at least {least} tokens; "
                f"this model's context is {at_most} tokens. Shorten the prompt."
            )

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of the ids; bytes that are not UTF-8 become U+FFFD."""
        return self._codec.decode(token_ids, skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for: part of a UTF-8 character, perhaps; a special token's own text.

        Empty for an id with no token (a model's padded vocabulary).
        """
        if self._pieces is None:
            return self.decode([token_id]).encode()
        return self._pieces[token_id] if token_id < len(self._pieces) else b""

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        at_most: int | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """Renders the model's template (Transformers' sandboxed Jinja) and encodes it; the template writes any BOS.

        Control tokens are the template's own alone: their text in a message or in `kwargs` is text (`control_text`).
        `kwargs` reach the template: the caller decides which of them a client may set.

        Raises:
            InvalidRequestError: the model has no template, or the template refuses the messages.
            ContextLengthError: the rendered text must have more than `at_most` tokens.
        """
        if not self._hf.has_chat_template:
            raise InvalidRequestError("this model has no chat template: use /v1/completions", param="messages")
        control = self._control_text
        guarded = control.guard(messages, kwargs) if control is not None else None
        if control is None or guarded is None:
            text = self._rendered(messages, add_generation_prompt, kwargs)
            ids = self.encode(text, add_special_tokens=False, at_most=at_most)
            return control.encode(text, {}) if control is not None and control.misread(ids, text) else ids
        text = self._rendered(guarded.messages, add_generation_prompt, guarded.variables)
        self.check_length(text, at_most)
        return control.encode(text, guarded.stand_ins)

    def _rendered(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> str:
        turns = [dict(message) for message in messages]
        options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": add_generation_prompt, **variables}
        try:
            text: str = self._hf.apply_chat_template(turns, **options)
        except Exception as error:  # a template is the model author's program: it may raise anything
            raise InvalidRequestError(f"the chat template refused the messages: {error}", param="messages") from error
        return text

    def _make_control_text(self, wrapped: TokenizerWrapper) -> ControlText:
        marks = [self.tool_format.start, self.tool_format.end]
        marks += [self.reasoning.start, self.reasoning.end] if self.reasoning else []
        backend = wrapped.backend_tokenizer if isinstance(self._codec, FastCodec) else None
        return ControlText(wrapped.added_tokens_decoder, backend, marks)

    def _reasoning(self, wrapped: TokenizerWrapper) -> Reasoning | None:
        if not wrapped.has_thinking:
            return None
        start, end, around = wrapped.think_start, wrapped.think_end, tuple(wrapped.structural_markers)
        return Reasoning(start, end, around, self._spelled_in(start + end + "".join(around)))

    def _spelled_in(self, marks: str) -> frozenset[int]:
        """Special tokens that are part of `marks`; not those that end a text."""
        texts = {i: self.token_bytes(i).decode("utf-8", "replace") for i in self.special_ids - self.eos_token_ids}
        return frozenset(i for i, text in texts.items() if text and text in marks)

    def _without_special(self, pieces: list[bytes] | None) -> list[bytes] | None:
        if pieces is None:
            return None
        return [b"" if i in self.special_ids else piece for i, piece in enumerate(pieces)]


def _special_added_ids(wrapped: TokenizerWrapper) -> frozenset[int]:
    """Ids that decoding skips: a tokenizer may mark more tokens special than it gives a role."""
    return frozenset(i for i, token in wrapped.added_tokens_decoder.items() if token.special)


def _default_template(template: str | dict[str, str] | None) -> str | None:
    return template.get("default") if isinstance(template, dict) else template
