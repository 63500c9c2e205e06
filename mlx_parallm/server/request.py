"""One way for a request: from the checked body that a client sent to the engine's `GenerationRequest`.

    the adapter that the body names      select_adapter, assignment_key
    what a request may ask for           check_permitted, places_of, collection_of
    the engine's request                 generation_request, or reading_request if no token is generated

`GenerationResponse` goes this way: it loads the base model, leases the adapter, and makes the `RequestContext`. With
that, the route turns the prompts into token ids, in a worker thread, and calls one of the last two.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase

from mlx_parallm.config import GenerationConfig, LogprobsMode, ServerConfig, TrafficClass
from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.candidates import TOP_LOGPROBS
from mlx_parallm.core.engine import ModelCard
from mlx_parallm.core.grammar import Grammar, GrammarCompiler, GrammarSpec
from mlx_parallm.core.models import ServedModel
from mlx_parallm.core.requests import (
    CollectionSpec,
    GenerationRequest,
    Pooling,
    RepetitionLimits,
    SamplingParams,
    StopParams,
    WorkClass,
)
from mlx_parallm.core.text import TextTokenizer
from mlx_parallm.errors import ContextLengthError, InvalidRequestError, RoleError, UnknownModelError
from mlx_parallm.server.access import NamedKey, Role
from mlx_parallm.server.api.bodies import (
    MAX_SEQUENCES,
    NO_LIMIT,
    Candidates,
    GenerationBody,
    PoolingBody,
    RepetitionDetection,
)

MAX_ADAPTER_NAME = 160
"""Longest name of an adapter with its version, in characters. A longer name counts as unknown."""
AS_MANY_AS_FIT = -1
"""The value of `truncate_prompt_tokens` that leaves room for the answer only."""
MAX_CANDIDATES = 2**18
"""Largest number of candidates of one answer, where there are more than `TOP_LOGPROBS` at each token. An answer in chat
with so many takes some 250 MB of memory while it is written, because each candidate is an object until then."""
SEED_SPACE = 2**64
WORK_CLASSES = {TrafficClass.LIVE: WorkClass.INFERENCE, TrafficClass.ROLLOUT: WorkClass.TRAINING}

# ---- the adapter that a body names -----------------------------------------------------------------


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


def assignment_key(body: GenerationBody | PoolingBody, session: str | None) -> str:
    """What gets one version of an adapter if several are compared: the group or episode of a request, since one version
    must sample all of it; else its `session` or user, or the request alone."""
    named = (body.group_id, body.episode_id, session, body.user, body.safety_identifier)
    return next(filter(None, named), None) or secrets.token_hex(8)


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


# ---- what a request may ask for --------------------------------------------------------------------


def check_permitted(key: NamedKey, body: GenerationBody | PoolingBody) -> None:
    """Raises RoleError if the body asks for something that the key may not do: another priority than its own allows, or
    to be learnt from."""
    if body.priority < key.least_priority and key.role is not Role.ADMIN:
        what = f"A priority below {key.least_priority}"
        raise RoleError.needing(Role.ADMIN, key.role, what, "priority")
    if body.collect_trajectory and not key.role.allows(Role.TRAIN):
        raise RoleError.needing(Role.TRAIN, key.role, "collect_trajectory", "collect_trajectory")


def places_of(body: GenerationBody | PoolingBody, prompts: int) -> int:
    """The number of places in the queue for a body with so many prompts: one for each sequence. If no token is
    generated, the prompts over the limit of a request wait for those before them.

    Raises:
        InvalidRequestError: a request to generate has more sequences than the limit.
    """
    if isinstance(body, PoolingBody):
        return min(prompts, MAX_SEQUENCES)
    if prompts * body.n > MAX_SEQUENCES:
        raise InvalidRequestError(
            f"n times the number of prompts is {prompts * body.n}; at most {MAX_SEQUENCES} sequences fit one request.",
            param="n",
        )
    return prompts * body.n


def collection_of(body: GenerationBody | PoolingBody, address: str) -> CollectionSpec | None:
    """How the answers of a body are collected; None if they are not. `address`: the client's."""
    if isinstance(body, PoolingBody) or not body.collect_trajectory:
        return None
    return CollectionSpec(
        body.scoring_function,
        body.metadata or {},
        address,
        group_id=body.group_id or "",
        group_size=body.group_size,
        episode_id=body.episode_id or "",
        turn=body.turn,
    )


