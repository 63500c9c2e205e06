import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tiny import EOS_ID, tiny_tokenizer
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


def test_first_token_keeps_its_space():
    (paris,) = SMOLLM.encode(" Paris")
    assert new(SMOLLM, SMOLLM.encode("It is")).add(paris) == " Paris"


def test_nothing_is_shown_of_half_a_character():
    ids = SMOLLM.encode("👧")
    detokenizer = new(SMOLLM)
    assert [detokenizer.add(i) for i in ids] == [""] * (len(ids) - 1) + ["👧"]
    assert detokenizer.finish() == ""


def test_half_a_character_at_the_end_is_flushed():
    detokenizer = new(SMOLLM)
    for token in SMOLLM.encode("👧")[:-1]:
        assert detokenizer.add(token) == ""
    assert detokenizer.finish() == "\N{REPLACEMENT CHARACTER}"


def test_special_and_padding_tokens_add_nothing():
    assert streamed(SMOLLM, [2, 0, SMOLLM.vocab_size + 5]) == ""


@pytest.mark.parametrize(
    ("prompt", "ids", "text"),
    [([], [1, 2, 4, 5, 3, 6], "playing the games ."), ([4], [1, 2], " playing"), ([4, 1], [2, 5], "ing game")],
)
def test_decoders_that_look_at_neighbours_join_as_in_the_whole_text(prompt, ids, text):
    assert word_piece().text_bytes is None
    assert streamed(word_piece(), ids, prompt) == text


def test_tokens_without_text_are_not_decoded_again_and_again(monkeypatch):
    """Each step decodes a few tokens, however many have said nothing."""
    tokenizer = Tokenizer(TokenizerWrapper(tiny_tokenizer()))
    monkeypatch.setattr(tokenizer, "text_bytes", None)
    lengths, decode = [], tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **skip: lengths.append(len(ids)) or decode(ids, **skip))
    detokenizer = new(tokenizer)
    silent = [detokenizer.add(EOS_ID) for _ in range(500)]
    assert set(silent) == {""}
    assert detokenizer.add(ord("A") - 33) != ""
    assert max(lengths) < 50
