"""A configuration file."""

from pathlib import Path

import pytest


@pytest.fixture
def yaml_file(tmp_path):
    def write(text: str) -> Path:
        file = tmp_path / "settings.yaml"
        file.write_text(text)
        return file

    return write
