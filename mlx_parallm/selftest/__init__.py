"""`mlx_parallm doctor --self-test`: compares every path of the engine with a plain forward pass of mlx-lm.

models   which models are tested: two tiny random ones, and the bundled one or one that the user names
tested   one of them, loaded twice: in the engine that serves and trains, and as mlx-lm runs it alone
limits   how far two forward passes may differ by rounding, on this device and with this number format
checks   one file for each subject; a check asks the engine and the plain model the same, and compares
timings  how long the parts of the engine take
report   what is printed, and written to a file that can be attached to an issue
"""

import mlx_parallm.model  # noqa: F401  # before anything imports mlx-lm
