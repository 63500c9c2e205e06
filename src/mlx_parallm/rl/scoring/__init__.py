"""Who gives rewards: scorers by name, run in a child process of their own.

    server's process                         child process
    ScoringService ── JSON lines over pipes ──▶ worker ──▶ registry ──▶ exact, math, a package's own, ...
    Catalogue (checks requests)  ◀── once a name ── describe

Light on purpose: the child imports this package, and neither MLX nor a BLAS.
"""

from mlx_parallm.rl.scoring.sample import Sample, Scorer

__all__ = ["Sample", "Scorer"]
