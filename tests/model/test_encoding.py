"""One tokenizer for many threads, and texts that are refused by their length alone."""

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper
from model.test_tokenizer import TEXT, sentencepiece
from tiny import tiny_tokenizer
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from mlx_parallm.errors import ContextLengthError
from mlx_parallm.model.bundled import load_bundled
from mlx_parallm.model.encoding import BYTE_ALPHABET, FastCodec, SlowCodec
from mlx_parallm.model.tokenizer import Tokenizer

# ---- the codec --------------------------------------------------------------------------------

MAKE = {
    "bundled": lambda: Tokenizer(TokenizerWrapper(load_bundled(dequantize=False)[1])),
    "sentencepiece": sentencepiece,
    "tiny": lambda: Tokenizer(TokenizerWrapper(tiny_tokenizer())),
}


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
@pytest.mark.parametrize("text", [TEXT, "", " ", "<s> x </s>", "<|im_start|>user\nhi<|im_end|>", "x" * 5000])
def test_ids_and_texts_are_the_wrapped_tokenizers(make, text):
    tokenizer = make()
    assert isinstance(tokenizer._codec, FastCodec)
    for special in (True, False):
        ids = tokenizer._hf.encode(text, add_special_tokens=special)
        assert tokenizer.encode(text, special) == ids
        for skip in (True, False):
            expected = tokenizer._hf.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert tokenizer.decode(ids, skip) == expected


def test_short_texts_do_not_wait_for_a_long_one():
    tokenizer = MAKE["bundled"]()
    long = threading.Thread(target=tokenizer.encode, args=("hello world, how are you? " * 40_000,))
    long.start()
    short = 0
    while long.is_alive():
        tokenizer.encode("hi")
        short += 1
    assert short > 10


def test_a_tokenizer_with_an_encoding_of_its_own_keeps_it():
    class Shouting(PreTrainedTokenizerFast):
        def encode(self, text, **options):
            return super().encode(text.upper(), **options)

    inner = tiny_tokenizer()
    loud = Shouting(tokenizer_object=inner.backend_tokenizer, eos_token=inner.eos_token)
    tokenizer = Tokenizer(TokenizerWrapper(loud))
    assert isinstance(tokenizer._codec, SlowCodec)
    assert tokenizer.decode(tokenizer.encode("Hello")) == "HELLO"


# ---- texts that are too long -------------------------------------------------------------------

LONG_TOKENS = ["Ġ" * 8, "ab" * 16, "é".encode().decode("latin-1")]


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


KINDS = {
    "byte level": {},
    "nfc": {"normalizer": normalizers.NFC()},
    "nfkc": {"normalizer": normalizers.NFKC()},
    "replace": {"normalizer": normalizers.Replace("aaaa", "b")},
    "swallows space": {"added": [AddedToken("<x>", lstrip=True, rstrip=True)]},
    "isolated": {"pre_tokenizer": pre_tokenizers.Split(" ", "isolated")},
    "lacks first bytes": {"lacks": (*range(9), 0x1D, 0xC0, 0xC1, *range(0xF0, 0x100))},
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


@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)
@settings(max_examples=100, deadline=None)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=40), spaces=st.integers(0, 8))
def test_a_text_that_fits_is_never_refused(changes, pieces, spaces):
    tokenizer = Tokenizer(wrapped(**changes))
    text = "".join(pieces) + " " * 1000 * spaces
    ids = tokenizer.encode(text)
    assert tokenizer.encode(text, at_most=len(ids)) == ids


@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)
def test_of_a_text_that_is_far_too_long_only_the_beginning_is_encoded(changes, monkeypatch):
    tokenizer = Tokenizer(wrapped(**changes))
    encode, encoded = tokenizer._codec.encode, []
    monkeypatch.setattr(
        tokenizer._codec, "encode", lambda text, **options: encoded.append(text) or encode(text, **options)
    )
    with pytest.raises(ContextLengthError, match="Shorten"):
        tokenizer.encode("word " * 100_000, at_most=200)
    assert len("".join(encoded)) < 10_000
