"""Open WebUI 0.12.4, unmodified, through one connection of each of its kinds: OpenAI's API and Ollama's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
from clients.asked import ASKED
from clients.open_webui import MODELS, WebUI, webui
from clients.running import wait_until_idle
from main_job.serving import SERVED, Server, start, stop

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.large("Open WebUI installs torch and CUDA, which take 7 GB"),
]

KEY = "secret"
QUESTION = [{"role": "user", "content": ASKED["question"]}]
GREEDY = {"temperature": 0, "max_tokens": ASKED["max_tokens"]}
FACTS = {"cats": "A cat sleeps sixteen hours a day. ", "bolts": "The bolt M8 needs a wrench of 13 mm. "}

each_kind = pytest.mark.parametrize("kind", MODELS)


@pytest.fixture(scope="module")
def keyed() -> Iterator[Server]:
    running = start("--debug", "--api-key", KEY)
    running.http.headers["authorization"] = f"Bearer {KEY}"
    yield running
    try:
        wait_until_idle(running)
    finally:
        stop(running)


@pytest.fixture(scope="module")
def ui(keyed: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebUI]:
    with webui(keyed.url, KEY, tmp_path_factory.mktemp("open-webui")) as running:
        yield running


@pytest.fixture(scope="module")
def said(keyed: Server) -> dict[str, Any]:
    """What plain HTTP hears, and its usage."""
    answer = keyed.post("/v1/chat/completions", model=SERVED, messages=QUESTION, **GREEDY)
    text: str = answer["choices"][0]["message"]["content"]
    assert "Paris" in text
    return {"text": text, "usage": answer["usage"]}


def test_connections_are_verified_and_models_listed(ui: WebUI, keyed: Server) -> None:
    verified = ui.post("/openai/verify", url=f"{keyed.url}/v1", key=KEY)
    assert SERVED in [model["id"] for model in verified["data"]]
    assert ui.post("/ollama/verify", url=keyed.url, key=KEY) == keyed.get("/api/version")
    models = {model["id"]: model for model in ui.get("/api/models")["data"]}
    assert {kind: models[name]["owned_by"] for kind, name in MODELS.items()} == {kind: kind for kind in MODELS}
    assert models[SERVED]["ollama"]["size"] > 10**8
    assert ui.post("/ollama/api/show", model=SERVED)["capabilities"][0] == "completion"


@each_kind
def test_a_chat_is_streamed(ui: WebUI, said: dict[str, Any], kind: str) -> None:
    lines = ui.lines("/api/chat/completions", model=MODELS[kind], messages=QUESTION, params=GREEDY)
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    choices = [event["choices"][0] for event in events if event.get("choices")]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == said["text"]
    assert choices[-1]["finish_reason"] == "stop"


@each_kind
def test_a_whole_chat_has_its_usage(ui: WebUI, said: dict[str, Any], kind: str) -> None:
    answer = ui.post("/api/chat/completions", model=MODELS[kind], messages=QUESTION, params=GREEDY, stream=False)
    assert answer["choices"][0]["message"]["content"] == said["text"]
    usage = answer["usage"]
    assert [usage[part] for part in ("prompt_tokens", "completion_tokens")] == [
        said["usage"][part] for part in ("prompt_tokens", "completion_tokens")
    ]


@each_kind
def test_its_page_saves_a_chat_with_a_title(ui: WebUI, keyed: Server, said: dict[str, Any], kind: str) -> None:
    """The page's own request: the answer is saved, and the model is asked for a title, tags and further questions."""
    before = requests(keyed)
    user, answer = str(uuid4()), str(uuid4())
    message = {"id": user, "parentId": None, "role": "user", "content": ASKED["question"], "models": [MODELS[kind]]}
    begun = ui.post(
        "/api/chat/completions",
        model=MODELS[kind],
        messages=QUESTION,
        params={**GREEDY, "function_calling": "legacy"},  # without the tools of Open WebUI, for which it is too small
        stream=True,
        parent_id=None,
        user_message=message,
        id=answer,
        session_id="page",
        background_tasks={"title_generation": True, "tags_generation": True, "follow_up_generation": True},
    )
    path = f"/api/v1/chats/{begun['chat_id']}"
    ui.wait_for(f"/api/tasks/chat/{begun['chat_id']}", lambda found: not found["task_ids"])
    chat = ui.wait_for(path, lambda found: found["title"] != "New Chat")
    saved = chat["chat"]["history"]["messages"][answer]
    assert (saved["content"], saved["done"], saved.get("error")) == (said["text"], True, None)
    assert requests(keyed) - before == 4


def requests(server: Server) -> int:
    """How many the server has begun to answer."""
    return int(server.get("/v1/usage")["data"][0]["requests"])


@each_kind
def test_files_are_found_by_the_servers_vectors(ui: WebUI, keyed: Server, kind: str) -> None:
    place = {"url": f"{keyed.url}/v1" if kind == "openai" else keyed.url, "key": KEY}
    settings = {"RAG_EMBEDDING_ENGINE": kind, "RAG_EMBEDDING_MODEL": SERVED, f"{kind}_config": place}
    ui.post("/api/v1/retrieval/embedding/update", **settings)
    files = [f"file-{ui.add_file(f'{title}-{kind}.txt', text * 3)}" for title, text in FACTS.items()]
    for text in FACTS.values():
        found = ui.post("/api/v1/retrieval/query/collection", collection_names=files, query=text, k=1)
        assert text.strip() in found["documents"][0][0]
