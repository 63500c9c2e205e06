"""One model over several processes, which `mlx.launch` has started."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlx_parallm.config import Config
    from mlx_parallm.extras.ranks.joining import Ranks


def joined(config: Config) -> Ranks | None:
    """The processes among which the model is split; None: there is this one only.

    Raises:
        ConfigError: the configuration asks for what a split model cannot do.
    """
    from mlx_parallm.extras.ranks.joining import join
    from mlx_parallm.extras.ranks.running import check_splittable

    ranks = join()
    if ranks is not None:
        check_splittable(config)
    return ranks
