"""What is refused with a model over several machines."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_parallm.config import resolve
from mlx_parallm.config.sources import Setting
from mlx_parallm.errors import ConfigError
from mlx_parallm.extras.ranks.running import check_splittable


@pytest.mark.parametrize(
    ("setting", "value"),
    [("server.supervise", True), ("server.kv_bits", 8), ("server.prefix_cache_dir", "cached")],
)
def test_a_setting_that_does_not_work_is_named(setting: str, value: Any) -> None:
    config = resolve({setting: Setting(value, "test")}).config
    with pytest.raises(ConfigError, match=f"^{setting}: .* with a model over several machines"):
        check_splittable(config)
