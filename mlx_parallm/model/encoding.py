"""What the server needs of a Hugging Face tokenizer besides its own methods: a codec that many threads may use, the
bytes of each token, and chats in which a client's text stays text."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from threading import Lock
from typing import Any, Protocol

import tokenizers
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import AddedToken
from transformers.convert_slow_tokenizer import bytes_to_unicode

from mlx_parallm.errors import InvalidRequestError

# -- a codec for many threads --------------------------------------------------------------------

_SAMPLES = ("", "Hello, world!", "  two  spaces\n\n\tand 123 ", "naïve café 日本語 👨‍👩‍👧", "<s></s><|im_end|>")
"""Texts for which a Rust tokenizer must give the same ids with and without its Hugging Face wrapper."""


class Codec(Protocol):
    """Text to token ids and back. Safe to call from any thread."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str: ...


class FastCodec:
    """The Rust tokenizer inside a fast Hugging Face tokenizer. The wrapper around it is not thread-safe: it changes
    shared settings in each call.

    The batch methods release the interpreter lock while they work; the methods for a single text hold it.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self.backend = backend
        backend.no_truncation()
        backend.no_padding()

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        [encoding] = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        [text] = self.backend.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)
        return str(text)


class SlowCodec:
    """A tokenizer written in Python, used by one thread at a time.

    Encoding and decoding have separate locks, so that running sequences need not wait while a long prompt is encoded.
    """

    def __init__(self, wrapped: TokenizerWrapper) -> None:
        self._hf = wrapped
        self._encoding, self._decoding = Lock(), Lock()

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        with self._encoding:
            ids: list[int] = self._hf.encode(text, add_special_tokens=add_special_tokens)
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        with self._decoding:
            text: str = self._hf.decode(
                list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        return text


def codec_of(wrapped: TokenizerWrapper) -> Codec:
    """A FastCodec if the tokenizer has a Rust backend that gives the same results without its wrapper."""
    slow = SlowCodec(wrapped)
    backend: Any = getattr(wrapped, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        return slow
    fast = FastCodec(backend)
    return fast if all(_agree(fast, slow, text) for text in _SAMPLES) else slow


def _agree(one: Codec, other: Codec, text: str) -> bool:
    ids = [one.encode(text, special) for special in (True, False)]
    texts = [one.decode(ids[0], skip) for skip in (True, False)]
    same_ids = ids == [other.encode(text, special) for special in (True, False)]
    return same_ids and texts == [other.decode(ids[0], skip) for skip in (True, False)]


# -- the bytes of each token ---------------------------------------------------------------------

_SENTENCEPIECE_STEPS = {"Replace", "ByteFallback", "Fuse", "Strip"}
_WORD_START = "▁"  # SentencePiece writes a space like this


def token_bytes_of(wrapped: TokenizerWrapper) -> list[bytes] | None:
    """The bytes of every token id; for an added token, its own text. None if they depend on neighbouring tokens, or the
    tokenizer is written in Python.

    Two kinds of decoder give each token fixed bytes: GPT-2's byte-level alphabet, and SentencePiece's, with or without
    byte fallback (`<0xE2>`), whose leading space is kept.
    """
    backend = getattr(wrapped, "backend_tokenizer", None)
    to_bytes = None if backend is None else _token_decoder(json.loads(backend.to_str())["decoder"])
    if backend is None or to_bytes is None:
        return None
    vocabulary = backend.get_vocab(with_added_tokens=True)
    all_bytes = [to_bytes("")] * (max(vocabulary.values()) + 1)
    for token, i in vocabulary.items():
        all_bytes[i] = to_bytes(token)
    for i, token in backend.get_added_tokens_decoder().items():
        all_bytes[i] = token.content.encode()
    return all_bytes


def _token_decoder(decoder: dict[str, Any] | None) -> Callable[[str], bytes] | None:
    if decoder is None:
        return None
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = {step["type"] for step in steps}
    if kinds == {"ByteLevel"}:
        return _byte_level_bytes
    replaced = [(step["pattern"], step["content"]) for step in steps if step["type"] == "Replace"]
    of_words = {"Replace", "Fuse"} <= kinds <= _SENTENCEPIECE_STEPS and replaced == [({"String": _WORD_START}, " ")]
    return _sentencepiece_bytes if kinds == {"Metaspace"} or of_words else None


def _sentencepiece_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace(_WORD_START, " ").encode()


def _byte_level_bytes(token: str) -> bytes:
    """The inverse of GPT-2's printable alphabet. A token with a character outside it stands for its own UTF-8."""
    try:
        return bytes(map(BYTE_ALPHABET.__getitem__, token))
    except KeyError:
        return token.encode()


