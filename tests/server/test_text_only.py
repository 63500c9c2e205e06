"""Images and audio are refused by every API, with the part that has them."""

from __future__ import annotations

import pytest
from server.asking import fault

TEXT = {"type": "text", "text": "What is this?"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}
SENT_IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}


def user(*parts):
    return [{"role": "user", "content": list(parts)}]


@pytest.mark.parametrize(
    ("path", "body", "param", "kind"),
    [
        ("/v1/chat/completions", {"messages": user(TEXT, IMAGE)}, "messages[0].content[1]", "image_url"),
        ("/v1/chat/completions", {"messages": user(AUDIO)}, "messages[0].content[0]", "input_audio"),
        ("/v1/chat/completions", {"messages": user("x")}, "messages[0].content[0]", "no part"),
        ("/tokenize", {"messages": user(TEXT, IMAGE)}, "messages[0].content[1]", "image_url"),
        ("/v1/responses", {"input": user(SENT_IMAGE)}, "input[0].content[0]", "input_image"),
        ("/v1/responses", {"input": user(AUDIO)}, "input[0].content[0]", "input_audio"),
        (
            "/v1/responses",
            {"input": [{"type": "function_call_output", "call_id": "a", "output": [SENT_IMAGE]}]},
            "input[0].output[0]",
            "input_image",
        ),
        ("/v1/completions", {"prompt": "x", "prompt_embeds": "AA=="}, "prompt_embeds", "prompt_embeds"),
        ("/generate", {"input_ids": [1], "image_data": "AA=="}, "image_data", "image_data"),
    ],
)
async def test_what_is_no_text_is_refused_by_name(client, engine, path, body, param, kind):
    response = await client.post(path, json=body)
    assert response.status_code == 400
    error = fault(response)
    assert error["param"] == param
    assert kind in error["message"]
    assert not engine.requests
