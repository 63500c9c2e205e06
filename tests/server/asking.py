"""Clients of apps in this process, and requests whose answers must have a certain status."""

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


async def refused(client, fault, path, status=400, **body):
    """The error of the answer to a body with these fields, which may be what JSON lacks, such as NaN."""
    response = await client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert response.status_code == status, response.text
    return fault(response)
