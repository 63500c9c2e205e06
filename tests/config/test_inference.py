"""The section `inference`."""

import pytest

from mlx_parallm.config import EngineKind, Setting, resolve
from mlx_parallm.errors import ConfigError


def resolved(**keys):
    return resolve({f"inference.{name}": Setting(value, f"--{name}") for name, value in keys.items()}).config.inference


def test_samples_are_drawn_in_the_same_process_unless_another_engine_is_named():
    assert resolved().engine is EngineKind.SHARED
    config = resolved(engine="VLLM", url="http://10.0.0.1:8000/v1", model="org/model")
    assert (config.engine, config.url, config.model) == (EngineKind.VLLM, "http://10.0.0.1:8000/v1", "org/model")


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"engine": "vllm"}, "the engine vllm needs the address of its server; add --inference-url"),
        ({"url": "http://a"}, "url is not read by the engine shared"),
        ({"engine": "none", "url": "http://a"}, "url is not read by the engine none"),
        ({"engine": "sglang", "url": "10.0.0.1:30000"}, "url must begin with http:// or https://"),
        ({"engine": "tensorrt", "url": "http://a"}, "inference.engine: must be 'shared'"),
    ],
)
def test_an_engine_and_its_address_belong_together(keys, reason):
    with pytest.raises(ConfigError, match=reason):
        resolved(**keys)