# ---- the engine's request --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RequestContext:
    """What a body is answered with: everything that the engine's request needs and that the client did not send.

    Attributes:
        key: whose request it is.
        adapter: the version that is leased for the request.
        collection: None: nothing of the request is kept for training.
    """

    key: NamedKey
    config: ServerConfig
    model: ServedModel
    adapter: AdapterRef
    collection: CollectionSpec | None = None


def generation_request(
    context: RequestContext,
    request_id: str,
    body: GenerationBody,
    prompts: Sequence[Sequence[int]],
    grammar: Grammar | None = None,
    visible_specials: frozenset[int] = frozenset(),
) -> GenerationRequest:
    """The engine's request to continue the token ids `prompts`.

    Args:
        grammar: what the answers must follow.
        visible_specials: ids of special tokens that are part of the text even if the body does not say so.

    Raises:
        ContextLengthError: the longest prompt and the tokens to generate do not fit the context.
        InvalidRequestError: a prompt is empty, a token id is not in the vocabulary, min_tokens is over the limit, there
            are too many candidates, or no token may be sampled.
    """
    card, config, tokenizer = context.model.card, context.config, context.model.tokenizer
    defaults = used_defaults(card, config) if body.takes_defaults else {}
    prompts = [_truncated(body, ids, card.context_length) for ids in prompts]
    max_tokens = _max_tokens(body, defaults, max(map(len, prompts)), card.context_length)
    for ids in prompts:
        check_ids(ids, card.vocab_size)
    if body.min_tokens > max_tokens:
        raise InvalidRequestError(
            f"min_tokens ({body.min_tokens}) is over max_tokens ({max_tokens}).", param="min_tokens"
        )
    reported = _number_of(body.candidates, card.vocab_size, config.max_logprobs)
    scored = _number_of(body.prompt_candidates, card.vocab_size, config.max_logprobs)
    _check_amount(body.candidates, reported, max_tokens * body.n * len(prompts), "send a smaller max_tokens")
    _check_amount(body.prompt_candidates, scored, sum(map(len, prompts)), "send fewer tokens at a time")
    default_class = config.collected_traffic_class if body.collect_trajectory else TrafficClass.LIVE
    work_class = WORK_CLASSES[TrafficClass(body.traffic_class or default_class)]
    return GenerationRequest(
        request_id=request_id,
        prompts=tuple(tuple(ids) for ids in prompts),
        sampling=_sampling(body, context, defaults, reported),
        stopping=_stopping(body, max_tokens, card.vocab_size, _repetition(body, work_class, config)),
        n=body.n,
        prompt_logprobs=scored,
        adapter=context.adapter,
        work_class=work_class,
        priority=body.priority,
        collection=context.collection,
        grammar=grammar,
        visible_specials=visible_specials if body.skip_special_tokens else visible_specials | tokenizer.special_ids,
        cache_salt=context.key.salt(body.cache_salt or ""),
        key=context.key.name,
        base=card.name,
        whole=not body.stream,
    )


def reading_request(
    context: RequestContext,
    request_id: str,
    body: PoolingBody,
    prompts: tuple[tuple[int, ...], ...],
    pooling: Pooling | None = None,
    scored_from: int | None = None,
) -> GenerationRequest:
    """The engine's request to read the token ids `prompts` and generate nothing.

    Args:
        pooling: how each prompt becomes a vector; None: it does not.
        scored_from: the first token of each prompt whose logprob is wanted; None: none is.
    """
    return GenerationRequest(
        request_id=request_id,
        prompts=prompts,
        sampling=SamplingParams(),
        stopping=StopParams(max_tokens=0),
        prompt_logprobs=None if scored_from is None else 0,
        scored_from=scored_from or 0,
        adapter=context.adapter,
        priority=body.priority,
        cache_salt=context.key.salt(body.cache_salt or ""),
        pooling=pooling,
        key=context.key.name,
        base=context.model.card.name,
    )


def compile_grammar(param: str, spec: GrammarSpec, grammars: GrammarCompiler) -> Grammar:
    """Compiles the grammar that the field `param` asks for. Call it in a worker thread, because it can take seconds.

    Raises:
        InvalidRequestError: the grammar cannot be enforced; the error names the field.
    """
    try:
        return grammars.compile(spec)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{param}: {error}", param=param) from None


