"""`--speculation` and `--draft-model` from the configuration to the answers of a server."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from app.engines import answer, engine
from harness import FixedCost
from heads import head_config, save_with_head
from lora import layout_of, random_adapter
from tiny import save_tiny, tiny_model

from mlx_parallm.adapters.formats import write_peft
from mlx_parallm.app.build import RunningEngine
from mlx_parallm.engine.figures import EngineStats
from mlx_parallm.errors import ConfigError, UnsupportedModelError
from mlx_parallm.kv.device_memory import MemoryAccount

PROMPT = tuple(i * i % 251 for i in range(80))
REPEATED = (5, 6, 7, 8) * 20
"""A prompt whose continuation is guessed where guessing is possible."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, a smaller one with the same vocabulary, and an adapter."""
    folder = tmp_path_factory.mktemp("models")
    save_tiny("llama", folder / "model")
    save_tiny("llama", folder / "small", num_hidden_layers=1)
    layout = layout_of(tiny_model("llama"))
    write_peft(folder / "adapters" / "a", random_adapter(layout, seed=1, size=0.03), layout, None)
    return folder


def drafting(folder: Path, speculation: str, draft: str | None = None, **keys: object) -> RunningEngine:
    keys.setdefault("adapters__adapter_dir", folder / "adapters")
    return engine(folder / "model", server__speculation=speculation, model__draft_model=draft, **keys)


@pytest.fixture(autouse=True)
def passes_that_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The times of the models are not measured: passes of the draft model take a tenth."""
    monkeypatch.setattr("mlx_parallm.app.base_model.calibrate_steps", lambda *_: FixedCost(0.01, 1e-4, 1e-8))
    monkeypatch.setattr("mlx_parallm.engine.draft_loading.calibrate_steps", lambda *_: FixedCost(0.001, 1e-5, 1e-9))


async def guessed(drafting: RunningEngine, adapter: str | None = None) -> tuple[list[int], EngineStats]:
    """The tokens of an answer, and what the engine has counted."""
    served = drafting.start()
    try:
        pin = None if adapter is None else served.adapters.find(adapter).ref
        tokens, _ = await answer(drafting, PROMPT, 40, pin)
        while drafting.processor.stats().generation_tokens_total < len(tokens):
            await asyncio.sleep(0.01)
        return tokens, drafting.processor.stats()
    finally:
        drafting.stop()


async def test_a_draft_model_guesses_for_the_base_model(folder: Path) -> None:
    expected, without = await guessed(drafting(folder, "off"))
    got, stats = await guessed(drafting(folder, "draft", str(folder / "small")))
    assert got == expected
    assert stats.draft_tokens_total > 0 == without.draft_tokens_total
    assert stats.memory_bytes[MemoryAccount.DRAFT_MODEL] > 100_000, "its weights, at least"
    _, itself = await guessed(drafting(folder, "draft", str(folder / "model")))
    assert itself.accepted_draft_tokens_total == itself.draft_tokens_total > 20, "with all layers it is always right"


async def test_auto_uses_the_head_of_a_checkpoint(tmp_path: Path) -> None:
    save_with_head(head_config("glm4_moe"), tmp_path / "model", right=True)
    expected, _ = await guessed(drafting(tmp_path, "off", adapters__adapter_dir=None))
    got, stats = await guessed(drafting(tmp_path, "auto", adapters__adapter_dir=None))
    assert got == expected
    assert stats.detail["accepted_draft_tokens_by_source"]["model"] > 10
    assert stats.memory_bytes[MemoryAccount.DRAFT_MODEL] > 100_000, "its weights, at least"
    _, without = await guessed(drafting(tmp_path, "ngram", adapters__adapter_dir=None))
    assert MemoryAccount.DRAFT_MODEL not in without.memory_bytes


@pytest.mark.parametrize(
    ("speculation", "draft", "message"),
    [
        ("draft", None, "server.speculation: draft needs a draft model; add --draft-model"),
        ("ngram", "small", "model.draft_model: the draft model is not used with --speculation ngram"),
        ("off", "small", "add --speculation auto or draft"),
        ("guess", None, "server.speculation: must be 'auto', 'ngram', 'draft' or 'off'"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    folder: Path, speculation: str, draft: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        drafting(folder, speculation, draft)


def test_a_draft_model_with_another_vocabulary_is_refused(folder: Path, tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "other")
    tokenizer = tmp_path / "other" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("<|im_end|>", "<|end|>"))
    with pytest.raises(ConfigError, match=r"'<\|end\|>' has no id in the base model and the id 257 in the draft"):
        drafting(folder, "draft", str(tmp_path / "other")).start()


def test_a_draft_model_for_several_base_models_is_refused(folder: Path) -> None:
    several = {"model__other_base_models": (str(folder / "small"),)}
    with pytest.raises(ConfigError, match="drafts for one base model, and there are several"):
        drafting(folder, "auto", str(folder / "small"), **several).start()


def test_a_draft_model_that_cannot_forget_its_guesses_is_refused(folder: Path, tmp_path: Path) -> None:
    save_tiny("mamba", tmp_path / "model")
    with pytest.raises(UnsupportedModelError, match=r"--draft-model .* has recurrent layers"):
        drafting(folder, "draft", str(tmp_path / "model")).start()


async def test_drafts_for_a_model_with_recurrent_layers(folder: Path, tmp_path: Path) -> None:
    save_tiny("lfm2", tmp_path / "model")
    expected, _ = await guessed(drafting(tmp_path, "off", adapters__adapter_dir=None))
    got, stats = await guessed(drafting(tmp_path, "auto", str(folder / "small"), adapters__adapter_dir=None))
    assert got == expected
    assert stats.draft_tokens_total > 0
