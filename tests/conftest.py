"""Runs before any test module can import MLX. Timing decides no test: hypothesis sets no deadline."""

import os
import sys
import tempfile
from pathlib import Path

# More threads than cores would wait for each other, and a number that follows the load would change last bits. The
# servers that tests start inherit this, which is read when the BLAS is loaded.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # not what the process set that started it, see below
else:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", str(os.cpu_count()))

# Some hundred processes would compile all that they import, if nobody may write bytecode beside the sources.
if sys.dont_write_bytecode:
    sys.dont_write_bytecode = False
    sys.pycache_prefix = str(Path(tempfile.gettempdir()) / f"mlx_parallm-bytecode-{os.getuid()}")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix

from collecting import pytest_collection, pytest_configure  # noqa: F401
from hypothesis import settings

import mlx_parallm  # noqa: F401

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# Verdicts about models are not kept for the user who runs the tests; what others keep is.
_caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
os.environ.setdefault("UV_CACHE_DIR", str(_caches / "uv"))
os.environ.setdefault("HF_HOME", str(_caches / "huggingface"))
os.environ["XDG_CACHE_HOME"] = str(Path(tempfile.gettempdir()) / f"mlx_parallm-cache-{os.getpid()}")
