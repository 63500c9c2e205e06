"""A package of its own, because `benchmarks/cluster.py` has the same name."""
