"""Competition: two versions of an adapter in training, compared on what is asked of it."""