# ---- prompts and the number of tokens --------------------------------------------------------------


def longest_text(body: GenerationBody, card: ModelCard) -> int | None:
    """The number of tokens above which a prompt is refused before it is tokenised; None if it will be cut."""
    return card.context_length if body.truncate_prompt_tokens is None else None


def check_ids(ids: Sequence[int], vocab_size: int, param: str = "prompt") -> None:
    """Raises InvalidRequestError unless `ids` has at least one id and all are below `vocab_size`."""
    if not ids:
        raise InvalidRequestError("There are no tokens; send at least one.", param=param)
    if max(ids) >= vocab_size:
        raise InvalidRequestError(f"Token id {max(ids)} is not below the vocabulary's size, {vocab_size}.", param=param)


def _truncated(body: GenerationBody, ids: Sequence[int], context: int) -> Sequence[int]:
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
        answer = 1 if body.token_limit in (None, NO_LIMIT) else body.token_limit
        most = max(1, context - answer)
    return ids[-most:] if body.truncation_side == "left" else ids[:most]


def _max_tokens(body: GenerationBody, defaults: Mapping[str, float], longest_prompt: int, context: int) -> int:
    """The number of tokens to generate at most. A limit that does not fit becomes the largest one that does, but with
    `collect_trajectory` it is an error.

    Raises:
        ContextLengthError: the context has no room for them.
    """
    asked, room = body.token_limit, context - longest_prompt
    if room >= 1 and asked in (None, NO_LIMIT):
        default = body.default_max_tokens or defaults.get("max_new_tokens")
        return room if default is None or asked == NO_LIMIT else min(int(default), room)
    wanted = 1 if asked in (None, NO_LIMIT) else asked
    if wanted > room and (body.collect_trajectory or room < 1):
        raise ContextLengthError(
            f"This model's maximum context length is {context} tokens, and the request needs "
            f"{longest_prompt + wanted}: {longest_prompt} in the prompt and {wanted} to generate. Shorten the prompt "
            "or ask for fewer tokens.",
            param="max_tokens" if longest_prompt < context and asked else None,
        )
    return min(wanted, room)


# ---- candidates at each token ----------------------------------------------------------------------


def tokens_as_ids(body: GenerationBody, config: ServerConfig) -> bool:
    """Whether tokens in `logprobs` are written as `token_id:<id>`."""
    asked = body.return_tokens_as_token_ids
    return config.return_tokens_as_token_ids if asked is None else asked


def _number_of(asked: Candidates, vocab_size: int, limit: int) -> int | None:
    """The number of candidates at each token; None: no logprobs. `limit`: the operator's, `--max-logprobs`.

    Raises:
        InvalidRequestError: it is over the limit.
    """
    if asked.number is not None and asked.number > limit:
        raise InvalidRequestError(
            f"{asked.param}: at most {limit} on this server, whose operator can change it with --max-logprobs.",
            param=asked.param,
        )
    return None if asked.number is None else min(asked.number, vocab_size)


def _check_amount(asked: Candidates, number: int | None, tokens: int, shorter: str) -> None:
    """Raises InvalidRequestError if so many candidates for each of these tokens are too many for one answer. `shorter`:
    what else a client can do than ask for fewer candidates."""
    if number is not None and number > TOP_LOGPROBS and tokens > 1 and number * tokens > MAX_CANDIDATES:
        raise InvalidRequestError(
            f"{asked.param}: {number} candidates for each of {tokens} tokens are more than {MAX_CANDIDATES} in all; "
            f"ask for fewer, or {shorter}.",
            param=asked.param,
        )


# ---- sampling --------------------------------------------------------------------------------------


def used_defaults(card: ModelCard, config: ServerConfig) -> Mapping[str, float]:
    """The model's own values of sampling fields, unless the operator turned them off."""
    return card.generation_defaults if config.generation_config is GenerationConfig.AUTO else {}


