"""Atropos: groups of its environments, taken from its trajectory API, or from environments that use this server's."""
