import os

import pytest

from mlx_parallm.adapters.files import AdapterRoots
from mlx_parallm.adapters.service import name_of_folder
from mlx_parallm.core.adapters import check_name, check_tag
from mlx_parallm.errors import InvalidRequestError


@pytest.mark.parametrize("name", ["a", "sql-v2", "A.b_c-9", "_x", "-x", "x" * 64, "checkpoint", "checkpoint-", "base2"])
def test_plain_names_pass(name):
    assert check_name(name) == name
    assert check_tag(name) == name


BAD = [
    "",
    ".",
    "..",
    ".x",
    "a/b",
    "../x",
    "/etc",
    "a\\b",
    "%2e%2e",
    "a\0",
    "a\n",
    "é",
    "a b",
    "a@1",
    "x" * 65,
    "~",
    "x" * 10**6,
]


@pytest.mark.parametrize("name", BAD)
def test_other_names_are_refused_and_shown_in_short_ascii(name):
    for check, param in ((lambda text: check_name(text, "model"), "model"), (check_tag, "tags")):
        with pytest.raises(InvalidRequestError) as caught:
            check(name)
        assert caught.value.param == param
        assert str(caught.value).isascii()
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize("name", ["base", "latest", "checkpoint-0", "checkpoint-120"])
def test_selectors_are_reserved(name):
    for check in (check_name, check_tag):
        with pytest.raises(InvalidRequestError, match="reserved"):
            check(name)


def test_best_is_a_tag_and_no_adapter():
    assert check_tag("best") == "best"
    with pytest.raises(InvalidRequestError, match="reserved"):
        check_name("best")


@pytest.fixture
def tree(tmp_path):
    """root/good is allowed; outside/ has a directory and a secret."""
    (tmp_path / "root" / "good").mkdir(parents=True)
    (tmp_path / "root" / "file").write_text("x")
    (tmp_path / "root2" / "other").mkdir(parents=True)
    (tmp_path / "outside" / "adapter").mkdir(parents=True)
    (tmp_path / "rootless").mkdir()
    (tmp_path / "root" / "out").symlink_to(tmp_path / "outside" / "adapter")
    (tmp_path / "root" / "gone").symlink_to(tmp_path / "outside" / "nothing")
    (tmp_path / "root" / "loop").symlink_to("loop")
    (tmp_path / "root" / "in").symlink_to("good")
    return tmp_path


def test_relative_and_absolute_paths_inside_a_root(tree):
    roots = AdapterRoots([tree / "root", tree / "root2"])
    good = tree.resolve() / "root" / "good"
    for path in (
        "good",
        "./good",
        "good/",
        "in",
        "good/../good",
        str(tree / "root" / "good"),
        str(tree / "root" / "in"),
    ):
        assert roots.resolve(path) == good
    assert roots.resolve("other") == tree.resolve() / "root2" / "other"
    assert roots.resolve(".") == tree.resolve() / "root"


def test_a_path_relative_to_the_working_directory_must_lead_into_a_root_too(tree, monkeypatch):
    monkeypatch.chdir(tree)
    roots = AdapterRoots([tree / "root"])
    assert roots.resolve("root/good") == tree.resolve() / "root" / "good"
    for path in ("outside/adapter", "root2/other", "root/out", "root/../outside/adapter"):
        with pytest.raises(InvalidRequestError, match="no directory inside the allowed roots"):
            roots.resolve(path)


def test_a_folder_whose_name_cannot_be_compared_is_not_given(tree, monkeypatch):
    """A root that cannot be listed may still hold it, but perhaps spelled otherwise."""
    roots = AdapterRoots([tree / "root"])

    def refused(folder):
        raise PermissionError(folder)

    monkeypatch.setattr("mlx_parallm.adapters.files.os.listdir", refused)
    with pytest.raises(InvalidRequestError, match="no directory inside the allowed roots"):
        roots.resolve("good")


@pytest.mark.parametrize("folder", ["tone", ".hidden", "a b/ä@1", "checkpoint", "base", "x" * 200, "n\nl"])
def test_a_folder_has_a_name_of_its_own(folder, tmp_path):
    name = name_of_folder(tmp_path / folder)
    assert check_name(name) == name
    assert name != name_of_folder(tmp_path / "other" / folder)


ESCAPES = ["../x", "../outside/adapter", "/", "/etc", "%2e%2e/outside/adapter", "out", "gone", "loop", "file", "a\0b"]
ESCAPES += ["", "~", "~/x", "../rootless", "good/../../outside", "x" * 5000, "a/" * 5000, "\ud800", "nowhere", "good\n"]


@pytest.mark.parametrize("path", ESCAPES)
def test_nothing_outside_a_root_is_given(path, tree):
    with pytest.raises(InvalidRequestError) as caught:
        AdapterRoots([tree / "root"]).resolve(path)
    assert caught.value.param == "lora_path"
    assert str(caught.value).isascii()


def test_the_error_does_not_say_what_exists_outside(tree):
    roots = AdapterRoots([tree / "root"])
    messages = set()
    for there in ("adapter", "absent!"):
        path = str(tree / "outside" / there)
        with pytest.raises(InvalidRequestError) as caught:
            roots.resolve(path)
        messages.add(str(caught.value).replace(path, "PATH"))
    assert len(messages) == 1


def test_inside_follows_symlinks(tree):
    roots = AdapterRoots([tree / "root"])
    assert roots.inside(tree / "root" / "in")
    assert roots.inside(tree / "root" / "file")
    assert not roots.inside(tree / "root" / "out")
    assert not roots.inside(tree / "rootless")
    assert not roots.inside(tree / "root" / ".." / "outside")
    assert not roots.inside(tree / "a\0b")


def test_a_relative_root_is_fixed_when_it_is_given(tree, monkeypatch):
    monkeypatch.chdir(tree)
    roots = AdapterRoots([type(tree)("root")])
    os.chdir(tree / "outside")
    assert roots.resolve("good") == (tree / "root" / "good").resolve()


def test_a_folder_is_found_by_its_exact_name_only(tmp_path, monkeypatch):
    """A pattern of names must not be passed by another case, where the file system ignores that."""
    (tmp_path / "sub" / "acme-1").mkdir(parents=True)
    roots = AdapterRoots([tmp_path])
    assert roots.resolve("sub/acme-1").name == "acme-1"
    for entries in (["Acme-1", "sub"], ["acme-1", "Sub"]):
        monkeypatch.setattr(os, "listdir", lambda folder, entries=entries: entries)
        with pytest.raises(InvalidRequestError, match="is no directory inside"):
            roots.resolve("sub/acme-1")
