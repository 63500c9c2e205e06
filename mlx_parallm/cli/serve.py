"""The serve command."""

from __future__ import annotations

import argparse
import gc
import os

from mlx_parallm.cli.flags import flags_of, settings
from mlx_parallm.cli.parser import takes
from mlx_parallm.config import SERVE, render, resolve
from mlx_parallm.extras_table import needed


@takes(flags_of(SERVE))
def serve(args: argparse.Namespace) -> int:
    """Serves until a signal, as the flags say.

    Raises:
        ConfigError: a setting cannot be used.
        ParaLLMError: see `app.serve.run`.
    """
    resolved = resolve(settings(args), os.environ, args.config)
    if args.print_config:
        print(render(resolved), end="")
        return 0
    if resolved.config.server.supervise and not needed("supervise", "--supervise").is_child():
        status: int = needed("supervise.parent", "--supervise").supervise(resolved.config)
        return status
    gc.disable()  # a tenth of the time of these imports would go into looking for garbage
    from mlx_parallm.app.serve import run

    gc.enable()
    return run(resolved.config)
