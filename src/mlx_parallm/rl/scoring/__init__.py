"""Who gives rewards: scorers by name, run in child processes.

    server's process                          child processes
    ScoringService ─ Pool ── JSON lines over pipes ──▶ worker ──▶ registry ──▶ exact, math, a package's own, ...
       └── Checks ─── Pool ── what a request brings ──▶ worker
             └── Catalogue  ◀── once a name ── describe

Light on purpose: the child imports this package, and neither MLX nor a BLAS.
"""

from mlx_parallm.rl.scoring.sample import Sample, Scorer

__all__ = ["Sample", "Scorer"]
