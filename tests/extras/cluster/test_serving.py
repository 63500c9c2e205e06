"""What a server must have before it becomes a node of a cluster, and when it takes requests from the others."""

from types import SimpleNamespace

import pytest

from mlx_parallm.config import resolve
from mlx_parallm.config.sources import Setting
from mlx_parallm.core.machine import MachineState, Relief
from mlx_parallm.engine.figures import EngineStats
from mlx_parallm.errors import ConfigError
from mlx_parallm.extras.cluster.addresses import EVERY_INTERFACE, outward_address
from mlx_parallm.extras.cluster.running import serving as cluster
from mlx_parallm.extras.cluster.running.serving import begin_serving, prepare
from mlx_parallm.server.services import Lifecycle

HEAD, REPLICA = {"cluster.share_model": True}, {"cluster.connect_to": "node1:8000", "cluster.token": "t"}


def configured(**settings):
    return resolve({path: Setting(value, "test") for path, value in settings.items()}).config


@pytest.mark.parametrize("node", [HEAD, REPLICA], ids=["head", "replica"])
@pytest.mark.parametrize("host", [{}, {"server.host": "192.168.1.7"}, {"server.host": "::"}], ids=str)
def test_a_node_that_the_network_can_reach_needs_a_key(node, host):
    with pytest.raises(ConfigError, match=r"MLX_PARALLM_API_KEY or --keys-file, or .* --host 127\.0\.0\.1"):
        prepare(configured(**node, **host))


def test_a_head_with_a_key_or_on_this_machine_starts(tmp_path):
    for more in {"server.api_key": "k"}, {"server.keys_file": str(tmp_path / "keys.json")}, {"server.host": "::1"}:
        config = configured(**HEAD, **more)
        assert prepare(config) == config


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("fe80::1", "http://[fe80::1]:8000"),
        ("0.0.0.0", "http://192.168.1.7:8000"),
        ("::", "http://[fd00::7]:8000"),
    ],
)
def test_a_head_tells_the_others_an_address_at_which_they_reach_it(monkeypatch, host, url):
    monkeypatch.setattr(cluster, "outward_address", {"0.0.0.0": "192.168.1.7", "::": "fd00::7"}.get)
    told = []
    node = SimpleNamespace(serve=lambda where, report: told.append(where()))
    begin_serving(node, configured(**HEAD, **{"server.host": host}), None, 8000)
    assert told == [url]


@pytest.mark.parametrize("every", ["0.0.0.0", "::"])
def test_the_address_of_every_interface_is_none(every):
    assert outward_address(every) not in EVERY_INTERFACE


@pytest.mark.parametrize("relief", Relief)
def test_the_others_send_nothing_to_a_node_that_refuses_requests_for_lack_of_memory(relief):
    stats = EngineStats(alive=True, ready=True, machine=MachineState(relief=relief))
    services = SimpleNamespace(
        engine=SimpleNamespace(stats=lambda: stats),
        cluster=None,
        lifecycle=Lifecycle(None, None),
    )
    reports = []
    node = SimpleNamespace(serve=lambda url, report: reports.append(report()))
    begin_serving(node, configured(**HEAD), services, 8000)
    assert [report.ready for report in reports] == [relief is not Relief.REQUESTS]
