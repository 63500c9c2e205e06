"""Several nodes that serve and train one model. NATS is imported by nodes only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlx_parallm.errors import ConfigError
from mlx_parallm.optional_packages import CLUSTER

if TYPE_CHECKING:
    from mlx_parallm.config import Config


def prepared(config: Config, trains: bool = False) -> Config:
    """The configuration with which a node loads its model, as the trainer of the cluster if it `trains`.

    Raises:
        ConfigError: NATS is not installed, or the process cannot take part; see `prepare` and `prepare_trainer`.
    """
    if not CLUSTER.installed:
        raise ConfigError(f"cluster: {CLUSTER.missing}")
    from mlx_parallm.extras.cluster.running.serving import prepare, prepare_trainer

    return prepare_trainer(config) if trains else prepare(config)
