"""Grammars by llguidance: JSON schemas, regular expressions, choices, GBNF and Lark, as masks over the vocabulary."""

from __future__ import annotations

from collections import OrderedDict
from functools import cached_property
from threading import Lock

from llguidance import LLTokenizer, TokenizerWrapper

from mlx_parallm.core import Grammar, GrammarKind, GrammarSpec, TextTokenizer, Thinks, parts_of
from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.grammar.definitions import RefusedGrammar, matcher
from mlx_parallm.grammar.matcher import LLGrammar
from mlx_parallm.grammar.numbers import EndingNumbers, NumberTokens
from mlx_parallm.grammar.thinking import AfterReasoning
from mlx_parallm.grammar.trial import Trial

KEPT = 64
"""Grammars that are kept for those who send them again, and as many refusals."""


class LLCompiler:
    """Implements `core.GrammarCompiler`."""

    def __init__(self, tokenizer: TextTokenizer, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._tokenizers: dict[frozenset[int], LLTokenizer] = {}
        self._tokenizer = tokenizer
        self._trial = Trial()
        self._lock = Lock()
        self._kept: OrderedDict[GrammarSpec, Grammar | RefusedGrammar] = OrderedDict()

    def compile(self, spec: GrammarSpec) -> Grammar:
        """See `core.GrammarCompiler.compile`."""
        with self._lock:
            found = self._kept.get(spec)
        if found is None:
            found = self._compile(spec)
        with self._lock:
            self._kept[spec] = found
            self._kept.move_to_end(spec)
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        if isinstance(found, RefusedGrammar):
            raise InvalidRequestError(f"this {spec.kind.replace('_', ' ')} cannot be enforced: {found}")
        return found

    def close(self) -> None:
        """No grammar is compiled any more."""
        self._trial.close()

    def _compile(self, spec: GrammarSpec) -> Grammar | RefusedGrammar:
        try:
            self._trial.check(spec)
            grammar: Grammar = LLGrammar(matcher(self._ll_tokenizer(spec.spelled), spec))
        except RefusedGrammar as refused:
            return refused
        if any(part.kind is GrammarKind.JSON_SCHEMA for part in parts_of(spec)):
            grammar = EndingNumbers(grammar, self._numbers)
        if spec.thinks is Thinks.NO:
            return grammar
        return AfterReasoning(grammar, self._tokenizer, spec.thinks is Thinks.ALREADY)

    @cached_property
    def _tokens(self) -> list[bytes]:
        return [self._tokenizer.token_bytes(i) for i in range(self._vocab_size)]

    @cached_property
    def _numbers(self) -> NumberTokens:
        return NumberTokens.of(self._tokens)

    def _ll_tokenizer(self, spelled: frozenset[int]) -> LLTokenizer:
        """One for each set of special tokens that are text: a model's reasoning and tools make few such sets."""
        with self._lock:
            if spelled not in self._tokenizers:
                self._tokenizers[spelled] = _ll_tokenizer(self._tokenizer, self._tokens, spelled)
            return self._tokenizers[spelled]


def _ll_tokenizer(tokenizer: TextTokenizer, tokens: list[bytes], spelled: frozenset[int]) -> LLTokenizer:
    vocabulary = TokenizerWrapper(_Vocabulary(tokenizer, tokens, spelled))
    return LLTokenizer(vocabulary, n_vocab=len(tokens), eos_token=sorted(tokenizer.eos_token_ids))


class _Vocabulary:
    """What `llguidance.TokenizerWrapper` asks of a tokenizer.

    Ids of a padded vocabulary are special tokens of no text, so that they are never allowed.
    """

    bos_token_id = None

    def __init__(self, tokenizer: TextTokenizer, tokens: list[bytes], spelled: frozenset[int]) -> None:
        self.eos_token_id = min(tokenizer.eos_token_ids)
        self.tokens = tokens
        special = tokenizer.special_ids - spelled
        self.special_token_ids = [i for i, token in enumerate(tokens) if i in special or not token]
        self._encode = tokenizer.encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text, add_special_tokens=False)
