"""`python -m mlx_parallm`, the same as the command `mlx_parallm`."""

import sys

from mlx_parallm.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
