"""The OpenAPI document: FastAPI's, completed with request bodies, every error by its code, and tested examples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

from fastapi import FastAPI
from fastapi.encoders import jsonable_encoder
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.routing import Route

from mlx_parallm.errors import (
    AbortedError,
    AdapterFileError,
    AdapterUnavailableError,
    ConflictError,
    ContextLengthError,
    DeviceMemoryError,
    EngineDeadError,
    EngineError,
    GrammarError,
    ModelUnavailableError,
    OverloadedError,
    QueueTimeoutError,
    RequestError,
    StepFailedError,
    TrainingDisabledError,
    UnknownModelError,
)
from mlx_parallm.server.access.roles import OPEN_PATHS
from mlx_parallm.server.api.fields import OpenBody
from mlx_parallm.server.error_forms import FORMS, OPENAI, form_of
from mlx_parallm.server.errors import (
    RULES,
    ApiKeyError,
    AsleepError,
    BodyTimeoutError,
    BodyTooLargeError,
    DrainingError,
    ForbiddenOriginError,
    InferenceDisabledError,
    MediaTypeError,
    RoleError,
    rule_of,
)
from mlx_parallm.server.http.body import BodyModel
from mlx_parallm.server.http.request_log import IGNORED_FIELDS, LORA_ADAPTER, REQUEST_ID

Operation = dict[str, Any]
Kind = type[Exception]
Examples = Mapping[str, Mapping[str, Any]]

DESCRIPTION = """\
An OpenAI-compatible server on MLX: one base model, many LoRA adapters in one continuous batch, and a trainer.

Every error has the body `{"error": {"message", "type", "param", "code"}}`; `param` names the field at fault. Errors of
`/v1/messages` have Anthropic's form, and those of `/api/chat` and its like Ollama's. A field that is null counts as
left out. A declared field with an unsupported value is refused. Where a schema allows undeclared fields, they are
ignored, and the response header `x-ignored-fields` names them; they are refused in a request with `collect_trajectory`,
and by a server with `--strict-fields`.

Every GET route accepts HEAD, and every path may end with a slash. A request may have its own `X-Request-Id`, of at most
128 printable ASCII characters; the response repeats it, or has one that the server made.
"""

REQUEST_ID_HEADER: dict[str, Any] = {
    "description": "The request's `X-Request-Id`, or one that the server made: for a generation, the answer's `id`.",
    "schema": {"type": "string"},
}
IGNORED_FIELDS_HEADER: dict[str, Any] = {
    "description": "Names of the body's fields that were ignored, separated by commas: at most 20 names of at most 64 "
    "characters, percent-encoded. Absent if there are none.",
    "schema": {"type": "string"},
}
LORA_ADAPTER_HEADER: dict[str, Any] = {
    "description": "The adapter version that served the request, as `name@version`; absent for the base model.",
    "schema": {"type": "string"},
}

EVENTS: dict[str, Any] = {
    "text/event-stream": {
        "schema": {
            "description": "One event of the stream.",
            "type": "object",
            "properties": {
                "event": {"type": "string", "description": "The kind of event, in streams with several kinds."},
                "data": {"type": "string", "description": "JSON text; `[DONE]` ends a completion's stream."},
            },
            "required": ["data"],
        }
    }
}
"""The `content` of a route that answers with server-sent events; the schema is that of one event."""

LINES: dict[str, Any] = {
    "application/x-ndjson": {
        "schema": {"description": "One line: an object with the same fields, or an error.", "type": "object"}
    }
}
"""The `content` of a route that answers with lines of JSON; the schema is that of one line."""

REF = "#/components/schemas/{model}"
KINDS = "x-raises"
"""Key that `raises` sets and `describe` removes: the class names of the errors with one status."""

ANY_ROUTE: tuple[Kind, ...] = (ForbiddenOriginError, Exception)
WITH_BODY: tuple[Kind, ...] = (RequestError, BodyTimeoutError, BodyTooLargeError, MediaTypeError, OverloadedError)
GENERATING: tuple[Kind, ...] = (
    AdapterFileError,
    GrammarError,
    ContextLengthError,
    UnknownModelError,
    ConflictError,
    TrainingDisabledError,
    OverloadedError,
    StepFailedError,
    EngineError,
    QueueTimeoutError,
    DeviceMemoryError,
    AbortedError,
    ModelUnavailableError,
    AdapterUnavailableError,
    EngineDeadError,
    DrainingError,
    InferenceDisabledError,
    AsleepError,
)


def raises(*kinds: Kind) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that may raise these errors. `describe` adds the errors that follow from
    the route's path, body and query."""
    statuses: dict[int | str, dict[str, Any]] = {}
    for kind in kinds:
        entry = statuses.setdefault(rule_of(kind).status, {"description": "", KINDS: []})
        entry[KINDS].append(kind.__name__)
    return statuses


