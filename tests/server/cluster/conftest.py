"""A head over fakes."""

import pytest
from server.asking import client_of
from server.fake_cluster import FakeCluster, app_of


@pytest.fixture
def head(engine, adapters):
    """Its client; `head.cluster` is the cluster, and `head.app` the app."""
    cluster = FakeCluster()
    client = client_of(app_of(engine, adapters, cluster))
    client.cluster = cluster
    return client
