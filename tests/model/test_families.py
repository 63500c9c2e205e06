import pytest
from tiny import FAMILIES, build_model, tiny_config, tiny_model

from mlx_parallm.model.families import family_of


@pytest.mark.parametrize("family", FAMILIES)
def test_families_of_the_tests_are_known(family):
    assert family_of(tiny_model(family)).tested


def test_another_architecture_is_not_tested():
    assert not family_of(build_model({**tiny_config("qwen3"), "model_type": "olmo2"})).tested


def test_only_mlx_lms_own_file_of_that_name_is_tested(monkeypatch):
    model = tiny_model("llama")
    monkeypatch.setattr(type(model), "__module__", "custom_model.llama")
    assert not family_of(model).tested
