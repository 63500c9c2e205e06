"""The OpenAPI document is complete and true; `/docs` shows it without a network."""

import re

import pytest
from rl.fakes import trajectories

from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.rl.trajectories import TrajectoryGroup
from mlx_parallm.server.app import openapi_document
from mlx_parallm.server.errors import RULES

CLUSTER = "/v1/cluster"  # of nodes of a cluster only; tests/server/cluster asks it
STOP = "/v1/training/stop"
EVENTS = "/v1/training/events"
FORMS = {"/v1/messages": "MessagesError", "/api": "OllamaError"}


def operations(document):
    return [(path, method, said) for path, item in document["paths"].items() for method, said in item.items()]


def bodies(document):
    return {
        path: said["requestBody"]["content"]["application/json"]
        for path, _, said in operations(document)
        if "requestBody" in said
    }


EXAMPLES = {
    path: {name: example["value"] for name, example in body.get("examples", {}).items()}
    for path, body in bodies(openapi_document()).items()
}
"""Bodies, by path and name."""


async def test_every_route_and_its_answers_are_described(document):
    for path, method, said in operations(document):
        assert said["summary"], (method, path)
        assert said["description"], (method, path)
        for parameter in said.get("parameters", ()):
            assert parameter.get("description") or parameter["schema"].get("description"), (path, parameter["name"])
        assert said["responses"]["200"]["description"], path
        assert said["responses"]["200"].get("content"), path


async def test_every_field_has_a_description(document):
    schemas = document["components"]["schemas"] | {path: body["schema"] for path, body in bodies(document).items()}
    bare = {
        f"{name}.{field}"
        for name, schema in schemas.items()
        for field, said in schema.get("properties", {}).items()
        if not said.get("description")
    }
    assert len(schemas) > 50
    assert not bare


async def test_every_number_that_is_sent_has_bounds(document):
    unbounded = {"score", "reward"}
    for path, body in bodies(document).items():
        for field, said in body["schema"]["properties"].items():
            for kind in (said, *said.get("anyOf", ())):
                if kind.get("type") in ("integer", "number") and field not in unbounded:
                    assert {"minimum", "exclusiveMinimum"} & kind.keys(), (path, field)
                    assert {"maximum", "exclusiveMaximum"} & kind.keys(), (path, field)


async def test_errors_have_the_form_of_their_api_and_every_code_is_listed(document):
    for path, _, said in operations(document):
        model = next((form for start, form in FORMS.items() if path.startswith(start)), "ErrorBody")
        assert said["responses"].keys() == {"200", "default"}, path
        assert said["responses"]["default"] == {"$ref": f"#/components/responses/{model}"}, path
    assert set(document["components"]["responses"]) == {"ErrorBody", *FORMS.values()}
    for model, answer in document["components"]["responses"].items():
        assert answer["content"]["application/json"]["schema"] == {"$ref": f"#/components/schemas/{model}"}
        listed = re.findall(r"^(\d{3}) `(\w+)`: .", answer["description"], re.MULTILINE)
        assert {("404", "model_not_found"), ("503", "draining"), ("500", "internal_error")} <= {*listed}
        assert len(listed) == len(RULES)


async def test_every_body_has_an_example(document):
    assert len(bodies(document)) > 40
    assert [path for path in bodies(document) if not EXAMPLES[path]] == []


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, examples in EXAMPLES.items() for name in examples])
async def test_every_example_runs(client, adapters, engine, path, name):
    for adapter in ("math", "math", "north", "south"):
        adapters.publish(adapter)
    if path == STOP:
        await client.post("/v1/training/start", json=EXAMPLES[path][name])
    response = await client.post(path, json=EXAMPLES[path][name])
    assert response.status_code == 200, response.text
    if "stream" in EXAMPLES[path][name]:
        assert '"error":{' not in response.text


async def test_every_route_without_a_body_answers_as_it_stands(client, adapters, training, document):
    adapters.publish("math")
    training.buffer.add(TrajectoryGroup("policy", trajectories("{group_id}", AdapterRef("policy", 1))))
    stored = (await client.post("/v1/responses", json={"input": "x"})).json()["id"]
    for path, method, said in operations(document):
        if "requestBody" not in said and path not in (EVENTS, CLUSTER):
            url = path.replace("{name}", "math").replace("{selector}", "math").replace("{response_id}", stored)
            response = await client.request(method, url)
            assert response.status_code == 200, (method, path, response.text)
            kind = response.headers["content-type"].partition(";")[0]
            assert kind in said["responses"]["200"]["content"], (method, path)
            adapters.publish("math")


async def test_docs_load_nothing_from_elsewhere(client):
    page = await client.get("/docs")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "https://" not in page.text
    assert "http://" not in page.text
    assert not re.search(r"""(src|href)=["'](?!openapi\.json)""", page.text)
    assert 'fetch("openapi.json")' in page.text
    assert "innerHTML" not in page.text
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
