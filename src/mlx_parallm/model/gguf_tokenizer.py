"""A Hugging Face tokenizer from a GGUF file's metadata (`tokenizer.ggml.*`): byte-level BPE of the `smollm` kind."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CONTROL = 3
"""llama.cpp's token type of a special token."""


def build_tokenizer(metadata: dict[str, Any]) -> PreTrainedTokenizerFast:
    """The tokenizer that the model was made with, its chat template included.

    Pre-tokenization `smollm`: digits one by one, then GPT-2's pattern over bytes.
    """
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]

    def special(name: str) -> str:
        return tokens[int(metadata[f"tokenizer.ggml.{name}_token_id"].item())]

    return PreTrainedTokenizerFast(
        tokenizer_object=_byte_level_bpe(tokens, metadata["tokenizer.ggml.merges"], _control_tokens(metadata)),
        chat_template=metadata["tokenizer.chat_template"],
        bos_token=special("bos"),
        eos_token=special("eos"),
        unk_token=special("unknown"),
        pad_token=special("padding"),
        model_max_length=metadata["llama.context_length"].item(),
        clean_up_tokenization_spaces=False,
    )


def _control_tokens(metadata: dict[str, Any]) -> list[str]:
    kinds = metadata["tokenizer.ggml.token_type"].tolist()
    return [token for token, kind in zip(metadata["tokenizer.ggml.tokens"], kinds, strict=True) if kind == CONTROL]


def _byte_level_bpe(tokens: list[str], merges: list[str], control: list[str]) -> Tokenizer:
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer
