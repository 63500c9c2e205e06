"""Makes the engine's `GenerationRequest` from a validated body: finds the adapter that the body names, compiles its
grammar, and makes the checks that need the model's vocabulary and context length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase

from mlx_parallm.config import ServerConfig, TrafficClass
from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.engine import ModelCard
from mlx_parallm.core.grammar import Grammar, GrammarCompiler, GrammarSpec
from mlx_parallm.core.requests import CollectionSpec, GenerationRequest, WorkClass
from mlx_parallm.core.text import TextTokenizer
from mlx_parallm.errors import ContextLengthError, InvalidRequestError, UnknownModelError
from mlx_parallm.server.api.generation_fields import GenerationBody
from mlx_parallm.server.api.pooling.fields import PoolingBody
from mlx_parallm.server.api.sampling_fields import MAX_SEQUENCES, NO_LIMIT
from mlx_parallm.server.candidates import Candidates, check_amount
from mlx_parallm.server.sampling import model_defaults, repetition_of, sampling_of, stopping_of

MAX_ADAPTER_NAME = 160
"""Longest name of an adapter with its version, in characters. A longer name counts as unknown."""
AS_MANY_AS_FIT = -1
"""The value of `truncate_prompt_tokens` that leaves room for the answer only."""
_WORK_CLASSES = {TrafficClass.LIVE: WorkClass.INFERENCE, TrafficClass.ROLLOUT: WorkClass.TRAINING}


@dataclass(frozen=True, slots=True)
class ModelNames:
    """The values of the field `model` that mean the served model and no adapter: `names`, and what fits one of the
    `aliases`, in which `*` stands for any text."""

    names: frozenset[str]
    aliases: tuple[str, ...] = ()

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str) or len(name) > MAX_ADAPTER_NAME:
            return False
        return name in self.names or any(fnmatchcase(name, alias) for alias in self.aliases)


@dataclass(frozen=True, slots=True)
class AdapterSelector:
    """The adapter that a request names. `name` is a selector of `core.AdapterClient`, such as `math` or `math@3`, or
    the path of a folder. `param` is the request field that has it. Both are None if no field names an adapter."""

    name: str | None = None
    param: str | None = None

    @property
    def folder(self) -> str | None:
        """The path of the adapter's folder, which only mlx-lm's field `adapters` can have; None if `name` is a name."""
        return self.name if self.param == "adapters" and self.name and "/" in self.name else None


def check_sequences(prompts: int, n: int) -> int:
    """The number of sequences of a request. Raises InvalidRequestError if it is over the limit."""
    if prompts * n > MAX_SEQUENCES:
        raise InvalidRequestError(
            f"n times the number of prompts is {prompts * n}; at most {MAX_SEQUENCES} sequences fit one request.",
            param="n",
        )
    return prompts * n


def select_adapter(body: GenerationBody | PoolingBody, model_names: ModelNames) -> AdapterSelector:
    """The adapter that `model`, `lora_adapter` or `adapters` name. If `model` is one of `model_names`, it names the
    served model and no adapter, so another field may name one.

    Raises:
        InvalidRequestError: two of the fields name different adapters.
    """
    model = None if body.model in model_names else body.model
    fields = (("model", model), ("lora_adapter", body.lora_adapter), ("adapters", body.adapters))
    selectors = [AdapterSelector(name, param) for param, name in fields if name is not None]
    for other in selectors[1:]:
        if other.name != selectors[0].name:
            raise InvalidRequestError(
                f"{selectors[0].param} and {other.param} name different adapters; send one of them.", param=other.param
            )
    return selectors[0] if selectors else AdapterSelector()


@contextmanager
def adapter_named_by(param: str | None, *names: str | None) -> Iterator[None]:
    """Sets `param` in every UnknownModelError that leaves the block. `param` is the request field that has the `names`.

    Raises:
        UnknownModelError: a name is too long to be an adapter's.
    """
    try:
        for name in names:
            if name is not None and len(name) > MAX_ADAPTER_NAME:
                raise UnknownModelError(f"No adapter has a name of {len(name)} characters; see GET /v1/models.")
        yield
    except UnknownModelError as error:
        raise UnknownModelError(str(error), param=param) from None


def compile_grammar(param: str, spec: GrammarSpec, grammars: GrammarCompiler) -> Grammar:
    """Compiles the grammar that the field `param` asks for. Call it in a worker thread, because it can take seconds.

    Raises:
        InvalidRequestError: the grammar cannot be enforced; the error names the field.
    """
    try:
        return grammars.compile(spec)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{param}: {error}", param=param) from None


def plan(
    request_id: str,
    body: GenerationBody,
    prompts: Sequence[Sequence[int]],
    card: ModelCard,
    config: ServerConfig,
    tokenizer: TextTokenizer,
    adapter: AdapterRef,
    collection: CollectionSpec | None,
    grammar: Grammar | None,
    max_tokens: int | None,
    top_logprobs: Candidates,
    prompt_logprobs: Candidates,
    default_max_tokens: int | None = None,
    visible_specials: frozenset[int] = frozenset(),
) -> GenerationRequest:
    """The engine's request for the token ids `prompts`.

    Args:
        max_tokens: the limit that the client asked for; `NO_LIMIT` is as many as fit. Without `collect_trajectory`, it
            is less if the context has less room.
        default_max_tokens: the limit if the client asked for none; less if the context has less room. None: the model's
            own default, or else as many as fit.
        top_logprobs: the candidates to report for each generated token.
        prompt_logprobs: the candidates to report for each prompt token.
        visible_specials: ids of special tokens that are part of the text even if the request does not say so.

    Raises:
        ContextLengthError: the longest prompt and the tokens to generate do not fit the context.
        InvalidRequestError: a prompt is empty, a token id is not in the vocabulary, min_tokens is over the limit, or
            there are too many candidates. Also the errors of `sampling_of`.
    """
    defaults = model_defaults(body, card, config)
    prompts = [_truncated(body, ids, max_tokens, card.context_length) for ids in prompts]
    max_tokens = _token_limit(
        max_tokens,
        default_max_tokens or _whole(defaults.get("max_new_tokens")),
        max(map(len, prompts)),
        card.context_length,
        cut=not body.collect_trajectory,
    )
    for ids in prompts:
        check_ids(ids, card.vocab_size)
    if body.min_tokens > max_tokens:
        raise InvalidRequestError(
            f"min_tokens ({body.min_tokens}) is over max_tokens ({max_tokens}).", param="min_tokens"
        )
    reported = top_logprobs.resolved(card.vocab_size, config.max_logprobs)
    scored = prompt_logprobs.resolved(card.vocab_size, config.max_logprobs)
    check_amount(top_logprobs.param, reported, max_tokens * body.n * len(prompts), "send a smaller max_tokens")
    check_amount(prompt_logprobs.param, scored, sum(map(len, prompts)), "send fewer tokens at a time")
    default_class = config.collected_traffic_class if body.collect_trajectory else TrafficClass.LIVE
    work_class = _WORK_CLASSES[TrafficClass(body.traffic_class or default_class)]
    return GenerationRequest(
        request_id=request_id,
        prompts=tuple(tuple(ids) for ids in prompts),
        sampling=sampling_of(body, defaults, tokenizer, card.vocab_size, reported, config.logprobs_mode),
        stopping=stopping_of(body, max_tokens, card.vocab_size, repetition_of(body, work_class, config)),
        n=body.n,
        prompt_logprobs=scored,
        adapter=adapter,
        work_class=work_class,
        priority=body.priority,
        collection=collection,
        grammar=grammar,
        visible_specials=visible_specials | _shown_specials(body, tokenizer),
        cache_salt=body.cache_salt or "",
        base=card.name,
        whole=not body.stream,
    )


def _token_limit(asked: int | None, default: int | None, longest_prompt: int, context: int, cut: bool) -> int:
    """The number of tokens to generate. `cut`: a number that is too large becomes the largest one that fits.

    Raises:
        ContextLengthError: the context has no room for them.
    """
    room = context - longest_prompt
    if room >= 1 and asked in (None, NO_LIMIT):
        return room if default is None or asked == NO_LIMIT else min(default, room)
    wanted = 1 if asked in (None, NO_LIMIT) else asked
    if wanted > room and not (cut and room >= 1):
        raise ContextLengthError(
            f"This model's maximum context length is {context} tokens, and the request needs "
            f"{longest_prompt + wanted}: {longest_prompt} in the prompt and {wanted} to generate. Shorten the prompt "
            "or ask for fewer tokens.",
            param="max_tokens" if longest_prompt < context and asked else None,
        )
    return min(wanted, room)


def _whole(number: float | None) -> int | None:
    return None if number is None else int(number)


def _truncated(body: GenerationBody, ids: Sequence[int], max_tokens: int | None, context: int) -> Sequence[int]:
    """The tokens of a prompt that `truncate_prompt_tokens` keeps. Raises InvalidRequestError if it is too large."""
    most = body.truncate_prompt_tokens
    if most is None:
        return ids
    if most > context:
        raise InvalidRequestError(
            f"truncate_prompt_tokens ({most}) is over the model's context, {context} tokens.",
            param="truncate_prompt_tokens",
        )
    if most == AS_MANY_AS_FIT:
        answer = 1 if max_tokens in (None, NO_LIMIT) else max_tokens
        most = max(1, context - answer)
    return ids[-most:] if body.truncation_side == "left" else ids[:most]


def longest_text(body: GenerationBody, card: ModelCard) -> int | None:
    """The number of tokens above which a prompt is refused before it is tokenised; None if it will be cut."""
    return card.context_length if body.truncate_prompt_tokens is None else None


def check_ids(ids: Sequence[int], vocab_size: int, param: str = "prompt") -> None:
    """Raises InvalidRequestError unless `ids` has at least one id and all are below `vocab_size`."""
    if not ids:
        raise InvalidRequestError("There are no tokens; send at least one.", param=param)
    if max(ids) >= vocab_size:
        raise InvalidRequestError(f"Token id {max(ids)} is not below the vocabulary's size, {vocab_size}.", param=param)


def tokens_as_ids(body: GenerationBody, config: ServerConfig) -> bool:
    """Whether tokens in `logprobs` are written as `token_id:<id>`."""
    asked = body.return_tokens_as_token_ids
    return config.return_tokens_as_token_ids if asked is None else asked


def _shown_specials(body: GenerationBody, tokenizer: TextTokenizer) -> frozenset[int]:
    """The special tokens that are text because the request says so."""
    return frozenset() if body.skip_special_tokens else tokenizer.special_ids
