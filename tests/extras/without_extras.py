"""A server of a tiny model that answers and makes an update while a package cannot be imported.

python without_extras.py FOLDER PACKAGE
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType


class Blocked(MetaPathFinder):
    """Refuses a package, and all that is below it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if fullname == self._name or fullname.startswith(f"{self._name}."):
            raise ModuleNotFoundError(f"{fullname} is blocked", name=fullname)


async def served(folder: Path) -> None:
    import mlx_parallm  # noqa: F401, I001  # before the tests import MLX
    from app.test_server import MARKED, make, serving

    async with serving(make(folder)) as client:
        answer = (await client.post("/v1/completions", json=MARKED)).raise_for_status().json()
        for at, trajectory in enumerate(answer["trajectory_ids"]):
            body = {"trajectory_id": trajectory, "score": float(at)}
            (await client.post("/v1/training/feedback", json=body)).raise_for_status()
        while not (await client.get("/v1/training/status")).json()["updates_total"]:
            await asyncio.sleep(0.02)
        for path in ("/v1/adapters", "/v1/stats", "/metrics", "/openapi.json"):
            (await client.get(path)).raise_for_status()
        deleted = {"lora_name": "nobody", "dry_run": True}
        assert (await client.post("/v1/adapters/delete", json=deleted)).status_code == 404


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    sys.meta_path.insert(0, Blocked(sys.argv[2]))
    asyncio.run(served(Path(sys.argv[1])))
    print("served and trained without", sys.argv[2])
