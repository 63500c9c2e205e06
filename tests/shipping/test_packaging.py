"""What is shipped beside the package: workflows, issue forms, the formula, container files, the citation."""

import hashlib
import importlib
import os
import re
import subprocess
import sys
from importlib.metadata import Distribution
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from mlx_parallm import __version__
from mlx_parallm.model.families import TRIED

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted(path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
DOCKERFILES = sorted((ROOT / "packaging/container").glob("Dockerfile.*"))
_PINNED = re.compile(r"uses: [\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")
_NAMED_PATH = re.compile(r"(?:scripts|benchmarks|packaging|\.ci)/[\w./-]+")


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_are_pinned_bounded_and_may_only_read(workflow: Path) -> None:
    text = workflow.read_text()
    content = yaml.safe_load(text)
    assert content["permissions"] == {"contents": "read"}
    assert all(job["timeout-minutes"] <= 90 and "permissions" not in job for job in content["jobs"].values())
    used = re.findall(r"uses: .*", text)
    assert used
    assert [line for line in used if not _PINNED.fullmatch(line)] == []
    assert text.count("persist-credentials: false") == text.count("actions/checkout@")


@pytest.mark.parametrize("file", [*WORKFLOWS, *DOCKERFILES], ids=lambda path: path.name)
def test_what_they_run_exists(file: Path) -> None:
    assert [name for name in _NAMED_PATH.findall(file.read_text()) if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.name)
def test_issue_forms_have_what_github_needs(form: Path) -> None:
    content = yaml.safe_load(form.read_text())
    assert {"name", "description", "body"} <= content.keys()
    ids = [part["id"] for part in content["body"]]
    assert len(ids) == len(set(ids))
    assert all(part["type"] in ("input", "textarea") and part["attributes"]["label"] for part in content["body"])


def test_the_citation_has_the_packages_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__
    assert citation["authors"]


# -- the formula ---------------------------------------------------------------------------------


def rendered(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "packaging/homebrew/render"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)


def test_the_formula_of_a_tag(tmp_path: Path) -> None:
    archive = tmp_path / "v0.1.0.tar.gz"
    archive.write_bytes(b"the archive of a tag")
    done = rendered("https://example.org/team/name.git", "v0.1.0", "--archive", str(archive))
    assert done.returncode == 0, done.stderr
    assert 'url "https://example.org/team/name/archive/refs/tags/v0.1.0.tar.gz"' in done.stdout
    assert f'sha256 "{hashlib.sha256(b"the archive of a tag").hexdigest()}"' in done.stdout
    assert "@" not in re.sub(r"python@3\.\d+", "", done.stdout), "a place of the template was not filled"


def test_a_tag_that_is_no_version(tmp_path: Path) -> None:
    done = rendered("https://example.org/team/name", "main")
    assert done.returncode == 1
    assert "a tag of a version looks like v0.1.0" in done.stderr


# -- containers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_images_are_pinned_and_run_as_a_plain_user(dockerfile: Path) -> None:
    lines = dockerfile.read_text().splitlines()
    images = [line.split()[1] for line in lines if line.startswith("FROM ")]
    images += re.findall(r"--from=(\S+/\S+)", dockerfile.read_text())
    assert all(re.search(r":\d", image) for image in images), images
    assert lines.index("USER 10001") < next(n for n, line in enumerate(lines) if line.startswith("CMD "))


def test_the_ends_of_the_ranges_are_what_was_tried() -> None:
    """The oldest versions are those that pyproject.toml allows, and the newest those of the lock."""
    allowed, locked = (ROOT / "pyproject.toml").read_text(), (ROOT / "requirements.lock").read_text()
    for name, (oldest, newest) in TRIED.items():
        (lower,) = set(re.findall(rf'"{name}(?:\[\w+\])?>=([\d.]+)', allowed))
        assert oldest in (lower, f"{lower}.0")
        assert f"\n{name}=={newest} " in locked


# -- licences ------------------------------------------------------------------------------------


@pytest.fixture
def licences(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("licences")


def test_licences_of_what_the_package_and_its_extras_need(licences: ModuleType) -> None:
    found = {each.name: licences.licence(each) for each in licences.needed("mlx-parallm")}
    assert {"mlx-lm", "fastapi", "pyarrow", "nats-py"} <= found.keys(), "of the package, and of extras"
    assert "pytest" not in found
    assert {name: text for name, text in found.items() if not licences.allowed(text)} == {}


@pytest.mark.parametrize(
    ("metadata", "text", "allowed"),
    [
        ("License-Expression: MIT AND (Apache-2.0 OR BSD-2-Clause)", "MIT AND (Apache-2.0 OR BSD-2-Clause)", True),
        ("License-Expression: MIT OR GPL-3.0-only", "MIT OR GPL-3.0-only", False),
        ("Classifier: License :: OSI Approved :: BSD License\nLicense: see the file", "BSD-3-Clause", True),
        ("License: Apache License, Version 2.0\nHome-page: x", "Apache-2.0", True),
        ("Classifier: License :: OSI Approved :: GNU General Public License v3 (GPLv3)", None, False),
        (
            "Classifier: License :: OSI Approved :: MIT License\nClassifier: License :: Other/Proprietary License",
            None,
            False,
        ),
        ("Home-page: x", "unknown", False),
    ],
)
def test_what_a_package_says_of_its_licence(
    licences: ModuleType, tmp_path: Path, metadata: str, text: str | None, allowed: bool
) -> None:
    folder = tmp_path / "other-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.4\nName: other\nVersion: 1.0\n{metadata}\n")
    found = licences.licence(Distribution.at(folder))
    assert licences.allowed(found) == allowed
    assert text in (found, None)


# -- releases ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (
            '{"dependencies": [{"name": "a", "version": "1", "vulns": [{"id": "PYSEC-1"}]}]}',
            "known vulnerabilities:\na: PYSEC-1",
        ),
        (
            '{"dependencies": [{"name": "a", "skip_reason": "not found"}]}',
            "advisories of 1 of 1 packages could not be read",
        ),
        ("", "pip-audit gave no result; --unaudited makes a release without it"),
    ],
)
def test_a_release_needs_a_good_audit(tmp_path: Path, found: str, message: str) -> None:
    """With a stand-in for uvx, which says this of pip-audit."""
    uvx = tmp_path / "uvx"
    uvx.write_text(f"#!/bin/sh\ncat <<'EOF'\n{found}\nEOF\n")
    uvx.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [sys.executable, str(ROOT / "scripts/release")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert message in done.stderr
