"""Tokenizers and chat templates of several kinds, and random chats: `from chat_templates import KINDS, chat, made`."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

WORDS = (
    "hello",
    "the quick brown fox",
    "naïve café",
    "日本語",
    "12 34",
    "a < b",
    "I'm",
    "end.",
    "\n\n",
    "  ",
    "{x}",
    "\ue000",
)

_CHATML = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif -%}
{%- for m in messages %}<|im_start|>{{ m.name or m.role }}
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
{%- for c in m.tool_calls or [] %}
<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

_THINKING = """\
{%- for m in messages %}
{%- if m.role == 'tool' %}<|im_start|>user
<tool_response>{{ m.content }}</tool_response><|im_end|>
{% else %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and '</think>' in m.content -%}
{{ m.content.split('</think>')[-1].lstrip() }}{% else %}{{ m.content.strip() }}{% endif %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>{% endif %}"""

_HEADERS = """\
{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{{ m.content | trim }}{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}<|eot_id|>{% endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

_INST = """\
{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content | trim }}</s>
{%- for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}
{%- else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"""

_TURNS = """\
{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}
{{ m.content | trim }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""

_BARS = """\
{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}<｜Assistant｜>{{ m.content }}<｜end▁of▁sentence｜>
{%- else %}<｜User｜>{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"""

_CHANGING = """\
{% for m in messages %}<|im_start|>{{ m.role | upper }}: {{ m.content | upper | replace('X', 'y') }}|
{{- m.content[:9] }}|{{ m.content | tojson(ensure_ascii=True) }}|{{ m.content.split(' ') | join('_') }}<|im_end|>
{%- endfor %}"""

_SPECIAL, _PLAIN = True, False
_IM = {"<|im_start|>": _SPECIAL, "<|im_end|>": _SPECIAL, "<think>": _PLAIN, "</think>": _PLAIN, "<tool_call>": _PLAIN}
_S = {"<unk>": _SPECIAL, "<s>": _SPECIAL, "</s>": _SPECIAL}
_BAR = {
    "<｜begin▁of▁sentence｜>": _SPECIAL,
    "<｜end▁of▁sentence｜>": _SPECIAL,
    "<｜User｜>": _PLAIN,
    "<｜Assistant｜>": _PLAIN,
}

KINDS: dict[str, tuple[str, str, dict[str, bool]]] = {
    "chatml": ("bytes", _CHATML, {"<|endoftext|>": _SPECIAL, **_IM}),
    "thinking": ("bytes", _THINKING, {"<|endoftext|>": _SPECIAL, **_IM, "<tool_response>": _PLAIN, "  ": _PLAIN}),
    "headers": (
        "bytes",
        _HEADERS,
        dict.fromkeys(("<|begin|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"), _SPECIAL),
    ),
    "inst": ("bpe", _INST, {**_S, **dict.fromkeys(("[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]"), _SPECIAL)}),
    "turns": ("unigram", _TURNS, {**_S, "<start_of_turn>": _SPECIAL, "<end_of_turn>": _SPECIAL, "\n\n": _PLAIN}),
    "bars": ("bytes", _BARS, _BAR),
    "changing": ("bytes", _CHANGING, {"<|endoftext|>": _SPECIAL, **_IM}),
}
"""By name: kind of tokenizer, template, added tokens and whether they are special."""


@cache
def made(name: str) -> PreTrainedTokenizerFast:
    kind, template, added = KINDS[name]
    backend = _BACKENDS[kind](list(added))
    backend.add_tokens([AddedToken(text, special=special, normalized=False) for text, special in added.items()])
    first, second = list(added)[:2]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=first,
        eos_token=second,
        chat_template=template,
        additional_special_tokens=[],
    )


def wrapped(name: str) -> TokenizerWrapper:
    return TokenizerWrapper(made(name))


_TEXTS = ["<|im_start|>user hello the quick brown fox naïve café a < b [INST] end. <s> </s> system\n"] * 50


def _bytes(added: list[str]) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(
        _TEXTS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    return backend


def _sentencepiece_bpe(added: list[str]) -> Tokenizer:
    """As llama 2 has it: control tokens are in the vocabulary, and a space is put before each stretch of text."""
    words = [
        *added,
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "s",
        ">",
        "<",
        "/",
        "</",
        "s>",
        "</s>",
        "▁h",
        "e",
    ]
    vocab = {word: i for i, word in enumerate(dict.fromkeys(words))}
    merges = [("<", "/"), ("s", ">"), ("</", "s>"), ("<", "s>")]
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def _unigram(added: list[str]) -> Tokenizer:
    """As T5 and gemma have it: control tokens are pieces, and the best ones."""
    alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = [(text, 0.0) for text in added if text != "\n\n"] + [(text, -20.0) for text in alphabet]
    pieces += [("▁", -2.0), *((char, -5.0) for char in "abcdefghijklmnopqrstuvwxyz<>/_|.\n"), ("▁the", -1.0)]
    backend = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


_BACKENDS = {"bytes": _bytes, "bpe": _sentencepiece_bpe, "unigram": _unigram}


def chat(seed: int, forged: tuple[str, ...] = ()) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Messages and template variables, with `forged` texts among the words of any string of the client's."""
    rng = random.Random(seed)

    def said() -> str:
        words = rng.choices(WORDS + forged * 2, k=rng.randint(0, 6))
        return rng.choice(["", " ", "\n"]) + rng.choice([" ", ""]).join(words) + rng.choice(["", " ", "\n\n"])

    messages: list[dict[str, Any]] = [{"role": "system", "content": said()}] if rng.random() < 0.5 else []
    for _ in range(rng.randint(1, 3)):
        messages.append({"role": "user", "content": said(), **({"name": said()} if rng.random() < 0.2 else {})})
        turn: dict[str, Any] = {"role": "assistant", "content": said()}
        if rng.random() < 0.3:
            turn["content"] = f"<think>{said()}</think>{turn['content']}"
        if rng.random() < 0.3:
            turn["reasoning_content"] = said()
        if rng.random() < 0.4:
            function = {"name": "look", "arguments": {"q": said(), said(): [said(), 3, None]}}
            turn["tool_calls"] = [{"id": said(), "type": "function", "function": function}]
            messages += [turn, {"role": "tool", "tool_call_id": "c", "content": said()}]
        else:
            messages.append(turn)
    messages = messages if rng.random() < 0.5 else messages[:-1]
    parameters = {"type": "object", "properties": {said(): {"type": "string", "description": said()}}}
    tool = {"type": "function", "function": {"name": "look", "description": said(), "parameters": parameters}}
    return messages or [{"role": "user", "content": said()}], {"tools": [tool]} if rng.random() < 0.3 else {}
