"""Errors about a translated body have the client's names of its fields."""

import pytest

from mlx_parallm.errors import ContextLengthError, InvalidRequestError, RequestError
from mlx_parallm.server.api.completions import CompletionBody
from mlx_parallm.server.api.dialect import Dialect

DIALECT = Dialect(
    CompletionBody,
    {"prompt": "input_ids", "n": "options.n", r"tools\[(\d+)\]\.function": r"tools[\1]", "messages.*": "messages"},
)


@pytest.mark.parametrize(
    ("error", "message", "param"),
    [
        (InvalidRequestError("prompt: the prompt is empty", "prompt"), "input_ids: the prompt is empty", "input_ids"),
        (InvalidRequestError("There are no tokens.", "prompt"), "There are no tokens.", "input_ids"),
        (InvalidRequestError("prompt_logprobs: too many", "prompt_logprobs"), "prompt_logprobs: too many", None),
        (InvalidRequestError("n: not a number", "n"), "options.n: not a number", "options.n"),
        (
            InvalidRequestError("tools[12].function.name: too long", "tools[12].function.name"),
            "tools[12].name: too long",
            "tools[12].name",
        ),
        (InvalidRequestError("messages[2].content: is empty", "messages[2].content"), "messages: is empty", "messages"),
        (ContextLengthError("the prompt is too long", "prompt"), "the prompt is too long", "input_ids"),
        (InvalidRequestError("no field is at fault"), "no field is at fault", None),
    ],
)
def test_errors_name_the_clients_field(error: RequestError, message: str, param: str | None) -> None:
    with pytest.raises(type(error)) as raised, DIALECT.own_names():
        raise error
    assert (str(raised.value), raised.value.param) == (message, param or error.param)


def test_a_body_is_translated_and_its_faults_are_named() -> None:
    assert DIALECT.translated({"prompt": "x", "n": None}) == CompletionBody(prompt=["x"])
    with pytest.raises(InvalidRequestError, match=r"^options\.n: ") as raised:
        DIALECT.translated({"prompt": "x", "n": 0})
    assert raised.value.param == "options.n"
