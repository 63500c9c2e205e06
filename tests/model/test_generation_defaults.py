"""What is read of a model's generation_config.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlx_parallm.model.loading import GENERATION_CONFIG, generation_defaults


def test_known_options_are_read(tmp_path: Path) -> None:
    options = {
        "temperature": 0.6,
        "top_k": 20,
        "max_new_tokens": 2048,
        "do_sample": True,
        "eos_token_id": 2,
        "top_p": None,
    }
    (tmp_path / GENERATION_CONFIG).write_text(json.dumps(options))
    assert generation_defaults(tmp_path) == {"temperature": 0.6, "top_k": 20, "max_new_tokens": 2048}


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"temperature": "hot"}', '{"top_k": 1.5}', '{"top_p": 2}'])
def test_what_cannot_be_used_is_left_out(tmp_path: Path, text: str) -> None:
    (tmp_path / GENERATION_CONFIG).write_text(text)
    assert generation_defaults(tmp_path) == {}


def test_a_folder_without_the_file_has_none(tmp_path: Path) -> None:
    assert generation_defaults(tmp_path) == {}
