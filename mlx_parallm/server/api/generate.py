"""`POST /generate`: the route of vLLM's demonstration server, of SGLang and of TRL's server, told apart by the field
that has the prompts. Environments of Atropos ask it, so it takes what they send, and no more. Each form has an answer
of its own, made of the whole choices of a request:

    vLLM     its demonstration server (`vllm.entrypoints.api_server`), with the fields that Atropos adds
             (`example_trainer/vllm_api_server.py`, which its `VLLMServer` reads)
    SGLang   `GenerateReqInput` in `sglang/srt/managers/io_struct.py`. Its logprobs are those after temperature,
             whatever `--logprobs-mode` says, because SGLang's are.
    TRL      its own vLLM server (`trl vllm-serve`), which Atropos calls with `server_type: trl`
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Self

from fastapi import Depends
from pydantic import Field, model_validator
from starlette.responses import Response

from mlx_parallm.core.requests import Event, TokenLogprob
from mlx_parallm.core.text import TextTokenizer
from mlx_parallm.server.access import Role
from mlx_parallm.server.api.answer import (
    AnswerWriter,
    ChoicePiece,
    WholeAnswer,
    collected_fields,
    ending,
    repetition_fields,
    version_of,
    whole_answer,
)
from mlx_parallm.server.api.bodies import (
    NO_LIMIT,
    UNSUPPORTED_OPTIONS,
    CollectableBody,
    Priority,
    SamplingFields,
    Seed,
    TokenLimit,
    TopLogprobs,
)
from mlx_parallm.server.api.completions import CompletionBody, ProgramCompletionBody, plan_completion
from mlx_parallm.server.api.dialect import Dialect
from mlx_parallm.server.api.fields import (
    INT32_MAX,
    FinishReasonText,
    Neutral,
    NonEmptyTokenIds,
    WireInput,
    WireList,
    WireOutput,
    refused,
)
from mlx_parallm.server.api.logprobs import finite
from mlx_parallm.server.api.tokens import WITHOUT_EFFECT
from mlx_parallm.server.body import json_body
from mlx_parallm.server.generation import GenerationResponse
from mlx_parallm.server.openapi import generating
from mlx_parallm.server.request import RequestContext
from mlx_parallm.server.request_log import new_request_id
from mlx_parallm.server.routing import Router
from mlx_parallm.server.services import ServicesDep

PROMPT_FIELDS = ("prompt", "input_ids", "prompts")
"""The fields that have a body's prompts in the forms of vLLM, SGLang and TRL."""


class TokensPrompt(WireInput):
    """A prompt in vLLM's form."""

    NEUTRAL: ClassVar[Neutral] = {"multi_modal_data": (), "prompt_embeds": ()}

    prompt_token_ids: NonEmptyTokenIds
    """Its token ids."""


class SGLangSampling(SamplingFields):
    """SGLang's sampling parameters."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"custom_params", "stream_interval"})
    NEUTRAL: ClassVar[Neutral] = {
        **UNSUPPORTED_OPTIONS,
        "ebnf": (),
        "no_stop_trim": (False,),
        "regex": (),
        "stop_regex": (),
        "structural_tag": (),
    }

    max_new_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    """Maximum number of tokens to generate: by default 128, or fewer if fewer fit."""
    min_new_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] = 0
    """Number of tokens before the answer may end by itself."""
    sampling_seed: Seed | None = None
    """SGLang's name for `seed`."""


