"""Every command and program of README.md and docs/ does what its page says.

The fast tests share one server, and check the flags of lines that start others. The slow ones start each server as
its page does, and run slow blocks: `pytest tests/docs -m slow`.
"""

import re
from collections.abc import Iterator

import pytest
from docs.following import Reader
from docs.pages import PAGES, blocks_of, spans_of, table_of

from mlx_parallm.cli.chat import HELP
from mlx_parallm.server.app import openapi_document

pytestmark = pytest.mark.ci

RUN = [page for page in PAGES if any(b.language in ("sh", "python") and b.note != "not run" for b in blocks_of(page))]
METRICS_HEADER = "| what | metrics, after `mlx_parallm_` |"
_ROUTE = re.compile(r"(?:GET |POST |DELETE )?(/[a-z][\w/-]*)(?:\?.*)?")
_NAME = re.compile(r"`([a-z0-9_]+)`")


@pytest.fixture(scope="session")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    made = Reader(tmp_path_factory.mktemp("pages"), shared=True)
    yield made
    made.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", RUN)
def test_page(page: str, reader: Reader) -> None:
    reader.follow(page)


def test_routes_exist() -> None:
    known = {*openapi_document()["paths"], "/docs", "/openapi.json", *re.findall(r"/\w+", HELP)}
    named = {(place, match[1]) for page in PAGES for place, text in spans_of(page) if (match := _ROUTE.fullmatch(text))}
    missing = [f"{place}: {route}" for place, route in sorted(named) if route not in known]
    assert not missing


@pytest.mark.timeout(600)
def test_metrics_exist(reader: Reader) -> None:
    """Those of the table; counters end with _total there."""
    served = reader.get("/metrics").text
    named = {name for _, names in table_of("docs/operating.md", METRICS_HEADER) for name in _NAME.findall(names)}
    assert named <= {*re.findall(r"^# TYPE mlx_parallm_(\w+?)(?:_total)? ", served, re.MULTILINE)}


@pytest.fixture(scope="module")
def patient_reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    made = Reader(tmp_path_factory.mktemp("pages"), shared=False)
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", RUN)
def test_page_as_written(page: str, patient_reader: Reader) -> None:
    patient_reader.follow(page)
