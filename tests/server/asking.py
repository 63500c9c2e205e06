"""Clients of apps in this process, and requests whose answers must have a certain status."""

import asyncio
import json

import httpx


def client_of(app):
    """An httpx client of an app in this process, which is its `app`."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    client = httpx.AsyncClient(transport=transport, base_url="http://localhost:8000")
    client.app = app
    return client


async def answered(client, path, body, status=200, **options):
    """The JSON of the answer to a POST. `options`: of httpx."""
    response = await client.post(path, json=body, **options)
    assert response.status_code == status, response.text
    return response.json()


async def post(client, path, **body):
    """The answer to a body with these fields."""
    return await answered(client, path, body)


def fault(response):
    """The error object of an answer, having checked the envelope that every error has."""
    assert response.headers["content-type"].startswith("application/json")
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    return error


async def refusal(asked, status, **fields):
    """The error of the answer to a request that is awaited here, which has these fields."""
    response = await asked
    error = fault(response)
    assert (response.status_code, {name: error[name] for name in fields}) == (status, fields)
    return error


async def refused(client, path, status=400, **body):
    """The error of the answer to a body with these fields, which may be what JSON lacks, such as NaN."""
    response = await client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert response.status_code == status, response.text
    return fault(response)


def events_in(response):
    """The objects of a stream."""
    lines = (line.removeprefix("data: ") for line in response.text.splitlines())
    return [json.loads(line) for line in lines if line.startswith("{")]


async def eventually(condition, limit_s=30):
    """Returns as soon as the condition is true."""
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.01)
