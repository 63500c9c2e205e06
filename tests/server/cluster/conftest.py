"""A head over fakes."""

import httpx
import pytest
from server.fake_cluster import FakeCluster, app_of


@pytest.fixture
def head(engine, adapters):
    """Its client; `head.cluster` is the cluster, and `head.app` the app."""
    cluster = FakeCluster()
    app = app_of(engine, adapters, cluster)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    client = httpx.AsyncClient(transport=transport, base_url="http://localhost:8000")
    client.cluster, client.app = cluster, app
    return client
