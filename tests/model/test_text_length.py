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
from mlx_parallm.model.text_length import text_length_of
from mlx_parallm.model.token_bytes import BYTE_ALPHABET
from mlx_parallm.model.tokenizer import Tokenizer

LONG_TOKENS = ["Ġ" * 8, "ab" * 16, "é".encode().decode("latin-1")]


def wrapped(*, normalizer=None, pre_tokenizer=None, drops=False, model=None, added=()):
    """A byte-level tokenizer with a few long tokens, changed in one way."""
    alphabet = sorted(BYTE_ALPHABET)[: 200 if drops else 256]
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
}
UNKNOWN = {
    "strip": {"normalizer": normalizers.Strip()},
    "any replacement": {"normalizer": normalizers.Replace(Regex(" +"), " ")},
    "removed": {"pre_tokenizer": pre_tokenizers.Split(" ", "removed")},
    "white space removed": {"pre_tokenizer": pre_tokenizers.WhitespaceSplit()},
    "drops bytes": {"drops": True},
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
    assert text_length_of(TokenizerWrapper(tiny_tokenizer())).spaces
    assert sentencepiece()._text_length is not None
