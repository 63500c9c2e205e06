import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlx_parallm.model.bundled import load_bundled
from mlx_parallm.model.tokenizer import Detokenizer, Tokenizer, detokenizer_for

SMOLLM = Tokenizer(TokenizerWrapper(load_bundled(dequantize=False)[1]))
EMOJI = "a 👨‍👩‍👧 日本語"


def word_piece():
    """A decoder that looks at neighbours: `##` joins a token to the one before."""
    words = ["[UNK]", "play", "##ing", "##s", "the", "game", "."]
    backend = Backend(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    return Tokenizer(TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")))


def new(tokenizer: Tokenizer, prompt_ids=()) -> Detokenizer:
    return detokenizer_for(tokenizer)(prompt_ids, frozenset())


def streamed(tokenizer, ids, prompt_ids=()):
    detokenizer = new(tokenizer, prompt_ids)
    return "".join([detokenizer.add(i) for i in ids]) + detokenizer.finish()


@given(st.lists(st.integers(0, SMOLLM.vocab_size - 1), max_size=40))
@example(SMOLLM.encode(EMOJI)[:-1])
@example(list(range(17)))
def test_stream_of_any_tokens_is_their_decoding(ids):
    assert streamed(SMOLLM, ids) == SMOLLM.decode(ids, skip_special_tokens=True)


@given(st.binary(max_size=30))
@example(b"\xe2\x82\xe2\x82\xac\xff\xf0\x9f")
def test_stream_of_any_bytes_is_their_decoding(data):
    """Single-byte tokens reach every kind of broken UTF-8."""
    byte_ids = {SMOLLM.token_bytes(i): i for i in range(SMOLLM.vocab_size) if len(SMOLLM.token_bytes(i)) == 1}
    ids = [byte_ids[bytes([byte])] for byte in data if bytes([byte]) in byte_ids]
    assert streamed(SMOLLM, ids) == SMOLLM.decode(ids)


@settings(max_examples=50)
@given(st.text(max_size=30))
def test_text_survives(text):
    assert streamed(SMOLLM, SMOLLM.encode(text, add_special_tokens=False)) == SMOLLM.decode(
        SMOLLM.encode(text), skip_special_tokens=True
    )


def test_nothing_is_shown_of_half_a_character():
    ids = SMOLLM.encode("👧")
    detokenizer = new(SMOLLM)
    assert [detokenizer.add(i) for i in ids] == [""] * (len(ids) - 1) + ["👧"]
    assert detokenizer.finish() == ""


@pytest.mark.parametrize(
    ("prompt", "ids", "text"),
    [([], [1, 2, 4, 5, 3, 6], "playing the games ."), ([4], [1, 2], " playing"), ([4, 1], [2, 5], "ing game")],
)
def test_decoders_that_look_at_neighbours_join_as_in_the_whole_text(prompt, ids, text):
    assert word_piece().text_bytes is None
    assert streamed(word_piece(), ids, prompt) == text
