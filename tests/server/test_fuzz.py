"""Random fields in every API that answers a prompt: each answer is a success or that API's error, and never a 5xx."""

import json
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from server.fuzzing import bodies, fuzzed, objects, scalars, values

from mlx_parallm.extras.ollama.objects import (
    ChatAnswer,
    EmbedAnswer,
    GenerateAnswer,
    OneEmbeddingAnswer,
    ShownModel,
)
from mlx_parallm.extras.ollama.options import OllamaOptions
from mlx_parallm.extras.ollama.schema import (
    EmbedBody,
    OllamaChatBody,
    OllamaGenerateBody,
    OneEmbeddingBody,
    ShowBody,
)
from mlx_parallm.server.api.chat import ChatBody, ChatCompletion
from mlx_parallm.server.api.completions import Completion, CompletionBody
from mlx_parallm.server.api.embeddings import Embeddings, EmbeddingsBody
from mlx_parallm.server.api.fields import WireInput, WireOutput
from mlx_parallm.server.api.messages.body import CountTokensBody, MessagesBody
from mlx_parallm.server.api.messages.route import MessageObject, TokenCount
from mlx_parallm.server.api.responses.body import ResponsesBody
from mlx_parallm.server.api.responses.output import ResponseObject
from mlx_parallm.server.api.scores import Ranking, RerankBody, ScoreBody, Scores
from mlx_parallm.server.api.tokens import TokenCompletion, TokensBody
from mlx_parallm.server.errors import ErrorBody, MessagesError, OllamaError

pytestmark = pytest.mark.ci

USER = [{"role": "user", "content": "x"}]
ROLES = ("user", "assistant", "system", "tool")
COLLECTED = {"prompt": "x", "collect_trajectory": True, "scoring_function": "exact"}


@dataclass(frozen=True)
class Route:
    """A route with a body that it answers, its answer when it is not streamed, and its error. `nested`: the objects of
    a list in the body, by the list's name."""

    path: str
    model: type[WireInput]
    base: dict
    answer: type[WireOutput]
    error: type[WireOutput] = ErrorBody
    nested: dict = field(default_factory=dict)


def messages(*names):
    """Messages of a conversation, which may have any text."""
    return st.lists(objects(["role", "content", *names], ROLES), min_size=1, max_size=3)


BLOCKS = st.lists(
    objects(
        ["type", "text", "thinking", "id", "name", "input", "tool_use_id", "content", "source"],
        ["text", "thinking", "tool_use", "tool_result", "image"],
    ),
    max_size=3,
)
ROUTES = (
    Route("/v1/completions", CompletionBody, {"prompt": "x"}, Completion),
    Route("/v1/completions", CompletionBody, COLLECTED, Completion, nested={"metadata": objects(["answer", "x"])}),
    Route(
        "/v1/chat/completions",
        ChatBody,
        {"messages": USER},
        ChatCompletion,
        nested={"messages": messages("tool_calls", "tool_call_id", "name", "reasoning_content")},
    ),
    Route(
        "/v1/responses",
        ResponsesBody,
        {"input": "x"},
        ResponseObject,
        nested={
            "input": st.lists(
                objects(
                    ["type", "role", "content", "call_id", "name", "arguments", "output"],
                    ["message", "function_call", "function_call_output", "reasoning", "user"],
                ),
                max_size=3,
            )
        },
    ),
    Route(
        "/v1/messages",
        MessagesBody,
        {"max_tokens": 4, "messages": USER},
        MessageObject,
        MessagesError,
        {"messages": st.lists(st.fixed_dictionaries({"role": st.sampled_from(ROLES), "content": BLOCKS}), max_size=3)},
    ),
    Route("/v1/messages/count_tokens", CountTokensBody, {"messages": USER}, TokenCount, MessagesError),
    Route(
        "/api/chat",
        OllamaChatBody,
        {"messages": USER, "stream": False},
        ChatAnswer,
        OllamaError,
        {
            "messages": messages("tool_calls", "tool_name", "thinking", "images"),
            "options": bodies(OllamaOptions, {}),
        },
    ),
    Route(
        "/api/generate",
        OllamaGenerateBody,
        {"prompt": "x"},
        GenerateAnswer,
        OllamaError,
        {"options": bodies(OllamaOptions, {}), "keep_alive": scalars},
    ),
    Route(
        "/api/embed", EmbedBody, {"input": ["x"]}, EmbedAnswer, OllamaError, {"input": st.lists(scalars, max_size=3)}
    ),
    Route("/api/embeddings", OneEmbeddingBody, {"prompt": "x"}, OneEmbeddingAnswer, OllamaError),
    Route("/api/show", ShowBody, {}, ShownModel, OllamaError),
    Route("/v1/embeddings", EmbeddingsBody, {"input": "x"}, Embeddings, nested={"input": st.lists(values, max_size=3)}),
    Route("/v1/score", ScoreBody, {"text_1": "x", "text_2": ["y"]}, Scores, nested={"text_2": st.lists(st.text())}),
    Route(
        "/v1/rerank",
        RerankBody,
        {"query": "x", "documents": ["y"]},
        Ranking,
        nested={"documents": st.lists(objects(["text"]) | st.text(), max_size=3)},
    ),
    Route("/inference/v1/generate", TokensBody, {"token_ids": [1], "sampling_params": {}}, TokenCompletion),
)


def check(route, engine, response):
    """Checks that an answer is one of the route's, and that nothing is left of the request."""
    if response.status_code != 200:
        assert response.status_code in (400, 404), response.text
        route.error.model_validate_json(response.text)
        response.text.encode()
    elif response.headers["content-type"].startswith("application/json"):
        route.answer.model_validate_json(response.text)
    else:
        for line in response.text.splitlines():
            if line.startswith(("data: {", "{")):
                json.loads(line.removeprefix("data: "))
    assert not engine.live


@pytest.mark.parametrize("route", ROUTES, ids=[route.path for route in ROUTES])
@fuzzed
@given(data=st.data())
def test_random_fields(post_json, engine, route, data):
    body = data.draw(bodies(route.model, route.base))
    for name, nested in route.nested.items():
        if data.draw(st.booleans()):
            body[name] = data.draw(nested)
    check(route, engine, post_json(route.path, json.dumps(body)))


@fuzzed
@given(raw=st.binary(max_size=60) | st.text(max_size=60).map(str.encode) | values.map(lambda v: json.dumps(v).encode()))
def test_raw_bodies(post_json, raw):
    assert post_json("/v1/completions", raw).status_code == 400


@fuzzed
@given(form=st.binary(max_size=60) | st.text(max_size=60).map(lambda key: f"key={key}".encode()))
def test_no_form_opens_a_session(post_json, form):
    """The server has no keys, so none of them can be right."""
    headers = {"origin": "http://localhost:8000", "content-type": "application/x-www-form-urlencoded"}
    response = post_json("/login", form, headers)
    assert response.status_code in (401, 429)
    assert "set-cookie" not in response.headers