def streamable(whole: type[BaseModel], *kinds: Kind) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a generating route: one JSON body, or events if `stream` is true, or an error; `kinds` are
    errors in addition to those that all generating routes may raise."""
    described = generating(whole, *kinds)
    described[200] |= {"content": deepcopy(EVENTS), "description": "One body, or server-sent events."}
    return described


def in_lines(whole: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a generating route of Ollama's API, whose streams are lines of JSON."""
    described = generating(whole)
    described[200] |= {"content": deepcopy(LINES), "description": "One body, or lines of JSON."}
    return described


def generating(whole: Any, *kinds: Kind) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a generating route that does not stream. `whole`: the answer's model, or a union of models."""
    answer = {"model": whole, "description": "The answers.", "headers": {LORA_ADAPTER: LORA_ADAPTER_HEADER}}
    return {200: answer, **raises(*GENERATING, *kinds)}


def describe(app: FastAPI, routes: Sequence[Route], strict_fields: bool) -> dict[str, Any]:
    """The OpenAPI document, made once and kept on the app.

    Args:
        routes: all routes of the app.
        strict_fields: whether undeclared fields are refused in every body.
    """
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, description=DESCRIPTION, routes=app.routes)
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        bodies = dict(_bodies(routes))
        for path, item in document["paths"].items():
            for method, operation in item.items():
                body = bodies.get((path, method))
                opens = body is not None and issubclass(body.model, OpenBody) and not strict_fields
                if body is not None:
                    operation["requestBody"], definitions = _request_body(path, body, opens)
                    schemas |= definitions
                operation["responses"] = _with_headers(_responses(path, operation), opens)
        for unused in ("HTTPValidationError", "ValidationError"):
            schemas.pop(unused, None)
        for form in (OPENAI, *FORMS.values()):
            error = form.model.model_json_schema(ref_template=REF)
            schemas |= {**error.pop("$defs", {}), form.model.__name__: error}
        for schema in schemas.values():
            for field in schema.get("properties", {}).values():
                if "const" in field:
                    field.setdefault("description", "Always this value.")
        app.openapi_schema = document
    return app.openapi_schema


def _bodies(routes: Iterable[Route]) -> Iterator[tuple[tuple[str, str], BodyModel]]:
    """The body of each route that has one, by path and method."""
    for route in routes:
        for needed in route.dependant.dependencies if isinstance(route, APIRoute) else ():
            if (body := getattr(needed.call, "body", None)) is not None:
                yield from (((route.path_format, method.lower()), body) for method in route.methods or ())


