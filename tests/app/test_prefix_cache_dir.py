"""`--prefix-cache-dir` from the configuration to the answers of a server that starts again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from app.engines import answer, engine
from tiny import save_tiny

from mlx_parallm.errors import ConfigError

PROMPT = tuple(i * i % 251 for i in range(300))


async def asked(folder: Path, files: int) -> tuple[list[int], int]:
    """Starts a server, asks it, and stops it when so many files are on the disk. Returns the answer's tokens and the
    cached tokens."""
    served = engine(folder / "model", server__prefix_cache_dir=folder / "prefixes")
    served.start()
    try:
        tokens, finished = await answer(served, PROMPT)
        while len(list((folder / "prefixes").glob("*.kv"))) < files:
            await asyncio.sleep(0.01)
    finally:
        served.stop()
    return tokens, finished.cached_tokens


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("family", "files"), [("llama", 4), ("lfm2", 5)])
async def test_a_server_that_starts_again_has_what_the_last_one_computed(
    family: str, files: int, tmp_path: Path
) -> None:
    """The four full blocks of the prompt, and the state after them if there are recurrent layers."""
    save_tiny(family, tmp_path / "model")
    first, again = await asked(tmp_path, files), await asked(tmp_path, files)
    assert (first[1], again[1]) == (0, 256)
    assert first[0] == again[0]


def test_a_folder_without_a_prefix_cache_is_refused(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "model")
    folder = tmp_path / "prefixes"
    served = engine(tmp_path / "model", server__prefix_cache=False, server__prefix_cache_dir=folder)
    with pytest.raises(ConfigError, match="--prefix-cache-dir"):
        served.start()
