"""The HTTP face: wire schemas in, `core.GenerationRequest` to the engine, events out as SSE or JSON.

    request → middlewares (Host/Origin, CORS, key) → body → wire model → place in the queue → adapter
            → prompt ids → engine.generate → answer → SSE events or one JSON body

Knows nothing of MLX. `app` builds the parts, calls `create_app`, and runs it with `serve`.
"""

from mlx_parallm.server.app import create_app
from mlx_parallm.server.lifecycle import Lifecycle
from mlx_parallm.server.no_training import NoTraining
from mlx_parallm.server.run import serve
from mlx_parallm.server.settings import ServerSettings

__all__ = ["Lifecycle", "NoTraining", "ServerSettings", "create_app", "serve"]