def _request_body(path: str, body: BodyModel, opens: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The `requestBody` of an operation, and the schemas that it refers to. With `opens`, every object of the body may
    have undeclared fields."""
    schema = jsonable_encoder(body.model.model_json_schema(ref_template=REF), exclude_none=True)
    definitions: dict[str, Any] = schema.pop("$defs", {})
    for part in (schema, *definitions.values()):
        if opens and "properties" in part:
            part["additionalProperties"] = True
    examples = {name: {"value": example} for name, example in EXAMPLES.get(path, {}).items()}
    content = {"application/json": {"schema": schema, "examples": examples}}
    return {"required": body.required, "content": content}, definitions


def _responses(path: str, operation: Operation) -> dict[str, Any]:
    """The declared responses, then every possible error, by status."""
    declared: dict[str, Any] = operation["responses"]
    named = {name for answer in declared.values() for name in answer.get(KINDS, ())}
    kinds = {kind for kind in (*RULES, *GENERATING) if kind.__name__ in named} | set(_of_form(path, operation))
    answers = {status: answer for status, answer in declared.items() if status != "422" and KINDS not in answer}
    for status in sorted({rule_of(kind).status for kind in kinds}):
        answers[str(status)] = _error(path, (kind for kind in kinds if rule_of(kind).status == status))
    return answers


def _with_headers(answers: Mapping[str, dict[str, Any]], opens: bool) -> dict[str, Any]:
    common = {REQUEST_ID: REQUEST_ID_HEADER} | ({IGNORED_FIELDS: IGNORED_FIELDS_HEADER} if opens else {})
    return {
        status: {**answer, "headers": {**answer.get("headers", {}), **common}} for status, answer in answers.items()
    }


def _of_form(path: str, operation: Operation) -> Iterator[Kind]:
    """Errors that follow from a route's path, body and query."""
    yield from ANY_ROUTE
    if path not in OPEN_PATHS:
        yield from (ApiKeyError, RoleError)
    if "requestBody" in operation:
        yield from WITH_BODY
    if any(parameter["in"] == "query" for parameter in operation.get("parameters", ())):
        yield RequestError


def _error(path: str, kinds: Iterable[Kind]) -> dict[str, Any]:
    """The response of one status of a route, with the meaning of each of its codes."""
    rules = {rule_of(kind): kind for kind in sorted(kinds, key=lambda kind: kind.__name__)}
    meanings = ((rule, rule.message or (kind.__doc__ or "").partition("\n")[0]) for rule, kind in rules.items())
    lines = sorted(f"`{rule.code or 'invalid_request_error'}`: {meaning}" for rule, meaning in meanings)
    schema = {"$ref": REF.format(model=form_of(path).model.__name__)}
    return {"description": "\n\n".join(lines), "content": {"application/json": {"schema": schema}}}


# Example bodies, by path and name. Each can be sent unchanged to a server that trains and has an adapter `math`; those
# with a trajectory id or a folder need one of that name.

_MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
_SCORE: Examples = {"two endings": {"text_1": "The sky is", "text_2": [" blue.", " loud."]}}
_RERANK: Examples = {"the best of two": {"query": "Is it wet?", "documents": ["It rains.", "It snows."], "top_n": 1}}
_LOAD: Examples = {"from a folder": {"lora_name": "tone", "lora_path": "tone"}}
_UNLOAD: Examples = {"all versions": {"lora_name": "math"}}
_CONTROL: Examples = {"default adapter": {}}
_SWITCH: Examples = {"one version": {"version": "math@1"}, "the model itself": {"version": "base"}}
_CHECKPOINT: Examples = {"tagged": {"lora_name": "math", "checkpoint_name": "mine", "metrics": {"accuracy": 0.75}}}

EXAMPLES: Mapping[str, Examples] = {
    "/v1/completions": {
        "continue a text": {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0},
        "score a text": {"prompt": "Paris", "max_tokens": 0, "echo": True, "logprobs": 1},
        "several samples": {"prompt": "Once", "n": 2, "max_tokens": 4, "temperature": 0.8, "seed": 7},
        "token ids in and out": {
            "prompt": [1, 2, 3],
            "max_tokens": 4,
            "logprobs": 1,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        },
    },
    "/v1/chat/completions": {
        "a question": {"messages": _MESSAGES, "max_tokens": 8},
        "as a stream": {
            "messages": _MESSAGES,
            "max_tokens": 8,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        "for training": {"messages": _MESSAGES, "n": 2, "max_tokens": 4, "collect_trajectory": True},
    },
    "/v1/chat/completions/tokens": {
        "a question and its tokens": {"messages": _MESSAGES, "tokens": [1, 2, 3], "max_tokens": 4}
    },
    "/v1/chat/completions/render": {"a question": {"messages": _MESSAGES, "max_tokens": 4, "logprobs": True}},
    "/inference/v1/generate": {
        "token ids": {
            "token_ids": [1, 2, 3],
            "sampling_params": {"max_tokens": 4, "logprobs": 1, "stop_token_ids": [2]},
        },
        "score tokens": {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 1, "prompt_logprobs": 1}},
    },
    "/generate": {
        "vLLM": {"prompt": {"prompt_token_ids": [1, 2, 3]}, "max_tokens": 4, "logprobs": 0, "n": 2},
        "SGLang": {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4, "n": 2}, "return_logprob": True},
        "TRL": {"prompts": ["Once"], "max_tokens": 4, "n": 2},
    },
    "/v1/responses": {
        "a question": {"input": "What is the capital of France?", "max_output_tokens": 8},
        "items": {"input": _MESSAGES, "instructions": "Be brief.", "max_output_tokens": 8, "store": False},
        "as a stream": {"input": "Hello", "max_output_tokens": 8, "stream": True},
    },
    "/v1/responses/input_tokens": {"a question": {"input": "What is the capital of France?"}},
    "/v1/messages": {
        "a question": {"messages": _MESSAGES, "system": "Be brief.", "max_tokens": 8},
        "as a stream": {"messages": _MESSAGES, "max_tokens": 8, "stream": True},
    },
    "/v1/messages/count_tokens": {"a question": {"messages": _MESSAGES}},
    "/api/chat": {
        "a question": {"model": "base", "messages": _MESSAGES, "options": {"num_predict": 8}},
        "in one piece": {"model": "base", "messages": _MESSAGES, "stream": False, "options": {"num_predict": 8}},
        "load": {"model": "base"},
    },
    "/api/generate": {
        "a question": {"model": "base", "prompt": "Hello", "options": {"num_predict": 8}},
        "continue a text": {"model": "base", "prompt": "Once", "raw": True, "stream": False},
    },
    "/api/embed": {"two texts": {"model": "base", "input": ["A cat sleeps.", "A dog runs."]}},
    "/api/show": {"an adapter": {"model": "math"}},
    "/v1/embeddings": {
        "two texts": {"input": ["A cat sleeps.", "A dog runs."]},
        "token ids, as base64": {"input": [1, 2, 3], "encoding_format": "base64", "pooling": "mean", "dimensions": 2},
    },
    "/v1/score": _SCORE,
    "/score": _SCORE,
    "/v1/rerank": _RERANK,
    "/rerank": _RERANK,
    "/v1/load_lora_adapter": {
        **_LOAD,
        "in place": {"lora_name": "math", "lora_path": "math", "load_inplace": True},
    },
    "/v1/unload_lora_adapter": _UNLOAD,
    "/load_lora_adapter": _LOAD,
    "/unload_lora_adapter": _UNLOAD,
    "/v1/adapters/route": {"a tenth": {"weights": {"base": 0.9, "math": 0.1}}},
    "/v1/adapters/rollback": {"an adapter": {"lora_name": "math"}},
    "/model/switch-lora": _SWITCH,
    "/v1/model/switch-lora": _SWITCH,
    "/training/checkpoint": _CHECKPOINT,
    "/v1/training/checkpoint": _CHECKPOINT,
    "/v1/training/update": {
        "what waits": {},
        "given": {
            "trajectories": [
                {"prompt_token_ids": [1, 2], "completion_token_ids": [3, 4], "reward": 1, "group_id": "a"},
                {"prompt_token_ids": [1, 2], "completion_token_ids": [5, 4], "reward": 0, "group_id": "a"},
            ]
        },
        "rows of tokens": {
            "trajectories": [
                {"token_ids": [1, 2, 3, 4, 1, 5], "mask": [0, 0, 1, 1, 0, 1], "advantages": 0.5},
                {"token_ids": [1, 2, 5, 4], "mask": [0, 0, 1, 1], "advantages": -0.5},
            ]
        },
    },
    "/v1/training/start": _CONTROL,
    "/v1/training/pause": _CONTROL,
    "/v1/training/resume": _CONTROL,
    "/v1/training/rollback": {"the best version": {}},
    "/v1/training/feedback": {"a reward": {"trajectory_id": "traj-0", "score": 1}},
    "/v1/training/preference": {
        "a preference": {"chosen": "Yes.", "rejected_id": "traj-0"},
        "a correction": {"trajectory_id": "traj-0", "correction": "Yes."},
    },
    "/v1/training/compare": {"a checkpoint": {"candidate": "checkpoint-300", "share": 0.2}},
    "/v1/training/compare/stop": _CONTROL,
    "/v1/training/reward_model": {"a tenth held out": {"name": "polite", "held_out": 0.1}},
    "/v1/training/lesson": {
        "a word": {"prompts": ["How do I ask for a spoon?"], "reward": {"word": "please"}},
        "a question": {
            "prompts": ["My dog is called Max."],
            "reward": {"pattern": r"\?\s*\Z"},
            "updates": 20,
        },
    },
    "/v1/training/average": {"two sites": {"adapters": ["north", "south"], "lora_adapter": "mean", "rank": 16}},
    "/v1/training/schedule": {"training first": {"mode": "training_priority", "max_decode_stall_ms": 250}},
    "/tokenize": {"a text": {"prompt": "Hello"}, "a conversation": {"messages": _MESSAGES}},
    "/detokenize": {"ids": {"tokens": [1, 2, 3]}},
}
