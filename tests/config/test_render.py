"""The configuration as yaml: the shipped file, and what --print-config shows."""

from pathlib import Path

import pytest
import yaml

from mlx_parallm.config import KEYS, Config, Setting, render, resolve
from mlx_parallm.errors import ConfigError

SHIPPED = Path(__file__).parents[2] / "server_config.yaml"


def test_shipped_file_is_the_default_configuration():
    assert resolve({}, {}, SHIPPED).config == Config()
    assert set(resolve({}, {}, SHIPPED).sources) == set(KEYS), "a key is missing from server_config.yaml"


def test_shipped_file_is_what_print_config_prints():
    assert SHIPPED.read_text() == render(resolve({})), "run: mlx_parallm_serve --print-config > server_config.yaml"


def test_rendered_configuration_reads_back_and_names_sources(tmp_path):
    flags = {
        "server.host": Setting("::", "--host"),
        "server.served_model_name": Setting("on: #1 'ü'", "--served-model-name"),
        "server.kv_cache_memory": Setting("4GB", "--kv-cache-memory"),
        "server.max_body_bytes": Setting(12345, "x"),
        "server.allowed_hosts": Setting("a,b", "x"),
        "server.priority_ratios.inference": Setting(0.99999, "x"),
        "adapters.adapter_dir": Setting("/a, #b", "--adapter-dir"),
        "adapters.allowed_adapter_roots": Setting(["/c, d", "ü"], "x"),
        "adapters.default_adapter": Setting("1.5", "x"),
        "adapters.serve": Setting("on", "x"),
        "server.priority_ratios.training": Setting(0.00001, "x"),
    }
    resolved = resolve(flags)
    file = tmp_path / "printed.yaml"
    file.write_text(render(resolved))
    assert resolve({}, {}, file).config == resolved.config
    assert "  kv_cache_memory: 4GB  # from --kv-cache-memory" in file.read_text().splitlines()
    assert "  port: 8000" in file.read_text().splitlines()


def test_secret_is_masked_and_the_mask_is_no_key(tmp_path):
    printed = render(resolve({}, {"MLX_PARALLM_API_KEY": "s3cret"}))
    assert "s3cret" not in printed
    assert set(yaml.safe_load(printed)["server"]["api_key"]) == {"*"}
    file = tmp_path / "printed.yaml"
    file.write_text(printed)
    with pytest.raises(ConfigError, match=r"server\.api_key: is the mask"):
        resolve({}, {}, file)
