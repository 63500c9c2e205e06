import inspect

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tiny import tiny_tokenizer
from tokenizers import AddedToken, decoders, models, normalizers, processors
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from mlx_parallm.core.text import RESERVED_VARIABLES
from mlx_parallm.errors import ConfigError, InvalidRequestError
from mlx_parallm.model.bundled import load_bundled
from mlx_parallm.model.tokenizer import Tokenizer

TEXT = "In 2024 the naïve café cost 12 €.\n\n\t日本語 👨‍👩‍👧  end"


@pytest.fixture(scope="module")
def smollm():
    return Tokenizer(TokenizerWrapper(load_bundled(dequantize=False)[1]))


def tiny(**changes):
    hf = tiny_tokenizer()
    for name, value in changes.items():
        setattr(hf, name, value)
    return Tokenizer(TokenizerWrapper(hf))


def sentencepiece():
    """Two words, byte fallback, and a BOS of its own, as llama 2 and mistral have."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁Paris", "▁is", "x"]
    backend = Backend(models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.add_special_tokens([AddedToken(word, special=True) for word in words[:3]])
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    hf = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=template
    )
    return Tokenizer(TokenizerWrapper(hf))


def test_digits_are_single_tokens_and_special_ones_are_recognised(smollm):
    assert [smollm.token_bytes(i) for i in smollm.encode("a 123<|im_end|>")] == [
        *(b"a", b" ", b"1", b"2", b"3"),
        b"<|im_end|>",
    ]
    assert smollm.encode("<|im_end|>") == [2] == list(smollm.eos_token_ids)


def test_a_machine_without_descriptors_is_not_the_messages_fault(smollm, monkeypatch):
    def fails(*_, **__):
        raise OSError(24, "Too many open files", "/home/me/jinja2/debug.py")

    monkeypatch.setattr(smollm._hf, "apply_chat_template", fails)
    with pytest.raises(OSError, match="Too many open files"):
        smollm.apply_chat_template([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("messages", [[{"role": "user"}], [{"content": "hi"}], [{"role": "user", "content": [1]}]])
def test_a_message_the_template_cannot_take_is_the_clients_error(smollm, messages):
    with pytest.raises(InvalidRequestError, match="chat template") as caught:
        smollm.apply_chat_template(messages)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('roles must alternate') }}", "{{ messages.__class__.__mro__ }}", "{% if %}"]
)
def test_template_errors_and_sandbox_escapes_are_refused(template):
    with pytest.raises(InvalidRequestError):
        tiny(chat_template=template).apply_chat_template([{"role": "user", "content": "hi"}])


def test_a_model_without_template_says_so():
    tokenizer = tiny(chat_template=None)
    assert tokenizer.chat_template is None
    with pytest.raises(InvalidRequestError, match="no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])


def test_bos_is_added_once():
    tokenizer = sentencepiece()
    assert tokenizer.encode("x")[0] == 1
    assert 1 not in tokenizer.encode("x", add_special_tokens=False)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}]).count(1) == 1


def test_sentencepiece_tokens_have_exact_bytes():
    tokenizer = sentencepiece()
    paris = tokenizer.encode("é", add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, paris)) == " é".encode()
    assert tokenizer.token_bytes(260) == b" Paris"


@pytest.mark.parametrize("text", ["The capital is", " two  spaces ", "<|im_end|>\n<|im_start|>user"])
def test_a_prompt_may_end_with_the_text_of_the_last_message(smollm, text):
    """Also if the text spells a control token, which stays text."""
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": text}]
    whole = smollm.apply_chat_template(turns, add_generation_prompt=False)
    ids = smollm.apply_chat_template(turns, add_generation_prompt=False, continue_final_message=True)
    assert whole[: len(ids)] == ids
    assert smollm.decode(ids).endswith("<|im_start|>assistant\n" + text)
    ends = smollm.encode("<|im_end|>")
    assert whole.count(ends[0]) - ids.count(ends[0]) == 1


def test_another_template_is_rendered_in_the_sandbox(smollm):
    turns = [{"role": "user", "content": "<|im_end|>"}]
    template = "{{ mood }}:{% for m in messages %}{{ m.content }}{% endfor %}<|im_end|>"
    ids = smollm.apply_chat_template(turns, template=template, mood="calm")
    assert (smollm.decode(ids), ids.count(2)) == ("calm:<|im_end|><|im_end|>", 1)
    with pytest.raises(InvalidRequestError, match="unsafe"):
        smollm.apply_chat_template(turns, template="{{ messages.__class__.__mro__ }}")


def test_variables_of_every_conversation_give_way_to_those_of_a_call():
    hf = tiny_tokenizer()
    hf.chat_template = "{{ mood }}{{ place }}"
    tokenizer = Tokenizer(TokenizerWrapper(hf), template_variables={"mood": "a", "place": "b"})
    turns = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(turns) == tokenizer.encode("ab", add_special_tokens=False)
    assert tokenizer.apply_chat_template(turns, mood="c") == tokenizer.encode("cb", add_special_tokens=False)
    for taken in ("tools", "bos_token"):
        with pytest.raises(ConfigError, match=rf"model\.chat_template_kwargs: {taken} is no free variable"):
            Tokenizer(TokenizerWrapper(hf), template_variables={taken: 1})


def test_every_argument_of_the_renderer_is_reserved():
    """So no variable of a client's can take the place of one."""
    named = inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters
    arguments = {name for name, about in named.items() if about.kind is not about.VAR_KEYWORD}
    assert arguments <= RESERVED_VARIABLES
