"""One tokenizer for many threads: the ids of the Hugging Face tokenizer, and no waiting for other texts."""

import threading

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from model.test_tokenizer import TEXT, sentencepiece
from tiny import tiny_tokenizer
from transformers import PreTrainedTokenizerFast

from mlx_parallm.model.bundled import load_bundled
from mlx_parallm.model.codec import FastCodec, SlowCodec
from mlx_parallm.model.tokenizer import Tokenizer

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
