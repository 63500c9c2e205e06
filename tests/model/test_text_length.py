"""No text that fits is refused by its length, and every text that is far too long is."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper
from model.test_tokenizer import sentencepiece
from tiny import tiny_tokenizer
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from mlx_parallm.errors import ContextLengthError
from mlx_parallm.model.bundled import load_bundled
from mlx_parallm.model.text_length import text_length_of
from mlx_parallm.model.token_bytes import BYTE_ALPHABET
from mlx_parallm.model.tokenizer import Tokenizer

LONG_TOKENS = ["Ġ" * 8, "ab" * 16, "é".encode().decode("latin-1")]


NEVER_FIRST = range(0x80, 0xC0)
"""Bytes that only go on with a character of UTF-8."""


def wrapped(*, normalizer=None, pre_tokenizer=None, lacks=(), model=None, added=()):
    """A byte-level tokenizer with a few long tokens, changed in one way. `lacks`: bytes without a token."""
    alphabet = sorted(letter for letter, byte in BYTE_ALPHABET.items() if byte not in lacks)
    words = [*alphabet, *LONG_TOKENS]
    backend = Backend(model or models.BPE({word: i for i, word in enumerate(words)}, [], ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*([pre_tokenizer] if pre_tokenizer else []), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_special_tokens(["<eos>", *added])
    return TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>"))


KNOWN = {
    "byte level": {},
    "nfc": {"normalizer": normalizers.NFC()},
    "nfkc": {"normalizer": normalizers.NFKC()},
    "replace": {"normalizer": normalizers.Replace("aaaa", "b")},
    "swallows space": {"added": [AddedToken("<x>", lstrip=True, rstrip=True)]},
    "isolated": {"pre_tokenizer": pre_tokenizers.Split(" ", "isolated")},
    "lacks first bytes": {"lacks": (*range(9), 0x1D, 0xC0, 0xC1, *range(0xF0, 0x100))},
}
UNKNOWN = {
    "strip": {"normalizer": normalizers.Strip()},
    "any replacement": {"normalizer": normalizers.Replace(Regex(" +"), " ")},
    "removed": {"pre_tokenizer": pre_tokenizers.Split(" ", "removed")},
    "white space removed": {"pre_tokenizer": pre_tokenizers.WhitespaceSplit()},
    "lacks other bytes": {"lacks": NEVER_FIRST},
    "lacks bytes and joins": {"lacks": (1,), "normalizer": normalizers.NFC()},
    "word level": {"model": models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>")},
}
PIECES = [
    "a",
    "aaaa",
    "ab" * 16,
    " ",
    "        ",
    "é",
    "e\u0301",
    "ᾂ",
    "α\u0313\u0300\u0345",
    "日",
    "🙂",
    "\x01\x02" * 8,
    "<x>",
    "<eos>",
    "\n",
]


@pytest.mark.parametrize("changes", KNOWN.values(), ids=KNOWN)
@settings(max_examples=100, deadline=None)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=40))
def test_a_text_has_at_least_as_many_tokens_as_its_length_says(changes, pieces):
    tokenizer = wrapped(**changes)
    text = "".join(pieces)
    assert text_length_of(tokenizer).least_tokens(text) <= len(tokenizer.backend_tokenizer.encode(text).ids)


@pytest.mark.parametrize("changes", KNOWN.values(), ids=KNOWN)
def test_a_text_that_is_far_too_long_is_refused_without_being_encoded(changes, monkeypatch):
    tokenizer = Tokenizer(wrapped(**changes))
    monkeypatch.setattr(tokenizer, "_codec", None)
    with pytest.raises(ContextLengthError, match="Shorten"):
        tokenizer.encode("word " * 100_000, at_most=100)


@pytest.mark.parametrize("changes", UNKNOWN.values(), ids=UNKNOWN)
def test_nothing_is_refused_where_a_tokenizer_may_shorten_texts(changes):
    assert text_length_of(wrapped(**changes)) is None
    assert Tokenizer(wrapped(**changes)).encode(" " * 1000, at_most=1) is not None


def test_the_kinds_that_models_have_are_known():
    assert text_length_of(TokenizerWrapper(load_bundled(dequantize=False)[1])) is not None
    assert text_length_of(TokenizerWrapper(tiny_tokenizer())).spaces
    assert sentencepiece()._text_length is not None
