"""Adapters on disk: mlx-lm's and PEFT's formats, read with suspicion and written whole. NumPy only, any thread."""

from mlx_parallm.adapters.files.read import AdapterFile, read_adapter
from mlx_parallm.adapters.files.write import write_mlx_lm, write_peft

__all__ = ["AdapterFile", "read_adapter", "write_mlx_lm", "write_peft"]
