"""Chat prompts in which a client's text stays text, even where it spells a control token such as `<|im_end|>`.

1. In every string of the client's, the text of a control token gets a stand-in for its first character. A stand-in is
   one private-use character that is nowhere else, so the template treats the string like any other.
2. Control tokens in the rendered text are then the template's own. Each is replaced by its alias, a text that nobody
   can guess, and the stand-ins are taken back.
3. A copy of the tokenizer that knows control tokens by their aliases alone encodes the result.

A chat without such text takes none of these steps.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from threading import Lock
from typing import Any

import tokenizers
from tokenizers import AddedToken

from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.model.codec import FastCodec

_PRIVATE_USE = range(0xE000, 0xF900)
_STRETCH = 64 * 1024
"""Characters of a text that are searched at once."""
_WRITTEN_AS_CONTROL = re.compile(r"<[|｜].+[|｜]>", re.DOTALL)
"""Some tokenizers do not mark the tokens of their roles as special; they are written like this all the same."""


def control_texts(added: Mapping[int, AddedToken]) -> dict[str, int]:
    """Added tokens that a client must not be able to write, and their ids: special ones, and others written like them.

    The rest, such as runs of spaces or a `<think>` that is not special, are words of the vocabulary.
    """
    control = {i: token for i, token in added.items() if token.special or _WRITTEN_AS_CONTROL.fullmatch(token.content)}
    return {token.content: i for i, token in control.items() if token.content}


StandIns = Mapping[str, str]
"""A control token's first character, and what stands for it."""


@dataclass(frozen=True, slots=True)
class Guarded:
    """What the template is given instead of the messages and variables that were sent."""

    messages: Sequence[Mapping[str, Any]]
    variables: Mapping[str, Any]
    stand_ins: StandIns


