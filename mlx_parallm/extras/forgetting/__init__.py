"""Forgetting: an adapter is built anew without some of what it has learnt from, and that is removed.

ForgetSpec ─▶ find ─▶ Forgotten ─▶ RebuildPlan ─▶ rebuild ─▶ the policy, live ─▶ remove
what to forget        trajectories  from where     update by update               checkpoints, log, caches
"""
