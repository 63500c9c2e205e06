"""`POST /generate`: the route of vLLM's demonstration server, of SGLang and of TRL's server, told apart by the field
that has the prompts. Environments of Atropos ask it, so it takes what they send, and no more."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from starlette.responses import Response

from mlx_parallm.core import AdapterRef, CollectionSpec, ServedModel
from mlx_parallm.server.api.completions import DEFAULT_MAX_TOKENS, CompletionBody, plan_completion
from mlx_parallm.server.api.sampling_fields import SamplingFields
from mlx_parallm.server.generation import GenerationResponse
from mlx_parallm.server.http.body import json_body
from mlx_parallm.server.http.request_log import new_request_id
from mlx_parallm.server.openapi.responses import generating
from mlx_parallm.server.protocols.completion import client_names, completion_body, sent_collection
from mlx_parallm.server.protocols.generate.choices import (
    SGLangAnswer,
    SGLangWriter,
    TRLAnswer,
    TRLWriter,
    VLLMAnswer,
    VLLMWriter,
    WholeWriter,
    sglang_completion,
    trl_completion,
    vllm_completion,
)
from mlx_parallm.server.protocols.generate.schema import GenerateBody
from mlx_parallm.server.services import Services, ServicesDep

router = APIRouter()
Body = Annotated[GenerateBody, Depends(json_body(GenerateBody))]


@dataclass(frozen=True, slots=True)
class Translation:
    """How a form of the body is translated, and its answer written.

    Attributes:
        completion: the fields of the completion that the body asks for, apart from its prompts.
        names: what the form calls a field of the completion, where the names differ.
        default_max_tokens: the number of tokens to generate if the body does not say it and so many fit.
        processed_logprobs: the logprobs are those of the distribution that draws the tokens, whatever the server's
            `logprobs_mode` is.
    """

    completion: Callable[[GenerateBody], Mapping[str, Any]]
    writer: type[WholeWriter]
    names: Mapping[str, str]
    default_max_tokens: int = DEFAULT_MAX_TOKENS
    processed_logprobs: bool = False


SGLANG_MAX_TOKENS = 128
_SGLANG_NAMES = {
    **{name: f"sampling_params.{name}" for name in SamplingFields.model_fields},
    "max_tokens": "sampling_params.max_new_tokens",
    "prompt": "input_ids",
}
TRANSLATIONS: Mapping[str, Translation] = {
    "prompt": Translation(vllm_completion, VLLMWriter, {"prompt": "prompt.prompt_token_ids"}),
    "prompts": Translation(trl_completion, TRLWriter, {"prompt": "prompts"}),
    "input_ids": Translation(
        sglang_completion, SGLangWriter, _SGLANG_NAMES, SGLANG_MAX_TOKENS, processed_logprobs=True
    ),
}


@router.post("/generate", responses=generating(VLLMAnswer | TRLAnswer | SGLangAnswer | list[SGLangAnswer]))
async def generate(body: Body, services: ServicesDep) -> Response:
    """Continues prompts, with the body and the answer of vLLM's (`prompt`), SGLang's (`input_ids`) or TRL's (`prompts`)
    route of this name."""
    translation, prompts = TRANSLATIONS[body.form], body.prompts_of()
    fields = {
        **sent_collection(body),
        **translation.completion(body),
        "prompt": prompts[0] if len(prompts) == 1 else prompts,
        "priority": body.priority,
    }
    completion = completion_body(fields, translation.names)
    return GenerationResponse(
        services, completion, len(prompts), partial(prepare, body, completion, translation, services)
    )


def prepare(
    body: GenerateBody,
    completion: CompletionBody,
    translation: Translation,
    services: Services,
    model: ServedModel,
    adapter: AdapterRef,
    collection: CollectionSpec | None,
) -> WholeWriter:
    """Makes the engine's request. Runs in a worker thread."""
    with client_names(translation.names):
        default = translation.default_max_tokens
        request = plan_completion(new_request_id("gen"), completion, services, model, adapter, collection, default)
    if translation.processed_logprobs:
        request = replace(request, sampling=replace(request.sampling, processed_logprobs=True))
    return translation.writer(sent=body, request=request, tokenizer=model.tokenizer)