class ControlText:
    """Any thread.

    Args:
        added: the tokenizer's added tokens.
        backend: the tokenizer in Rust; None: there is none, and messages with the text of a control token are refused.
        marks: texts that an assistant's turn may have as control tokens: those around its reasoning and its calls.
    """

    def __init__(
        self, added: Mapping[int, AddedToken], backend: tokenizers.Tokenizer | None, marks: Collection[str]
    ) -> None:
        self._backend = backend
        self._ids = control_texts(added)
        self._every = _Finder(self._ids)
        self._without_marks = _Finder(self._ids.keys() - set(marks))
        self._normalized = frozenset(i for i in self._ids.values() if added[i].normalized)
        self._aliased: _Aliased | None = None
        self._lock = Lock()

    def guard(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> Guarded | None:
        """None: no string in them spells a control token. Raises InvalidRequestError: nothing is left to stand in."""
        parts = [*((turn, self._finder(turn)) for turn in messages), (variables, self._every)]
        if not any(finder.finds(text) for part, finder in parts for text in _strings(part)):
            return None
        said = "\0".join(text for part, _ in parts for text in _strings(part))
        stand_ins = _stand_ins({text[0] for text in self._ids}, said)
        *turns, others = [_changed(part, partial(finder.guarded, stand_ins=stand_ins)) for part, finder in parts]
        return Guarded(turns, others, stand_ins)

    def _finder(self, turn: Mapping[str, Any]) -> _Finder:
        return self._without_marks if turn.get("role") == "assistant" else self._every

    def encode(self, rendered: str, stand_ins: StandIns) -> list[int]:
        """Ids of a rendered text. Raises InvalidRequestError: this kind of tokenizer cannot encode it."""
        with self._lock:
            if self._aliased is None:
                self._aliased = _Aliased(self._backend, self._ids)
        aliases = self._aliased.aliases
        text = self._every.pattern.sub(lambda found: aliases[found[0]], rendered)
        return self._aliased.codec.encode(_restored(text, stand_ins), add_special_tokens=False)

    def misread(self, ids: Sequence[int], rendered: str) -> bool:
        """Whether the tokenizer's normalizer has made other text of `rendered` a control token."""
        if not self._normalized:
            return False
        written = sum(self._ids[text] in self._normalized for text in self._every.pattern.findall(rendered))
        return sum(token in self._normalized for token in ids) > written


class _Finder:
    """Finds control tokens in a text, the longest of those that begin at the same place."""

    def __init__(self, texts: Collection[str]) -> None:
        self.pattern = re.compile(_one_of(sorted(texts)) or r"(?!)")
        self._beginnings = frozenset(text[:end] for text in texts for end in range(1, len(text)))
        self._longest = max(map(len, self._beginnings), default=0)

    def finds(self, text: str) -> bool:
        return self._begun(text) > 0 or next(self._found(text), None) is not None

    def guarded(self, text: str, stand_ins: StandIns) -> str:
        """What the text ends with may be the beginning of a token, for another string of the client's to complete."""
        pieces, rest = [], 0
        for found in self._found(text):
            pieces += [text[rest : found.start()], stand_ins[found[0][0]], found[0][1:]]
            rest = found.end()
        text = "".join([*pieces, text[rest:]])
        if begun := self._begun(text):
            text = text[:-begun] + stand_ins[text[-begun]] + text[len(text) - begun + 1 :]
        return text

    def _found(self, text: str) -> Iterator[re.Match[str]]:
        """A search holds the interpreter, so each is of a stretch, and of what a token that begins in it may need."""
        at = 0
        while at < len(text):
            end = at + _STRETCH
            found = self.pattern.search(text, at, end + self._longest)
            if found is not None and found.start() < end:
                yield found
                at = found.end()
            else:
                at = end

    def _begun(self, text: str) -> int:
        """Length of the longest end of `text` that begins a control token."""
        lengths = range(min(self._longest, len(text)), 0, -1)
        return next((length for length in lengths if text[-length:] in self._beginnings), 0)


class _Aliased:
    """A copy of a tokenizer that has other texts for its control tokens, and the same ids.

    Raises:
        InvalidRequestError: this kind of tokenizer cannot be copied so.
    """

    def __init__(self, backend: tokenizers.Tokenizer | None, ids: Mapping[str, int]) -> None:
        secret = secrets.token_hex(16)
        self.aliases = {text: f"|{secret}{token_id:08d}|" for text, token_id in ids.items()}
        copy = self._copied(backend) if backend is not None else None
        if copy is None:
            raise InvalidRequestError(
                "a message has the text of a control token, which this model's tokenizer cannot encode as text; leave "
                "it out (or start the server with --allow-special-tokens)",
                param="messages",
            )
        self.codec = FastCodec(copy)

    def _copied(self, backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer | None:
        """None: an added token has another id in the copy."""
        copy = tokenizers.Tokenizer.from_str(json.dumps(self._renamed(json.loads(backend.to_str()))))
        before, after = backend.get_added_tokens_decoder(), copy.get_added_tokens_decoder()
        renamed = {i: self._alias(token.content) for i, token in before.items()}
        return copy if renamed == {i: token.content for i, token in after.items()} else None

    def _renamed(self, parts: dict[str, Any]) -> dict[str, Any]:
        added = [{**token, "content": self._alias(token["content"])} for token in parts["added_tokens"]]
        return {**parts, "added_tokens": added, "model": self._renamed_model(parts["model"]), "post_processor": None}

    def _renamed_model(self, model: dict[str, Any]) -> dict[str, Any]:
        """Its vocabulary may have control tokens as well, which text must not become either."""
        vocab: Any = model["vocab"]
        if isinstance(vocab, dict):
            vocab = {self._alias(text): i for text, i in vocab.items()}
        else:
            vocab = [[self._alias(text), score] for text, score in vocab]
        changed = {"vocab": vocab}
        if model.get("unk_token") is not None:
            changed["unk_token"] = self._alias(model["unk_token"])
        if "merges" in model:
            changed["merges"] = [merge for merge in model["merges"] if not self._names_control(merge)]
        return {**model, **changed}

    def _names_control(self, merge: str | list[str]) -> bool:
        pair = merge.split(" ") if isinstance(merge, str) else merge
        return any(text in self.aliases for text in (*pair, "".join(pair)))

    def _alias(self, text: str) -> str:
        return self.aliases.get(text, text)


def _restored(text: str, stand_ins: StandIns) -> str:
    for first, stand_in in stand_ins.items():
        escaped = json.dumps(stand_in)[1:-1]  # by a template that writes JSON in ASCII
        text = text.replace(stand_in, first).replace(escaped, json.dumps(first)[1:-1])
    return text


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from (*_strings(key), *_strings(part))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _strings(part)


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    """The value with every string in it changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_changed(key, change): _changed(part, change) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_changed(part, change) for part in value]
    return value


def _stand_ins(firsts: Collection[str], said: str) -> dict[str, str]:
    """A private-use character for each, which nobody has said."""
    free = (chr(code) for code in _PRIVATE_USE if chr(code) not in said and json.dumps(chr(code))[1:-1] not in said)
    stand_ins = dict(zip(sorted(firsts), free, strict=False))
    if len(stand_ins) < len(firsts):
        raise InvalidRequestError("the messages use every private-use character of Unicode", param="messages")
    return stand_ins


def _one_of(texts: Sequence[str]) -> str:
    """Regular expression of these texts, sorted, the longest first: a trie, so that their number costs no time."""
    ends = "" in texts
    groups = groupby((text for text in texts if text), key=lambda text: text[0])
    branches = [re.escape(first) + _one_of([text[1:] for text in group]) for first, group in groups]
    if not branches:
        return ""
    joined = branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
    return f"(?:{joined})?" if ends else joined
