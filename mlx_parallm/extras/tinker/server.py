"""TinkerServer: what the routes of the Tinker API do. It has sessions, models and futures, and ends what is left of a
client that is gone.

    route ─▶ place in the model's order ─▶ future ─▶ turn ─▶ TinkerService ─▶ result
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any

from mlx_parallm.config import TinkerConfig
from mlx_parallm.core.adapters import BASE_ADAPTER
from mlx_parallm.core.engine import ModelCard
from mlx_parallm.errors import InvalidRequestError, ParaLLMError, UnknownModelError
from mlx_parallm.extras.tinker.answers import Fields, LossAnswer, TinkerAnswer
from mlx_parallm.extras.tinker.futures import Futures, no_operation
from mlx_parallm.extras.tinker.losses import LossInput, summed_loss, targeted_tokens
from mlx_parallm.extras.tinker.records import AdamSettings, Layers, PolicyCard, PolicySpec
from mlx_parallm.extras.tinker.schema import (
    AdamBody,
    CreateModelBody,
    LoadBody,
    LoraConfig,
    OptimStepBody,
    SaveBody,
)
from mlx_parallm.extras.tinker.sessions import (
    Sampler,
    SavedWeights,
    Session,
    TinkerModel,
    TinkerSessions,
    is_of,
)
from mlx_parallm.server.access import ANYONE, NamedKey
from mlx_parallm.server.limits import Account
from mlx_parallm.tasks import spawn

if TYPE_CHECKING:
    from mlx_parallm.extras.tinker.service import TinkerService

ALPHA = 32.0
"""Tinker's LoRA adapters are scaled by 32 / rank."""
DEFAULT_RANK = 32
_SWEEP_S = 5.0

Operation = Callable[[], Awaitable[TinkerAnswer]]

log = logging.getLogger(__name__)


