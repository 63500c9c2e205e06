"""How much one key may hold of what is bounded for all keys together."""

PLACES_FOR_EACH_FREE = 4
"""How many places one key may hold for each that stays free: a key alone holds at most four fifths."""


def has_room(limit: int, held: int, own: int | None, wanted: int = 1) -> bool:
    """Whether a key may hold `wanted` more of what all keys share. However many keys flood the server, some of it is
    left for the next one. (These are the dynamic thresholds of Choudhury and Hahne, 1998.)

    Args:
        limit: of all keys together.
        held: by all keys now.
        own: what the key holds of that; None if the server may have no other key, so that nothing is left for others.
    """
    free = limit - held - wanted
    return free >= 0 and (own is None or own + wanted <= max(1, PLACES_FOR_EACH_FREE * free))