class GenerateBody(CollectableBody, SamplingFields):
    """Prompts in the form of vLLM (`prompt`), SGLang (`input_ids`) or TRL (`prompts`), and how to continue them.
    SGLang's sampling parameters are in `sampling_params`, those of the others beside the prompts."""

    IGNORED: ClassVar[frozenset[str]] = WITHOUT_EFFECT | {
        "log_metrics",
        "return_hidden_states",
        "rid",
        "session_params",
    }
    NEUTRAL: ClassVar[Neutral] = {
        **UNSUPPORTED_OPTIONS,
        "audio_data": (),
        "generation_kwargs": ({},),
        "image_data": (),
        "images": (),
        "input_embeds": (),
        "logprob_start_len": (-1,),
        "return_text_in_logprobs": (False,),
        "stream": (False,),
        "text": (),
        "token_ids_logprob": (),
        "top_logprobs_num": (0,),
        "video_data": (),
    }
    NULL_VALUES: ClassVar[Mapping[str, object]] = {"max_tokens": NO_LIMIT}

    prompt: TokensPrompt | None = None
    """vLLM: one prompt."""
    prompts: Annotated[list[str], Field(min_length=1)] | None = None
    """TRL: texts, each of which gets `n` answers."""
    input_ids: NonEmptyTokenIds | None = None
    """SGLang: the token ids of one prompt."""
    sampling_params: SGLangSampling = SGLangSampling()
    """SGLang: how to continue the prompt."""
    max_tokens: TokenLimit | None = None
    """vLLM and TRL: maximum number of tokens to generate, by default 16; null and -1 mean as many as the context has
    room for."""
    logprobs: TopLogprobs | None = None
    """vLLM: return the logprobs of the generated tokens and, at each position, of this many most likely tokens."""
    priority: Priority = 0
    """Requests with lower values run earlier."""
    return_logprob: bool = False
    """SGLang: return the logprobs of the generated tokens."""

    @property
    def form(self) -> str:
        """The field that has the prompts."""
        return next(name for name in PROMPT_FIELDS if getattr(self, name) is not None)

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        given = [name for name in PROMPT_FIELDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise refused(f"send one of {', '.join(PROMPT_FIELDS)}", given[1] if given else "prompt")
        if self.prompt is None and {self.prompt_logprobs, self.sampling_params.prompt_logprobs} != {None}:
            raise refused("only with prompt", "prompt_logprobs")
        if given == ["input_ids"]:
            names = (*SamplingFields.model_fields, "max_tokens", "logprobs")
            if outside := next((name for name in names if name in self.model_fields_set), None):
                raise refused("belongs into sampling_params with input_ids", outside)
        elif "sampling_params" in self.model_fields_set:
            raise refused(f"only with input_ids; with {given[0]}, its fields are beside it", "sampling_params")
        return self

    def prompts_of(self) -> list[Any]:
        """The prompts as `/v1/completions` takes them: texts, or lists of token ids."""
        if self.prompt is not None:
            return [self.prompt.prompt_token_ids]
        return self.prompts or [self.input_ids]


@dataclass(kw_only=True, eq=False)
class WholeWriter(AnswerWriter):
    """Writes the answer to a body that cannot ask for a stream."""

    sent: GenerateBody
    tokenizer: TextTokenizer

    def whole(self, events: Sequence[Event]) -> WireOutput:
        return self._answer(whole_answer(self.request, events))

    @abstractmethod
    def _answer(self, whole: WholeAnswer) -> WireOutput:
        """The JSON body."""


TokenLogprobs = dict[str, float]
"""Logprobs in nats by token id. The first one is that of the token itself, the others are of the most likely tokens."""


class VLLMAnswer(WireOutput):
    """The answer to a body with `prompt`. Each list has one entry for each of the `n` answers."""

    LONG: ClassVar[bool] = True

    text: list[str]
    """The answers."""
    prompt: str
    """The text of the prompt."""
    finish_reasons: list[FinishReasonText]
    """Why each answer ended."""
    token_ids: list[list[int]]
    """The generated tokens, with the one that ended the answer."""
    prompt_token_ids: list[int]
    """The tokens of the prompt."""
    logprobs: list[list[list[TokenLogprobs]]] | None = None
    """With `logprobs`: for each answer and each of its tokens, a list of one object. It maps token ids to logprobs in
    nats, the generated token first."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """With `prompt_logprobs`: for each token of the prompt, an object that maps token ids to logprobs in nats, the
    token itself first; null for the first token."""
    trajectory_ids: list[str] | None = None
    """One id for each answer, with `collect_trajectory`."""
    trajectory_warning: str | None = None
    """Why the trajectories will not be used for training."""
    lora_adapter: str | None = None
    """The adapter version that served the request."""


def vllm_completion(body: GenerateBody) -> dict[str, Any]:
    """The fields of the completion that a body with `prompt` asks for."""
    return {**body.sent_sampling(), "max_tokens": body.max_tokens, "logprobs": body.logprobs}


class VLLMWriter(WholeWriter):
    """Writes a `VLLMAnswer`."""

    def _answer(self, whole: WholeAnswer) -> VLLMAnswer:
        prompt = self.request.prompts[0]
        fields = {**version_of(self.request), **collected_fields(self.request, whole.finished)}
        if self.sent.logprobs is not None:
            top = self.sent.logprobs
            fields["logprobs"] = [[[_by_id(token, top)] for token in choice.logprobs] for choice in whole.choices]
        if self.sent.prompt_logprobs is not None:
            fields["prompt_logprobs"] = list(_prompt_logprobs(whole.scored[0].logprobs, self.sent.prompt_logprobs))
        return VLLMAnswer(
            text=[choice.text for choice in whole.choices],
            prompt=self.tokenizer.decode(prompt),
            finish_reasons=[ending(choice)["finish_reason"] for choice in whole.choices],
            token_ids=[list(choice.token_ids) for choice in whole.choices],
            prompt_token_ids=list(prompt),
            **fields,
        )


def _by_id(token: TokenLogprob, top: int) -> TokenLogprobs:
    return {str(ranked): finite(value) for ranked, value in ((token.token_id, token.logprob), *token.top[:top])}


def _prompt_logprobs(scores: Iterable[TokenLogprob | None], top: int) -> Iterable[TokenLogprobs | None]:
    return (None if token is None else _by_id(token, top) for token in scores)


Entry = tuple[float, int, None]
"""A logprob in nats, the token's id, and null."""


class SGLangMeta(WireOutput):
    """What is known about one answer."""

    LONG: ClassVar[bool] = True

    id: str
    """The request's id."""
    finish_reason: dict[str, str | int]
    """`{"type": "stop", "matched": …}` with the stop string or the token that ended the answer, or `{"type": "length",
    "length": …}` with the number of tokens. The latter has `"finish_reason": "repetition"` too if the answer repeated
    itself without end."""
    prompt_tokens: int
    """Tokens of the prompt."""
    completion_tokens: int
    """Generated tokens."""
    cached_tokens: int
    """Tokens of the prompt that were taken from the prefix cache."""
    output_token_logprobs: list[Entry] | None = None
    """With `return_logprob`: logprob and id of each generated token, and null."""
    trajectory_id: str | None = None
    """With `collect_trajectory`."""
    trajectory_warning: str | None = None
    """Why the trajectory will not be used for training."""
    lora_adapter: str | None = None
    """The adapter version that served the request."""


class SGLangAnswer(WireOutput):
    """One answer to a body with `input_ids`. Several answers are a list of these."""

    LONG: ClassVar[bool] = True

    text: str
    """The answer."""
    output_ids: list[int]
    """The generated tokens, with the one that ended the answer."""
    meta_info: SGLangMeta
    """What is known about it."""


def sglang_completion(body: GenerateBody) -> dict[str, Any]:
    """The fields of the completion that a body with `input_ids` asks for."""
    sampling = body.sampling_params
    return {
        **sampling.sent_sampling(),
        "max_tokens": sampling.max_new_tokens,
        "min_tokens": sampling.min_new_tokens or sampling.min_tokens,
        "seed": sampling.seed if sampling.sampling_seed is None else sampling.sampling_seed,
        "logprobs": 0 if body.return_logprob else None,
    }


class SGLangWriter(WholeWriter):
    """Writes an `SGLangAnswer`, or a list of them if there are several answers."""

    def _answer(self, whole: WholeAnswer) -> WireOutput:
        collected = {**version_of(self.request), **collected_fields(self.request, whole.finished)}
        ids = collected.pop("trajectory_ids", [None] * len(whole.choices))
        answers = [
            self._one(whole, choice, collected if each is None else {**collected, "trajectory_id": each})
            for choice, each in zip(whole.choices, ids, strict=True)
        ]
        return WireList(items=answers) if self.request.n > 1 else answers[0]

    def _one(self, whole: WholeAnswer, choice: ChoicePiece, collected: dict[str, Any]) -> SGLangAnswer:
        fields = collected
        if self.sent.return_logprob:
            drawn = [(finite(token.logprob), token.token_id, None) for token in choice.logprobs]
            fields = {**collected, "output_token_logprobs": drawn}
        meta = SGLangMeta(
            id=self.request.request_id,
            finish_reason=_finish_reason(choice),
            prompt_tokens=len(self.request.prompts[0]),
            completion_tokens=len(choice.token_ids),
            cached_tokens=whole.finished.cached_tokens,
            **fields,
        )
        return SGLangAnswer(text=choice.text, output_ids=list(choice.token_ids), meta_info=meta)


def _finish_reason(choice: ChoicePiece) -> dict[str, str | int]:
    if choice.finish_reason is not None and choice.finish_reason.cut_off:
        return {"type": "length", "length": len(choice.token_ids), **repetition_fields(choice.finish_reason)}
    return {"type": "stop", "matched": choice.token_ids[-1] if choice.stop_reason is None else choice.stop_reason}


class TRLAnswer(WireOutput):
    """The answer to a body with `prompts`."""

    LONG: ClassVar[bool] = True

    prompt_ids: list[list[int]]
    """The tokens of each prompt."""
    completion_ids: list[list[int]]
    """The generated tokens of each answer, with the one that ended it; those of one prompt follow each other."""
    logprobs: list[list[float]]
    """The logprob of each of these tokens, in nats."""
    trajectory_ids: list[str] | None = None
    """One id for each answer, with `collect_trajectory`."""
    trajectory_warning: str | None = None
    """Why the trajectories will not be used for training."""
    lora_adapter: str | None = None
    """The adapter version that served the request."""


def trl_completion(body: GenerateBody) -> dict[str, Any]:
    """The fields of the completion that a body with `prompts` asks for."""
    return {**body.sent_sampling(), "max_tokens": body.max_tokens, "logprobs": 0}


class TRLWriter(WholeWriter):
    """Writes a `TRLAnswer`."""

    def _answer(self, whole: WholeAnswer) -> TRLAnswer:
        return TRLAnswer(
            prompt_ids=[list(prompt) for prompt in self.request.prompts],
            completion_ids=[list(choice.token_ids) for choice in whole.choices],
            logprobs=[[finite(token.logprob) for token in choice.logprobs] for choice in whole.choices],
            **version_of(self.request),
            **collected_fields(self.request, whole.finished),
        )


router = Router()
Body = Annotated[GenerateBody, Depends(json_body(GenerateBody))]


class SGLangCompletionBody(ProgramCompletionBody):
    """A completion with SGLang's defaults."""

    PROCESSED_LOGPROBS: ClassVar[bool] = True

    @property
    def default_max_tokens(self) -> int:
        return 128


@dataclass(frozen=True, slots=True)
class Form(Dialect[ProgramCompletionBody]):
    """A form of the body, and how its answer is written.

    Attributes:
        completion: the fields of the completion that a body asks for, apart from its prompts.
    """

    completion: Callable[[GenerateBody], Mapping[str, Any]]
    writer: type[WholeWriter]


_SGLANG_NAMES = {
    **{name: f"sampling_params.{name}" for name in SamplingFields.model_fields},
    "max_tokens": "sampling_params.max_new_tokens",
    "prompt": "input_ids",
}
FORMS: Mapping[str, Form] = {
    "prompt": Form(ProgramCompletionBody, {"prompt": "prompt.prompt_token_ids"}, vllm_completion, VLLMWriter),
    "prompts": Form(ProgramCompletionBody, {"prompt": "prompts"}, trl_completion, TRLWriter),
    "input_ids": Form(SGLangCompletionBody, _SGLANG_NAMES, sglang_completion, SGLangWriter),
}


@router.post(
    "/generate",
    role=Role.INFERENCE,
    responses=generating(VLLMAnswer | TRLAnswer | SGLangAnswer | list[SGLangAnswer]),
    examples={
        "vLLM": {"prompt": {"prompt_token_ids": [1, 2, 3]}, "max_tokens": 4, "logprobs": 0, "n": 2},
        "SGLang": {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4, "n": 2}, "return_logprob": True},
        "TRL": {"prompts": ["Once"], "max_tokens": 4, "n": 2},
    },
)
async def generate(body: Body, services: ServicesDep) -> Response:
    """Continues prompts, with the body and the answer of vLLM's (`prompt`), SGLang's (`input_ids`) or TRL's (`prompts`)
    route of this name."""
    form, prompts = FORMS[body.form], body.prompts_of()
    completion = form.translated(
        {
            **body.sent_collection(),
            **form.completion(body),
            "prompt": prompts[0] if len(prompts) == 1 else prompts,
            "priority": body.priority,
        }
    )
    return GenerationResponse(services, completion, len(prompts), partial(prepare, body, completion, form))


def prepare(body: GenerateBody, completion: CompletionBody, form: Form, context: RequestContext) -> WholeWriter:
    """Makes the engine's request. Runs in a worker thread."""
    with form.own_names():
        request = plan_completion(new_request_id("gen"), completion, context)
    return form.writer(sent=body, request=request, tokenizer=context.model.tokenizer)