class TinkerServer:
    """The state behind the routes. Event loop's thread only.

    Args:
        card: the base model.

    Attributes:
        key: whose requests these are; see `of`.
    """

    def __init__(self, policies: TinkerService, card: ModelCard, config: TinkerConfig) -> None:
        self.policies = policies
        self.sessions = TinkerSessions(config.max_sessions, config.session_timeout_s)
        self.futures = Futures()
        self._max_models = config.max_models
        self._card = card
        self.key = ANYONE
        self._sweeping: set[asyncio.Task[None]] = set()
        self._closing: set[asyncio.Task[None]] = set()

    def of(self, key: NamedKey) -> TinkerServer:
        """The same state, for requests of this key."""
        bound = copy(self)
        bound.key = key
        return bound

    # -- sessions --------------------------------------------------------------------------------

    def open_session(self) -> Session:
        """See `TinkerSessions.open`. While there are sessions, those that fall silent are looked for."""
        session = self.sessions.open(self.key)
        if all(task.done() for task in self._sweeping):
            self._spawn(self._sweeping, self._sweep(), "looking for silent sessions")
        return session

    def _spawn(self, tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None], name: str) -> None:
        task = spawn(work, log, name)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def _sweep(self) -> None:
        """Ends silent sessions and forgets old results, until there are none of both."""
        while [*self.sessions] or len(self.futures):
            await asyncio.sleep(_SWEEP_S)
            for session in self.sessions.silent():
                log.warning("the Tinker session %s is ended: its client is silent", session.session_id)
                self.end_session(session.session_id)
            self.futures.sweep()

    def end_session(self, session_id: str) -> None:
        """Ends a session with its models and operations, if it is open."""
        if (session := self.sessions.remove(session_id)) is None:
            return
        self.futures.drop(session_id)
        for model in session.models.values():
            self._begin_close(model.adapter)

    def _begin_close(self, adapter: str) -> None:
        """Closes a policy in a task of its own, so that nobody who leaves meanwhile can stop it."""
        self._spawn(self._closing, self._close(adapter), f"closing {adapter}")

    async def _close(self, adapter: str) -> None:
        with suppress(ParaLLMError):  # it was never opened, is closed already, or the engine has ended
            await self.policies.close(adapter)

    # -- models ----------------------------------------------------------------------------------

    def create_model(self, body: CreateModelBody, digest: bytes) -> tuple[str, str]:
        """Begins to create a model. Returns the id of the future, and the model's."""
        lora = body.lora_config or LoraConfig(rank=DEFAULT_RANK)
        seed = secrets.randbits(32) if lora.seed is None else lora.seed
        spec = PolicySpec(lora.rank, ALPHA, seed, Layers(lora.train_attn, lora.train_mlp, lora.train_unembed))
        model = self._new_model(body.session_id, body.model_seq_id)

        async def create() -> TinkerAnswer:
            await self._opened(model, partial(self.policies.create, model.adapter, spec))
            return Fields({"model_id": model.model_id, "type": "create_model"})

        return self._in_turn(model, 0, digest, 0, create), model.model_id

    def _new_model(self, session_id: str, number: int) -> TinkerModel:
        session = self.sessions.find(session_id, self.key)
        self.futures.check_room(self.key, 0)
        return session.new_model(number)

    async def _opened(self, model: TinkerModel, opening: Callable[[], Awaitable[PolicyCard]]) -> None:
        """Opens the policy of a model. Raises OverloadedError also if the key may not have more of them."""
        self.sessions.check_models(self._max_models, self.key)
        model.is_open = True
        try:
            await opening()
        except BaseException:  # a cancelled operation too
            model.is_open = False
            raise

    def rank(self, model: TinkerModel) -> int | None:
        """None: it is not created yet, or could not be."""
        try:
            return self.policies.card(model.adapter).rank
        except UnknownModelError:
            return None

    def unload(self, model_id: str) -> None:
        """Ends a model and what is under way for it."""
        model = self.sessions.model(model_id, self.key)
        del self.sessions.find(model.session_id, self.key).models[model_id]
        self._begin_close(model.adapter)

    # -- operations of a model -------------------------------------------------------------------

    def _in_turn(
        self,
        model: TinkerModel,
        number: int | None,
        digest: bytes,
        nbytes: int,
        operation: Operation,
        account: Account | None = None,
    ) -> str:
        """Runs an operation when its turn has come. Returns the id of its future. A repeated request gets the future of
        the first one. `account`: counts it as a request; None: it computes nothing.

        Raises:
            ConflictError, OverloadedError: see `Turns.take`, `Futures.check_room` and `Account.request`.
        """
        self.futures.check_room(self.key, nbytes)
        if account is not None and not model.turns.repeats(number, digest):
            with account.request():  # it is not under way while it waits for its turn, or it could wait for a request
                pass  # before it that the limit refuses
        place, repeated = model.turns.take(number, digest)
        request_id = f"{model.model_id}:{place}"
        if not repeated:

            async def run() -> TinkerAnswer:
                async with model.turns.of(place):
                    return await operation()

            self.futures.start(request_id, model.session_id, digest, nbytes, run())
        return request_id

    def score(
        self,
        model_id: str,
        number: int | None,
        read: Callable[[], Awaitable[LossInput]],
        backward: bool,
        digest: bytes,
        nbytes: int,
        account: Account,
    ) -> str:
        """Begins `forward`, or `forward_backward`.

        Args:
            read: reads the data, when its turn has come.
            account: of the key, to which it is charged as a request for an answer whose prompts are the data.

        Raises:
            OverloadedError: a limit of the key does not allow it now.
        """
        model = self.sessions.model(model_id, self.key)

        async def score() -> TinkerAnswer:
            given = await read()
            loss = summed_loss(given)
            sequences = await asyncio.to_thread(targeted_tokens, given, loss, self._card)
            account.add_prompt(sum(len(sequence.token_ids) for sequence in sequences))
            run = self.policies.forward_backward if backward else self.policies.forward
            scores = await run(model.adapter, sequences, loss)
            if not math.isfinite(scores.loss):
                raise InvalidRequestError("the loss is not finite: check logprobs, advantages and weights")
            return LossAnswer(scores)

        return self._in_turn(model, number, digest, nbytes, score, account)

    def step(self, body: OptimStepBody, digest: bytes, read: Callable[[], AdamBody]) -> str:
        """Begins an optimizer step. `read`: reads its settings, when its turn has come."""
        model = self.sessions.model(body.model_id, self.key)

        async def step() -> TinkerAnswer:
            if body.optimizer_params:
                raise InvalidRequestError(
                    "optimizer_params: this server has Adam only; send adam_params", "adam_params"
                )
            adam = read()
            settings = AdamSettings(
                adam.learning_rate,
                adam.beta1,
                adam.beta2,
                adam.eps,
                adam.weight_decay,
                adam.grad_clip_norm or math.inf,
            )
            done = await self.policies.step(model.adapter, settings)
            metrics = {"grad_norm": done.metrics["grad_norm"], "update": done.step}
            return Fields({"metrics": metrics, "type": "optim_step"})

        return self._in_turn(model, body.seq_id, digest, 0, step)

    def save(self, body: SaveBody, digest: bytes) -> str:
        """Begins to save the weights and the optimizer's state."""
        model = self.sessions.model(body.model_id, self.key)

        async def save() -> TinkerAnswer:
            name = body.path or f"step-{self.policies.card(model.adapter).step}"
            saved = SavedWeights.named(model.model_id, "weights", name, self.key)
            await self.policies.save(model.adapter, saved.tag, body.overwrite or body.path is None)
            return Fields({"path": saved.path, "type": "save_weights"})

        return self._in_turn(model, body.seq_id, digest, 0, save)

    def save_for_sampler(self, body: SaveBody, digest: bytes) -> str:
        """Begins to make the weights available for sampling: under a name, or as a sampling session."""
        model = self.sessions.model(body.model_id, self.key)

        async def save() -> TinkerAnswer:
            if body.kind != "snapshot":
                raise InvalidRequestError("kind: only snapshots of the weights are supported", param="kind")
            if body.path is not None:
                saved = SavedWeights.named(model.model_id, "sampler_weights", body.path, self.key)
                await self.policies.save(model.adapter, saved.tag, True)
                return Fields({"path": saved.path, "type": "save_weights_for_sampler"})
            if body.sampling_session_seq_id is None:
                raise InvalidRequestError("path: give a name, or a sampling_session_seq_id", param="path")
            version = await self.policies.publish(model.adapter)
            session = self.sessions.find(model.session_id, self.key)
            sampler_id = session.sampler_id(body.sampling_session_seq_id)
            session.add_sampler(Sampler(sampler_id, version))
            return Fields({"path": None, "sampling_session_id": sampler_id, "type": "save_weights_for_sampler"})

        return self._in_turn(model, body.seq_id, digest, 0, save)

    def load(self, body: LoadBody, digest: bytes) -> tuple[str, str]:
        """Begins to load saved weights, into a model or as a new one. Returns the id of the future, and the model's."""
        if (body.model_id is None) == (body.session_id is None or body.model_seq_id is None):
            raise InvalidRequestError("send model_id, or session_id and model_seq_id", param="model_id")
        creates = body.model_id is None
        if body.model_id is not None:
            model = self.sessions.model(body.model_id, self.key)
        else:
            model = self._new_model(body.session_id or "", body.model_seq_id or 0)

        async def load() -> TinkerAnswer:
            saved = SavedWeights.of(body.path, self.key)
            if creates:
                start = (model.adapter, saved.adapter, saved.tag, body.optimizer)
                await self._opened(model, partial(self.policies.create_from, *start))
            else:
                await self.policies.restore(model.adapter, saved.adapter, saved.tag, body.optimizer)
            return Fields({"path": body.path, "model_id": model.model_id, "type": "load_weights"})

        return self._in_turn(model, 0 if creates else body.seq_id, digest, 0, load), model.model_id

    # -- sampling --------------------------------------------------------------------------------

    def add_sampler(self, session_id: str, number: int, path: str | None) -> Sampler:
        """A sampling session of saved weights; None: of the base model.

        Raises:
            UnknownModelError: there are no such weights.
        """
        session = self.sessions.find(session_id, self.key)
        saved = None if path is None else SavedWeights.of(path, self.key)
        if saved is not None:
            self.policies.saved(saved.adapter, saved.tag)
        return session.add_sampler(Sampler(session.sampler_id(number), saved=saved))

    def selector_of(self, sampler: Sampler) -> str:
        """The version that a sampling session samples from, as requests name it. Raises UnknownModelError if the saved
        weights are gone."""
        saved = sampler.saved
        version = sampler.version if saved is None else self.policies.saved(saved.adapter, saved.tag)
        return version.name if version == BASE_ADAPTER else str(version)

    async def result(self, request_id: str, wait_s: float) -> TinkerAnswer | None:
        """See `Futures.result`. Raises ExpiredError also if the operation is another key's."""
        if not is_of(self.key, request_id):
            raise no_operation(request_id)
        return await self.futures.result(request_id, wait_s)

    def cancel(self, request_id: str) -> None:
        """Ends an operation early, if it samples. Those of a model have a place in its order.

        Raises:
            ExpiredError: it is another key's.
        """
        if not is_of(self.key, request_id):
            raise no_operation(request_id)
        if ":train:" not in request_id:
            self.futures.cancel(request_id)