def _sampling(
    body: GenerationBody, context: RequestContext, defaults: Mapping[str, float], top_logprobs: int | None
) -> SamplingParams:
    """How the tokens of a request are sampled.

    Args:
        defaults: the model's own values of fields that the body may leave out.
        top_logprobs: number of alternatives to report for each generated token. None: no logprobs.

    Raises:
        InvalidRequestError: a token id is not in the vocabulary, or no token may be sampled.
    """

    def sent(name: str) -> float:
        value: float = getattr(body, name)
        return value if name in body.model_fields_set else defaults.get(name, value)

    vocab_size, tokenizer = context.model.card.vocab_size, context.model.tokenizer
    _check_all_below(vocab_size, body.logit_bias, "logit_bias")
    bad_words = _token_sequences(body.bad_words, tokenizer)
    greedy = sent("top_p") == 0
    return SamplingParams(
        temperature=0.0 if greedy else sent("temperature"),
        top_k=max(0, min(int(sent("top_k")), vocab_size)),
        top_p=1.0 if greedy else sent("top_p"),
        min_p=sent("min_p"),
        seed=secrets.randbits(64) if body.seed is None else body.seed % SEED_SPACE,
        presence_penalty=sent("presence_penalty"),
        frequency_penalty=sent("frequency_penalty"),
        repetition_penalty=sent("repetition_penalty"),
        logit_bias=tuple(sorted(body.logit_bias.items())),
        allowed_tokens=_allowed_tokens(body, bad_words, tokenizer.eos_token_ids, vocab_size),
        bad_words=bad_words,
        top_logprobs=top_logprobs,
        processed_logprobs=body.PROCESSED_LOGPROBS or context.config.logprobs_mode is LogprobsMode.PROCESSED,
    )


def _check_all_below(vocab_size: int, ids: Collection[int], param: str) -> None:
    if any(token_id >= vocab_size for token_id in ids):
        raise InvalidRequestError(f"Token ids must be below the vocabulary's size, {vocab_size}.", param=param)


def _token_sequences(words: Sequence[str], tokenizer: TextTokenizer) -> tuple[tuple[int, ...], ...]:
    """Each word as tokens, as it is at the beginning of a text and as it is after a space."""
    spellings = (spelling for word in words for spelling in (word.lstrip(), " " + word.lstrip()))
    tokens = (tuple(tokenizer.encode(spelling, add_special_tokens=False)) for spelling in spellings)
    return tuple(dict.fromkeys(ids for ids in tokens if ids))


def _allowed_tokens(
    body: GenerationBody, bad_words: Sequence[tuple[int, ...]], eos_ids: Collection[int], vocab_size: int
) -> bytes:
    """The bit mask of `allowed_token_ids`; empty if the request does not have it.

    Raises:
        InvalidRequestError: a token id is not in the vocabulary, or other fields forbid all allowed tokens.
    """
    if body.allowed_token_ids is None:
        return b""
    _check_all_below(vocab_size, body.allowed_token_ids, "allowed_token_ids")
    ends = {*eos_ids, *body.stop_token_ids} if body.min_tokens else set()
    forbidden = ends.union(word[0] for word in bad_words if len(word) == 1)
    if forbidden.issuperset(body.allowed_token_ids):
        raise InvalidRequestError(
            "allowed_token_ids: min_tokens or bad_words forbid all of these tokens; allow another one.",
            param="allowed_token_ids",
        )
    mask = bytearray(-(-vocab_size // 8))
    for token_id in body.allowed_token_ids:
        mask[token_id // 8] |= 1 << token_id % 8
    return bytes(mask)


# ---- where an answer ends --------------------------------------------------------------------------


def _stopping(
    body: GenerationBody, max_tokens: int, vocab_size: int, repetition: RepetitionLimits | None
) -> StopParams:
    """When the sequences of a request end. Raises InvalidRequestError if a stop token is not in the vocabulary."""
    _check_all_below(vocab_size, body.stop_token_ids, "stop_token_ids")
    return StopParams(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        stop=tuple(body.stop),
        ignore_eos=body.ignore_eos,
        stop_token_ids=tuple(body.stop_token_ids),
        include_stop=body.include_stop_str_in_output,
        repetition=repetition,
    )


def _repetition(body: GenerationBody, work_class: WorkClass, config: ServerConfig) -> RepetitionLimits | None:
    """How long the sequences of a request may repeat themselves. None: without end, which is the default for what may
    become training data, and where the request wants a certain length."""
    asked = body.repetition_detection
    if isinstance(asked, RepetitionDetection):
        return asked.limits
    if asked is None:
        served = work_class is WorkClass.INFERENCE and body.takes_defaults
        asked = config.stop_repetition and served and not body.ignore_eos
    return RepetitionLimits() if asked else None
