"""Random JSON, and bodies with random fields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from mlx_parallm.server.api.fields import WireInput

Body = dict[str, Any]

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-2, 3),
    st.floats(),
    st.text(st.characters(exclude_categories=()), max_size=8),
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)
fuzzed = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


def bodies(model: type[WireInput], base: Body) -> st.SearchStrategy[Body]:
    """`base` with up to four random fields: those that `model` knows, and one that it does not."""
    names = [*model.model_fields, *model.IGNORED, *model.NEUTRAL, "x"]
    return st.dictionaries(st.sampled_from(names), values, max_size=4).map(lambda fields: {**base, **fields})


def objects(names: Sequence[str], words: Sequence[str] = ()) -> st.SearchStrategy[Body]:
    """Objects with some of these names. `words`: values that mean something there."""
    return st.dictionaries(st.sampled_from(names), values | st.sampled_from([*words, "x"]), max_size=5)