BYTE_ALPHABET: Mapping[str, int] = {letter: byte for byte, letter in bytes_to_unicode().items()}
"""The 256 characters in which byte-level tokens are written, and the byte that each stands for."""


# -- text that spells control tokens -------------------------------------------------------------
#
# A client's text stays text, even if it spells a control token such as `<|im_end|>`.
#
# 1. In every string from the client, the first character of each control token's text is replaced by a stand-in: a
#    private-use character that occurs nowhere else. For the template such a string is like any other.
# 2. The control tokens that the rendered text still has are then the template's own. Each is replaced by its alias, a
#    text that nobody can guess, and the stand-ins are replaced by the original characters.
# 3. A copy of the tokenizer that knows the control tokens only by their aliases encodes the result.
#
# These steps are skipped for chats without such text.

_PRIVATE_USE = range(0xE000, 0xF900)
_STRETCH = 64 * 1024
"""Characters of a text that are searched in one call."""
_LOOKS_LIKE_CONTROL = re.compile(r"<[|｜].+[|｜]>", re.DOTALL)
"""Some tokenizers do not mark their role tokens as special, but write them like this."""


StandIns = Mapping[str, str]
"""The first character of a control token → its stand-in."""


class ControlText:
    """Keeps the text of control tokens in client strings from becoming tokens. Safe on any thread.

    Control tokens are the added tokens that a client must not write: special ones, and others that look like them.
    Other added tokens, such as runs of spaces or a `<think>` that is not special, are ordinary words.

    Args:
        added: the tokenizer's added tokens.
        codec: the tokenizer's. With one written in Python, messages with the text of a control token are refused.
        marks: control tokens that an assistant's message may contain: the marks of reasoning and of tool calls.
    """

    def __init__(self, added: Mapping[int, AddedToken], codec: Codec, marks: Collection[str]) -> None:
        self._codec = codec
        self._ids = {
            token.content: i
            for i, token in added.items()
            if token.content and (token.special or _LOOKS_LIKE_CONTROL.fullmatch(token.content))
        }
        self._all = _Finder(self._ids)
        self._all_but_marks = _Finder(self._ids.keys() - set(marks))
        self._normalized = frozenset(i for i in self._ids.values() if added[i].normalized)
        self._aliased: tuple[Codec, Mapping[str, str]] | None = None
        self._lock = Lock()

    def guard(
        self, messages: Sequence[Mapping[str, Any]], variables: dict[str, Any]
    ) -> tuple[Sequence[Mapping[str, Any]], dict[str, Any], StandIns]:
        """The messages and variables for the template, with stand-ins in their strings; as they are if no string spells
        a control token.

        Raises:
            InvalidRequestError: the strings use every private-use character.
        """
        finders = [self._all_but_marks if each.get("role") == "assistant" else self._all for each in messages]
        parts = [*zip(messages, finders, strict=True), (variables, self._all)]
        if not any(finder.finds(text) for part, finder in parts for text in _strings(part)):
            return messages, variables, {}
        all_text = "\0".join(text for part, _ in parts for text in _strings(part))
        stand_ins = _choose_stand_ins({text[0] for text in self._ids}, all_text)
        *guarded, others = [_map_strings(part, partial(finder.guard, stand_ins=stand_ins)) for part, finder in parts]
        return guarded, others, stand_ins

    def encode(self, rendered: str, stand_ins: StandIns) -> list[int]:
        """Token ids of a rendered text. Raises InvalidRequestError: this kind of tokenizer cannot be copied."""
        if not stand_ins:
            ids = self._codec.encode(rendered, add_special_tokens=False)
            if not self._misread(ids, rendered):
                return ids
        with self._lock:
            if self._aliased is None:
                self._aliased = _aliased_codec(self._codec, self._ids)
        codec, aliases = self._aliased
        text = self._all.pattern.sub(lambda found: aliases[found[0]], rendered)
        for first, stand_in in stand_ins.items():
            escaped = json.dumps(stand_in)[1:-1]  # a template may write JSON in ASCII
            text = text.replace(stand_in, first).replace(escaped, json.dumps(first)[1:-1])
        return codec.encode(text, add_special_tokens=False)

    def _misread(self, ids: Sequence[int], rendered: str) -> bool:
        """Whether the tokenizer's normalizer has turned other text of `rendered` into a control token."""
        if not self._normalized:
            return False
        written = sum(self._ids[text] in self._normalized for text in self._all.pattern.findall(rendered))
        return sum(token in self._normalized for token in ids) > written


