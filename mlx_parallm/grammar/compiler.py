"""Compiles grammars with llguidance: JSON schemas, regular expressions, choices, GBNF and Lark.

compile(spec) → checked in a child process (`trial`) → llguidance's grammar (`matcher`)
              → numbers bounded, reasoning allowed before it (`wrappers`) → kept for the next request
"""

from __future__ import annotations

from collections import OrderedDict
from functools import cached_property
from threading import Lock

from llguidance import LLTokenizer, TokenizerWrapper

from mlx_parallm.core.grammar import (
    Grammar,
    GrammarKind,
    GrammarSpec,
    NewGrammarError,
    ReasoningPrefix,
    SpecifiedGrammar,
    parts_of,
)
from mlx_parallm.core.text import TextTokenizer
from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.grammar.matcher import GrammarRefused, LLGrammar, build_matcher
from mlx_parallm.grammar.trial import CPU_LIMIT_S, Trial
from mlx_parallm.grammar.wrappers import AfterReasoning, BoundedNumbers, DigitTokens, FreeText

MAX_CACHED = 64
"""How many results (compiled grammars and refusals) are kept for requests with the same grammar."""


class LLCompiler:
    """Implements `core.GrammarCompiler`.

    Args:
        vocab_size: size of the model's logits, which may be larger than the tokenizer's vocabulary.
        cpu_limit_s: seconds of processor time for the check of one grammar.
    """

    def __init__(self, tokenizer: TextTokenizer, vocab_size: int, cpu_limit_s: float = CPU_LIMIT_S) -> None:
        self._vocab_size = vocab_size
        self._tokenizers: dict[frozenset[int], LLTokenizer] = {}
        self._tokenizer = tokenizer
        self._trial = Trial(cpu_limit_s)
        self._lock = Lock()
        self._cache: OrderedDict[GrammarSpec, Grammar | GrammarRefused] = OrderedDict()

    def compile(self, spec: GrammarSpec, new: bool = True) -> Grammar:
        """See `core.GrammarCompiler.compile`."""
        with self._lock:
            result = self._cache.get(spec)
        if result is None:
            if not new and spec.kind is not GrammarKind.TEXT:
                raise NewGrammarError
            result = self._compile(spec)
        with self._lock:
            self._cache[spec] = result
            self._cache.move_to_end(spec)
            while len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)
        if isinstance(result, GrammarRefused):
            raise InvalidRequestError(f"this {spec.kind.replace('_', ' ')} cannot be enforced: {result}")
        return result

    def close(self) -> None:
        """See `core.GrammarCompiler.close`."""
        self._trial.close()

    def _compile(self, spec: GrammarSpec) -> Grammar | GrammarRefused:
        started = spec.reasoning_prefix is ReasoningPrefix.OPEN
        if spec.kind is GrammarKind.TEXT:
            return SpecifiedGrammar(spec, FreeText(self._tokenizer, started, spec.reasoning_budget))
        try:
            self._trial.check(spec)
            grammar: Grammar = LLGrammar(build_matcher(self._ll_tokenizer(spec.visible_specials), spec))
        except GrammarRefused as refused:
            return refused
        if any(part.kind is GrammarKind.JSON_SCHEMA for part in parts_of(spec)):
            grammar = BoundedNumbers(grammar, self._digit_tokens)
        if spec.reasoning_prefix is not ReasoningPrefix.NONE:
            grammar = AfterReasoning(grammar, self._tokenizer, started, spec.reasoning_budget)
        return SpecifiedGrammar(spec, grammar)

    @cached_property
    def _token_bytes(self) -> list[bytes]:
        return [self._tokenizer.token_bytes(i) for i in range(self._vocab_size)]

    @cached_property
    def _digit_tokens(self) -> DigitTokens:
        return DigitTokens.of(self._token_bytes)

    def _ll_tokenizer(self, visible_specials: frozenset[int]) -> LLTokenizer:
        """One tokenizer for each set of special tokens that count as text. A model's marks of reasoning and tool calls
        make only a few such sets."""
        with self._lock:
            if visible_specials not in self._tokenizers:
                vocabulary = TokenizerWrapper(_Vocabulary(self._tokenizer, self._token_bytes, visible_specials))
                self._tokenizers[visible_specials] = LLTokenizer(
                    vocabulary, n_vocab=self._vocab_size, eos_token=sorted(self._tokenizer.eos_token_ids)
                )
            return self._tokenizers[visible_specials]


class _Vocabulary:
    """The attributes that `llguidance.TokenizerWrapper` reads from a tokenizer.

    The ids that pad a vocabulary have no text. They count as special tokens, so that they are never allowed.
    """

    bos_token_id = None

    def __init__(self, tokenizer: TextTokenizer, token_bytes: list[bytes], visible_specials: frozenset[int]) -> None:
        self.eos_token_id = min(tokenizer.eos_token_ids)
        self.tokens = token_bytes
        special = tokenizer.special_ids - visible_specials
        self.special_token_ids = [i for i, token in enumerate(token_bytes) if i in special or not token]
        self._encode = tokenizer.encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text, add_special_tokens=False)
