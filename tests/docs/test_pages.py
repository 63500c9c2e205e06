"""README.md and docs/ name only what exists: pages, headings, files, flags, settings; and say what is not run."""

import argparse
import re
from collections.abc import Iterator
from pathlib import PurePosixPath

import pytest
import yaml
from docs.pages import PAGES, ROOT, anchors_of, blocks_of, lines_of, links_of, spans_of

from mlx_parallm.cli.main import main_parser, serve, serve_parser, train_parser
from mlx_parallm.cli.parser import all_parsers
from mlx_parallm.config import KEYS

MOST_README_BYTES = 8000
LANGUAGES = {"sh", "python", "yaml", "toml", "json", "text"}
_ROOTS = "mlx_parallm|tests|benchmarks|examples|docs|scripts"
_PATH = re.compile(rf"(?:{_ROOTS})/[\w./-]*|\.ci/\w+|server_config\.yaml|pyproject\.toml|mkdocs\.yml|\w+\.(?:lock|md)")
_FLAG = re.compile(r"--[a-z][a-z_.-]*[a-z]")
_SETTING = re.compile(r"(?:server|model|adapters|rl_training|inference|checkpointing|debug)\.(?!py$)[a-z_.]+")
_NAME = re.compile(r"(?:[A-Z][a-z]+){2,}|[A-Z]+(?:_[A-Z]+)*|[A-Z]{2,}[A-Z]?[a-z]\w+")
_OTHER_FLAGS = {
    *("--group", "--extra", "--dataset", "--tokenizer", "--book-url", "--api", "--base-url", "--lora", "--local-dir"),
    *("--backend", "--data-loader", "--constraint"),
    *(
        "--quick",
        "--repeats",
        "--against",
        "--beside",
        "--only",
        "--minutes",
        "--control-minutes",
        "--seeds",
        "--record-counts",
        "--runs",
        "--hybrid",
    ),
    *("--survivors", "--user", "--enable", "--now", "--gpus", "--from", "--with", "--find-links"),
    *("--enable-lora", "--no-enable-overlap-scheduler"),
}
"""Of other programs, and of the benchmarks."""


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_bytes()) <= MOST_README_BYTES


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    missing = [f"{place}: {target}" for place, target in links_of(page) if not _leads_somewhere(page, target)]
    assert not missing


def _leads_somewhere(page: str, target: str) -> bool:
    if target.startswith("https://"):
        return True
    name, _, anchor = target.partition("#")
    linked = str(PurePosixPath(page).parent / name) if name else page
    if not (ROOT / linked).is_file():
        return False
    inside = linked in PAGES or linked.startswith("docs/images/")
    return (inside or not page.startswith("docs/")) and (not anchor or anchor in anchors_of(linked))


def test_every_page_is_in_the_navigation() -> None:
    _, _, navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")
    named = set(_pages_in(yaml.safe_load(navigation)))
    assert named == {page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")}


def _pages_in(navigation: object) -> list[str]:
    if isinstance(navigation, str):
        return [navigation]
    parts = navigation.values() if isinstance(navigation, dict) else navigation
    return [page for part in parts for page in _pages_in(part)]


@pytest.mark.parametrize("page", PAGES)
def test_paths_exist(page: str) -> None:
    missing = [
        f"{place}: {text}"
        for place, text in spans_of(page)
        if _PATH.fullmatch(text) and not (ROOT / text).exists() and not (ROOT / "docs" / text).exists()
    ]
    assert not missing


@pytest.fixture(scope="module")
def flags() -> set[str]:
    """Those of our three programs and all their commands."""
    return {flag for make in (serve_parser, train_parser, main_parser) for flag in flags_of(all_parsers(make()))}


def flags_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from flags_of(command)


@pytest.mark.parametrize("page", PAGES)
def test_flags_exist(page: str, flags: set[str]) -> None:
    known = flags | _OTHER_FLAGS
    missing = [
        f"{place}: {text}" for place, text in spans_of(page) for flag in _FLAG.findall(text) if flag not in known
    ]
    assert not missing


@pytest.mark.parametrize("page", PAGES)
def test_settings_exist(page: str) -> None:
    known = {".".join(path.split(".")[:depth]) for path in KEYS for depth in range(1, 5)}
    missing = [f"{place}: {text}" for place, text in spans_of(page) if _SETTING.fullmatch(text) and text not in known]
    assert not missing


@pytest.fixture(scope="module")
def words_of_sources() -> frozenset[str]:
    """Every word of the package and the tests."""
    files = [path for folder in ("mlx_parallm", "tests") for path in (ROOT / folder).rglob("*.py")]
    return frozenset(word for path in files for word in re.findall(r"\w+", path.read_text()))


@pytest.mark.parametrize("page", PAGES)
def test_names_exist(page: str, words_of_sources: frozenset[str]) -> None:
    """Names of classes and constants occur in the package, the tests or a program of the page."""
    known = words_of_sources.union(*(re.findall(r"\w+", block.text) for block in blocks_of(page)))
    missing = [f"{place}: {text}" for place, text in spans_of(page) if _NAME.fullmatch(text) and text not in known]
    assert not missing


@pytest.mark.parametrize("page", PAGES)
def test_blocks_are_marked(page: str) -> None:
    """A block's language is one that the tests know, and one that is not run or slow says why."""
    for block in blocks_of(page):
        assert block.language in LANGUAGES, block
        assert block.detail or block.note not in ("not run", "slow"), block


def test_blocks_that_are_not_run() -> None:
    """They are few, and each of them is a block of commands. `pytest -rA` shows the list."""
    skipped = [block for page in PAGES for block in blocks_of(page) if block.note == "not run"]
    for block in skipped:
        print(f"{block}: not run: {block.detail}")
    assert all(block.language in ("sh", "python", "yaml") for block in skipped)
    comments = [line for page in PAGES for line in lines_of(page) if line.startswith("<!-- not run")]
    assert len(comments) == len(skipped), "a comment is not on the line before its block"


@pytest.mark.parametrize("page", PAGES)
def test_configurations_are_valid(
    page: str, tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for block in blocks_of(page):
        if block.language == "yaml" and block.note != "not run" and "--8<--" not in block.text:
            (tmp_path / "settings.yaml").write_text(block.text)
            status = serve(["--config", "settings.yaml", "--print-config"])
            assert status == 0, f"{block}: {capsys.readouterr().err}"