class _Finder:
    """Finds control tokens in a text; of several that begin at the same place, the longest."""

    def __init__(self, texts: Collection[str]) -> None:
        self.pattern = re.compile(_any_of(sorted(texts)) or r"(?!)")
        self._prefixes = frozenset(text[:end] for text in texts for end in range(1, len(text)))
        self._longest = max(map(len, self._prefixes), default=0)

    def finds(self, text: str) -> bool:
        return self._prefix_at_end(text) > 0 or next(self._matches(text), None) is not None

    def guard(self, text: str, stand_ins: StandIns) -> str:
        """The text with stand-ins for the first characters of control tokens.

        One more stand-in is needed if the text ends with the beginning of a control token, because the client's next
        string might complete it.
        """
        pieces, rest = [], 0
        for match in self._matches(text):
            pieces += [text[rest : match.start()], stand_ins[match[0][0]], match[0][1:]]
            rest = match.end()
        text = "".join([*pieces, text[rest:]])
        if length := self._prefix_at_end(text):
            text = text[:-length] + stand_ins[text[-length]] + text[len(text) - length + 1 :]
        return text

    def _matches(self, text: str) -> Iterator[re.Match[str]]:
        """Searches one stretch at a time, because a search holds the interpreter lock. A token that begins in a stretch
        may end in the next one."""
        at = 0
        while at < len(text):
            end = at + _STRETCH
            match = self.pattern.search(text, at, end + self._longest)
            if match is not None and match.start() < end:
                yield match
                at = match.end()
            else:
                at = end

    def _prefix_at_end(self, text: str) -> int:
        """Length of the longest end of `text` that is the beginning of a control token."""
        lengths = range(min(self._longest, len(text)), 0, -1)
        return next((length for length in lengths if text[-length:] in self._prefixes), 0)


def _aliased_codec(codec: Codec, ids: Mapping[str, int]) -> tuple[Codec, Mapping[str, str]]:
    """A copy of a tokenizer with other texts for its control tokens and the same ids, and these texts.

    Control tokens are renamed in the vocabulary too, and merges into them are dropped, so that no text becomes one.

    Raises:
        InvalidRequestError: this kind of tokenizer cannot be copied like that.
    """
    secret = secrets.token_hex(16)
    aliases = {text: f"|{secret}{token_id:08d}|" for text, token_id in ids.items()}
    if isinstance(codec, FastCodec):
        parts = json.loads(codec.backend.to_str())
        parts["post_processor"] = None
        for token in parts["added_tokens"]:
            token["content"] = aliases.get(token["content"], token["content"])
        _rename_in_model(parts["model"], aliases)
        copy = tokenizers.Tokenizer.from_str(json.dumps(parts))
        before, after = codec.backend.get_added_tokens_decoder(), copy.get_added_tokens_decoder()
        expected = {i: aliases.get(token.content, token.content) for i, token in before.items()}
        if expected == {i: token.content for i, token in after.items()}:
            return FastCodec(copy), aliases
    raise InvalidRequestError(
        "a message has the text of a control token, which this model's tokenizer cannot encode as text; leave it out "
        "(or start the server with --allow-special-tokens)",
        param="messages",
    )


def _rename_in_model(model: dict[str, Any], aliases: Mapping[str, str]) -> None:
    vocab: Any = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {aliases.get(text, text): i for text, i in vocab.items()}
    else:
        model["vocab"] = [[aliases.get(text, text), score] for text, score in vocab]
    if model.get("unk_token") is not None:
        model["unk_token"] = aliases.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        pairs = [(merge, merge.split(" ") if isinstance(merge, str) else merge) for merge in model["merges"]]
        model["merges"] = [merge for merge, pair in pairs if aliases.keys().isdisjoint((*pair, "".join(pair)))]


def _strings(value: Any) -> Iterator[str]:
    """Every string in a nested value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from (*_strings(key), *_strings(part))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _strings(part)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """The value with `change` applied to every string in it."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map_strings(key, change): _map_strings(part, change) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_map_strings(part, change) for part in value]
    return value


def _choose_stand_ins(firsts: Collection[str], all_text: str) -> dict[str, str]:
    """A private-use character for each of `firsts` that does not occur in `all_text`."""
    free = (
        chr(code) for code in _PRIVATE_USE if chr(code) not in all_text and json.dumps(chr(code))[1:-1] not in all_text
    )
    stand_ins = dict(zip(sorted(firsts), free, strict=False))
    if len(stand_ins) < len(firsts):
        raise InvalidRequestError("the messages use every private-use character of Unicode", param="messages")
    return stand_ins


def _any_of(texts: Sequence[str]) -> str:
    """A regular expression for any of these sorted texts, the longest first. It is a trie, so that its speed does not
    depend on their number."""
    can_end = "" in texts
    groups = groupby((text for text in texts if text), key=lambda text: text[0])
    branches = [re.escape(first) + _any_of([text[1:] for text in group]) for first, group in groups]
    if not branches:
        return ""
    joined = branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
    return f"(?:{joined})?" if can_end else joined
