"""`Backend`: the parts that an HTTP server is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlx_parallm.config import ServerConfig

if TYPE_CHECKING:
    from mlx_parallm.core.adapters import AdapterClient
    from mlx_parallm.core.engine import EngineClient
    from mlx_parallm.core.models import BaseModels
    from mlx_parallm.core.trajectories import CollectingClient
    from mlx_parallm.extras.cluster.http.parts import ClusterParts
    from mlx_parallm.rl.service import TrainingService


@dataclass(frozen=True)
class Backend:
    """The parts that an HTTP server is made of. `app` builds them.

    Attributes:
        engine: answers requests.
        training: None if the server does not train.
        cluster: None if it is not a node of a cluster; see `extras.cluster.http.parts.join`.
    """

    engine: EngineClient
    adapters: AdapterClient
    models: BaseModels
    config: ServerConfig
    training: TrainingService | None = None
    cluster: ClusterParts | None = None

    @property
    def collection(self) -> CollectingClient | None:
        """Where requests to be collected and their rewards go; None if nothing trains."""
        if self.cluster is not None:
            return self.cluster.collection
        return None if self.training is None else self.training.trajectories

    def extra(self, name: str) -> Any:
        """What an extra of training offers to requests (see `extras_table`); None if the extra is not there, or the
        server does not train."""
        return None if self.training is None else self.training.extras.get(name)
