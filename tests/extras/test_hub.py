"""Adapters on the hub, of which there is a stand-in on this machine; `huggingface_hub` asks it as it asks the hub."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub import TOKEN, Hub, serving_hub
from lora import layout_of, random_adapter
from tiny import save_tiny

from mlx_parallm.adapters.files import read_adapter
from mlx_parallm.adapters.formats import write_peft
from mlx_parallm.cli.main import main
from mlx_parallm.errors import ConflictError, InvalidRequestError
from mlx_parallm.extras import hub as extra
from mlx_parallm.extras.hub import AllowedAdapters

ADAPTER = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"x" * 10}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    monkeypatch.setattr(extra, "FOLDER", tmp_path / "downloads")
    with serving_hub(monkeypatch) as served:
        yield served


# -- push ------------------------------------------------------------------------------------------


def export(tmp_path: Path, *arguments: str) -> int:
    model = save_tiny("llama", tmp_path / "model") if not (tmp_path / "model").exists() else None
    if model is not None:
        write_peft(tmp_path / "adapter", random_adapter(layout_of(model), 1), layout_of(model), None)
    return main(["adapters", "export", str(tmp_path / "adapter"), "--model-path", str(tmp_path / "model"), *arguments])


@pytest.mark.parametrize("form", ["peft", "mlx", "fused", "gguf"])
def test_an_export_is_pushed_with_a_card(
    form: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert export(tmp_path, "--to", form, "--push", "me/tone", "--base-name", "org/base") == 0
    assert f"pushed to {hub.url}/me/tone/commit/" in capsys.readouterr().out
    repository = hub.repositories["me/tone"]
    assert repository.private
    assert len(repository.commits) == 1
    expected = {"peft": "adapter_model.safetensors", "mlx": "adapters.safetensors", "gguf": "adapter.gguf"}
    assert {expected.get(form, "model.safetensors"), "README.md"} <= repository.files.keys()
    card = repository.files["README.md"].decode()
    assert "base_model: org/base\n" in card
    assert f"base_model_relation: {'finetune' if form == 'fused' else 'adapter'}\n" in card
    assert f"library_name: {extra.LIBRARIES[form]}\n" in card
    assert not any(str(tmp_path).encode() in content for content in repository.files.values())


def test_what_a_repository_has_stays(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its visibility, its card, and the files of another export."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.with_files("me/tone", {"README.md": b"mine", "adapter.gguf": b"theirs"})
    base = ("--base-name", "org/base")
    assert export(tmp_path, "--to", "peft", "--push", "me/tone", "--out", str(tmp_path / "out"), *base) == 0
    assert hub.repositories["me/tone"].files["README.md"] == b"mine"
    assert hub.repositories["me/tone"].files["adapter.gguf"] == b"theirs"
    assert not hub.repositories["me/tone"].private
    for path in (tmp_path / "out").iterdir():
        assert hub.repositories["me/tone"].files[path.name] == path.read_bytes()


def test_a_new_repository_is_public_if_that_is_asked_for(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert export(tmp_path, "--to", "peft", "--push", "me/tone", "--public", "--base-name", "org/base") == 0
    assert not hub.repositories["me/tone"].private


def test_without_a_token_the_error_says_how_to_get_one(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(tmp_path, "--to", "peft", "--push", "me/tone", "--base-name", "org/base") == 1
    assert "--push me/tone: " in (error := capsys.readouterr().err)
    assert "`hf auth login`" in error
    assert not hub.repositories


@pytest.mark.parametrize(("arguments", "words"), [
    (("--push", "me/tone"), "--push: say with --base-name"),
    ((), "--out: name the folder"),
    (("--out", "x", "--public"), "--public: without --push"),
])  # fmt: skip
def test_arguments_that_do_not_fit_are_refused_before_anything_is_sent(
    arguments: tuple[str, ...], words: str, hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(tmp_path, "--to", "peft", *arguments) == 2
    assert words in capsys.readouterr().err
    assert not hub.asked


# -- download --------------------------------------------------------------------------------------


def test_only_what_an_adapter_needs_is_downloaded(hub: Hub) -> None:
    files = {**ADAPTER, "adapter_model.bin": b"pickle", "run.py": b"code", "sub/adapter_config.json": b"sub"}
    old = hub.with_files("org/tone", {**files, "adapter_config.json": b"old"}, "v1")
    hub.with_files("org/tone", files)
    allowed = AllowedAdapters(["org/*"])
    folder = allowed.download("org/tone")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == ADAPTER
    assert (allowed.download("org/tone@v1") / "adapter_config.json").read_bytes() == b"old"
    assert (allowed.download(f"org/tone@{old}") / "adapter_config.json").read_bytes() == b"old"
    below = allowed.download("org/tone/sub")
    assert {path.name: path.read_bytes() for path in below.iterdir()} == {"adapter_config.json": b"sub"}
    assert not [asked for asked in hub.asked if "bin" in asked or "run.py" in asked]


def test_ids_are_allowed_by_patterns() -> None:
    allowed = AllowedAdapters(["org/*", "you/one", "you/*@v1"])
    for text in ("org/tone", "org/tone/sub", "you/one", "you/two@v1"):
        assert allowed.has(text)
    for text in ("org/tone@v1", "org/tone@refs/pr/1", "you/one@v2", "you/two",
                 "you/one/sub", "org", "/org/tone", "org/../tone", "org/tone/..", "org//tone", "org/tone@",
                 "org/tone\n", "http://org/tone"):  # fmt: skip
        assert not allowed.has(text)
    assert not AllowedAdapters([]).has("org/tone")


def test_one_that_is_too_large_is_not_downloaded(hub: Hub) -> None:
    hub.with_files("org/tone", ADAPTER)
    hub.sizes["adapter_model.safetensors"] = 2**33
    with pytest.raises(InvalidRequestError, match=r"org/tone.*has 8\.0 GiB, more than 4\.0 GiB"):
        AllowedAdapters(["*"]).download("org/tone")
    assert not [asked for asked in hub.asked if "/resolve/" in asked and asked.startswith("GET")]


def test_without_the_hub_the_last_download_is_used(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.with_files("org/tone", ADAPTER)
    allowed = AllowedAdapters(["*"])
    folder = allowed.download("org/tone")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    count = len(hub.asked)
    assert allowed.download("org/tone") == folder
    assert len(hub.asked) == count
    with pytest.raises(
        InvalidRequestError, match=r"the adapter 'org/other' of the hub cannot be loaded: .*HF_HUB_OFFLINE"
    ):
        allowed.download("org/other")


@pytest.mark.parametrize(("text", "words"), [
    ("org/none", "there is no such repository"),
    ("org/secret", "the token may not read it"),
    ("org/tone@none", "no such revision"),
    ("org/other", "it has no adapter_config.json"),
])  # fmt: skip
def test_what_is_not_there_is_an_error_of_the_request(text: str, words: str, hub: Hub) -> None:
    hub.with_files("org/tone", ADAPTER)
    hub.with_files("org/other", {"model.bin": b"x"})
    hub.with_files("org/secret", ADAPTER, private=True)
    with pytest.raises(InvalidRequestError, match=f"the adapter '{text}' of the hub cannot be loaded: .*{words}"):
        AllowedAdapters(["*"]).download(text)


def test_what_is_gone_is_not_served_from_the_last_download(hub: Hub) -> None:
    hub.with_files("org/tone", ADAPTER)
    allowed = AllowedAdapters(["*"])
    allowed.download("org/tone")
    del hub.repositories["org/tone"]
    with pytest.raises(InvalidRequestError, match="there is no such repository"):
        allowed.download("org/tone")


def test_one_at_a_time(hub: Hub) -> None:
    hub.with_files("org/tone", ADAPTER)
    allowed, errors = AllowedAdapters(["*"]), []

    def another() -> None:
        hub.before = lambda: None
        try:
            allowed.download("org/tone")
        except ConflictError as error:
            errors.append(error)

    hub.before = another
    assert allowed.download("org/tone").is_dir()
    assert len(errors) == 1


def test_an_adapter_there_and_back(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert export(tmp_path, "--to", "peft", "--push", "me/tone", "--base-name", "org/base") == 0
    folder = AllowedAdapters(["me/*"]).download("me/tone")
    layout = layout_of(save_tiny("llama", tmp_path / "again"))
    want = read_adapter(tmp_path / "adapter", layout, 16).weights
    got = read_adapter(folder, layout, 16).weights
    assert all((got.pairs[path].a == pair.a).all() for path, pair in want.pairs.items())
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == "org/base"
