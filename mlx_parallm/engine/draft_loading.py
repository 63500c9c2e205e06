"""Speculation of one base model: where its drafts come from, and its draft model."""

from __future__ import annotations

import logging

from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.batch.hidden import HiddenStates
from mlx_parallm.batch.runner import BatchRunner
from mlx_parallm.config import Attention, Config, Speculation
from mlx_parallm.engine.draft_head import DraftHead
from mlx_parallm.engine.draft_model import DraftModel
from mlx_parallm.engine.model_check import prove_once
from mlx_parallm.engine.speculate import Source
from mlx_parallm.engine.startup import Prover, calibrate, calibrate_steps, choose_attention
from mlx_parallm.errors import ConfigError, UnsupportedModelError
from mlx_parallm.kv.cache import LoRABatchedKVCache
from mlx_parallm.kv.device_memory import DeviceMemory, MemoryAccount
from mlx_parallm.model.manager import SharedModelManager
from mlx_parallm.model.mtp import PredictionHead, attached
from mlx_parallm.model.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

_SOURCES = {
    Speculation.OFF: frozenset[Source](),
    Speculation.NGRAM: frozenset({Source.GRAMMAR, Source.TEXT}),
    Speculation.DRAFT: frozenset({Source.GRAMMAR, Source.MODEL}),
    Speculation.AUTO: frozenset({Source.GRAMMAR, Source.TEXT, Source.MODEL}),
}


def sources_of(config: Config, base: SharedModelManager, has_head: bool = False) -> frozenset[Source]:
    """Where drafts come from; nothing without speculation.

    Args:
        has_head: the base model's own prediction head is loaded, which `auto` uses in place of a draft model.

    Raises:
        UnsupportedModelError: speculation is asked for, and not `auto` without a draft model, and this model cannot
            forget wrong drafts.
    """
    speculation, draft = config.server.speculation, config.model.draft_model
    sources = _SOURCES[speculation] if draft is not None or has_head else _SOURCES[speculation] - {Source.MODEL}
    if not sources or base.plan.layout.takes_drafts:
        return sources
    if speculation is Speculation.AUTO and draft is None:
        _log.info("%s is served without speculation: its caches cannot forget wrong drafts", base.card.name)
        return frozenset()
    raise UnsupportedModelError(
        f"--speculation {speculation} needs a model that can forget wrong drafts, and {base.card.name} "
        f"({base.family.name}) has caches of its own, which cannot; leave it out"
    )


def load_draft_model(base: SharedModelManager, config: Config) -> SharedModelManager | PredictionHead | None:
    """Loads the draft model, or without one the base model's prediction head for `auto`. None if there is none.

    Raises:
        ModelError: it cannot be loaded or batched, or cannot forget wrong drafts.
        ConfigError: it has another vocabulary, or there are several base models.
    """
    path = config.model.draft_model
    if path is None and config.server.speculation is Speculation.AUTO and base.plan.layout.takes_drafts:
        return base.load_head()
    if path is None:
        return None
    if config.model.other_base_models:
        raise ConfigError(
            f"--draft-model {path} drafts for one base model, and there are several; leave it out, or serve one"
        )
    draft = SharedModelManager(path, trust_remote_code=config.model.trust_remote_code, progress=False)
    if not draft.plan.layout.rolls_back:
        raise UnsupportedModelError(
            f"--draft-model {path} needs a model that can forget its drafts at once, and {draft.family.name} has "
            "recurrent layers or caches of its own, which cannot; name another one"
        )
    if difference := _difference(base.tokenizer, draft.tokenizer):
        raise ConfigError(
            f"--draft-model {path} cannot draft tokens of {base.card.name}, because its vocabulary is another one: "
            f"{difference}; name a smaller model of the same family"
        )
    return draft


def _difference(base: Tokenizer, draft: Tokenizer) -> str:
    """The first token that two vocabularies do not share; empty if they are the same."""
    ours, theirs = base.vocabulary, draft.vocabulary
    for token, _ in sorted((theirs | ours).items(), key=lambda item: (item[1], item[0])):
        if ours.get(token) != theirs.get(token):
            return f"{token!r} has {_id(ours, token)} in the base model and {_id(theirs, token)} in the draft model"
    return ""


def _id(vocabulary: dict[str, int], token: str) -> str:
    return f"the id {vocabulary[token]}" if token in vocabulary else "no id"


def weight_bytes(draft: SharedModelManager | PredictionHead | None) -> int:
    """Bytes of the weights that are loaded beside those of the base model."""
    if isinstance(draft, PredictionHead):
        return draft.weight_bytes
    return 0 if draft is None else draft.card.weight_bytes


def build_draft_model(
    base: SharedModelManager,
    bank: AdapterBank,
    runner: BatchRunner,
    draft: SharedModelManager | PredictionHead,
    sharing: list[DeviceMemory],
    keep_prefixes: bool,
) -> DraftModel:
    """The draft model with a KV pool of its own, whose memory is part of the budget.

    Args:
        bank, runner: of the base model.
        sharing: the memories that share the budget.
        keep_prefixes: whether draft rows of the same prompt compute it once.
    """
    memory = DeviceMemory(runner.cache.device.budget_bytes, sharing)
    try:
        if isinstance(draft, PredictionHead):
            drafts: DraftModel = _draft_head(base, bank, runner, draft, memory)
        else:
            drafts = _draft_model(base, runner, draft, memory, keep_prefixes)
    except BaseException:  # whatever it is: the base models must not count its memory
        memory.leave()
        raise
    weights = weight_bytes(draft)
    runner.cache.device.open_account(MemoryAccount.DRAFT_MODEL, lambda: weights + drafts.bytes_held)
    return drafts


def _draft_model(
    base: SharedModelManager, runner: BatchRunner, draft: SharedModelManager, memory: DeviceMemory, keep_prefixes: bool
) -> DraftModel:
    bank = draft.install_bank(slots=0, max_rank=1)
    prove_once(draft, bank)
    length = min(runner.cache.longest_row, draft.card.context_length)
    own = BatchRunner(
        draft.model, LoRABatchedKVCache(draft.plan.layout, memory, length, keep_prefixes), bank, draft.plan
    )
    wanted = Attention.AUTO if runner.attention.kernel else Attention.PLAIN
    choose_attention(own, wanted, Prover(draft.model, bank, draft.plan, own))
    cost = calibrate_steps(own, calibrate(own))
    return DraftModel(own, cost, base.card.vocab_size, draft.card.vocab_size)


def _draft_head(
    base: SharedModelManager, bank: AdapterBank, runner: BatchRunner, head: PredictionHead, memory: DeviceMemory
) -> DraftHead:
    head = attached(head.model, base.model)
    cache = LoRABatchedKVCache(head.plan.layout, memory, runner.cache.longest_row, keep_prefixes=False)
    own = BatchRunner(head.model, cache, bank, head.plan)
    own.attention = runner.attention
    cost = calibrate_steps(own, calibrate(own))
    runner.hidden = HiddenStates()
    return DraftHead(own, cost, base.card.vocab_size, head.input, runner.hidden)
