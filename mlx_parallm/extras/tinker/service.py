"""TinkerService: the policies that clients train step by step.

    create ─▶ forward_backward ─▶ … ─▶ step ─▶ publish ─▶ requests name the version
                                          └──▶ save    ─▶ a checkpoint, from which others start

They share the learner, the adapter bank and the folder of checkpoints with the server's own training, and no policy.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from mlx_parallm.adapters.cards import CheckpointCard
from mlx_parallm.adapters.registry import AdapterRegistry
from mlx_parallm.adapters.service import AdapterService
from mlx_parallm.adapters.weights import AdapterLayout, LinearSpec, VersionInfo
from mlx_parallm.app.build import Served
from mlx_parallm.config import Config, ModelConfig, OptimizerConfig
from mlx_parallm.core.adapters import AdapterRef, check_name
from mlx_parallm.core.summed import SummedLoss, TargetedTokens
from mlx_parallm.errors import ConflictError, InvalidRequestError, OverloadedError, UnknownModelError
from mlx_parallm.extras.tinker.records import AdamSettings, Layers, PolicyCard, PolicySpec, PolicyStep, TokenScores
from mlx_parallm.extras.tinker.server import TinkerServer
from mlx_parallm.rl.checkpoints import PolicyCheckpoints
from mlx_parallm.rl.service import TrainingService
from mlx_parallm.train.data import PLACEHOLDERS, Datum
from mlx_parallm.train.learner import Learner
from mlx_parallm.train.policy import PolicySnapshot
from mlx_parallm.train.summed import TOTALS, datum_of, loss_value, resolved_loss, scored_positions

_log = logging.getLogger(__name__)

KEPT_VERSIONS = 4
"""How many of the newest published versions of a policy requests can name."""


@dataclass(slots=True)
class _OpenPolicy:
    """`current`: the version with the weights as they are now, if it was published or saved. `published`: versions that
    are in no checkpoint, oldest first. `warned`: of placeholders for log-probabilities."""

    lora: ModelConfig
    current: AdapterRef | None = None
    published: deque[AdapterRef] = field(default_factory=deque)
    warned: bool = False


class TinkerService:
    """Trains policies for clients. Used on the event loop's thread only. `name` is the adapter's.

    Its methods raise UnknownModelError if no policy of that name is open. What is asked of one policy must be awaited
    before the next is asked; different policies are trained together.

    Args:
        registry: gets the versions that are published and saved.
        layout: the linear layers that policies may change.
        most: how many policies may be open.
    """

    def __init__(
        self,
        learner: Learner,
        adapters: AdapterService,
        checkpoints: PolicyCheckpoints,
        registry: AdapterRegistry,
        layout: AdapterLayout,
        max_rank: int,
        most: int,
    ) -> None:
        self.max_rank = max_rank
        self._learner = learner
        self._adapters = adapters
        self._checkpoints = checkpoints
        self._registry = registry
        self._layout = layout
        self._most = most
        self._open: dict[str, _OpenPolicy] = {}

    @property
    def head_can_be_trained(self) -> bool:
        """Whether policies of this model can change the linear layer that makes the logits."""
        return self._layout.head is not None

    def layers_of(self, targets: Sequence[str]) -> Layers:
        """The layers that an adapter with these targets changes; see `AdapterCard.targets`."""
        kinds = {self._kind(each) for each in self._layout if each.target in targets}
        return Layers("attention" in kinds, "mlp" in kinds, "head" in kinds)

    def _targets(self, layers: Layers) -> tuple[str, ...]:
        """The last names of these layers."""
        wanted = {"attention": layers.attention, "mlp": layers.mlp, "head": layers.head}
        return tuple(sorted({each.target for each in self._layout if wanted.get(self._kind(each))}))

    def _kind(self, linear: LinearSpec) -> str:
        """Which of `Layers` a linear is; a router is none of them."""
        if linear.chooses:
            return "router"
        if linear == self._layout.head:
            return "head"
        inside = linear.path.split(".")[:-1]
        return "attention" if any("attn" in part or "attention" in part for part in inside) else "mlp"

    # -- opening and closing ---------------------------------------------------------------------

    async def create(self, name: str, spec: PolicySpec) -> PolicyCard:
        """Starts a policy that equals the base model.

        Raises:
            InvalidRequestError: the rank is too large, or there is no layer to change.
            OverloadedError: as many policies are open as the operator allows.
            ConflictError: there is an adapter of that name.
        """
        if not 0 < spec.rank <= self.max_rank:
            raise InvalidRequestError(
                f"rank {spec.rank} is not between 1 and {self.max_rank}: ask for a smaller one, or start the server "
                f"with --max-lora-rank {spec.rank}",
                param="rank",
            )
        targets = self._targets(spec.layers)
        if not targets:
            raise InvalidRequestError("this model has no such layer to train: choose attention or MLP layers too")
        lora = ModelConfig(lora_rank=spec.rank, lora_alpha=spec.alpha, lora_target_modules=targets)
        return await self._start(name, lora, None, spec.seed)

    async def create_from(self, name: str, source: str, tag: str, with_optimizer: bool) -> PolicyCard:
        """Starts a policy from a checkpoint of the adapter `source`, with its rank and layers.

        Raises:
            UnknownModelError: there is no such checkpoint.
            AdapterFileError: it cannot be used.
            OverloadedError, ConflictError: see `create`.
        """
        snapshot = await self._snapshot(source, tag, with_optimizer)
        weights = snapshot.weights
        lora = ModelConfig(
            lora_rank=weights.rank,
            lora_alpha=weights.alpha,
            lora_rslora=weights.rslora,
            lora_target_modules=weights.targets,
        )
        return await self._start(name, lora, snapshot, None)

    async def _start(self, name: str, lora: ModelConfig, start: PolicySnapshot | None, seed: int | None) -> PolicyCard:
        """Opens a policy. Its place is taken before anything is awaited, so that the limit holds."""
        if check_name(name) in self._open or self._registry.live(name) is not None:
            raise ConflictError(f"there is an adapter {name!r} already: choose another name")
        if len(self._open) >= self._most:
            raise OverloadedError(
                f"{self._most} policies are in training, which is the limit: close one, or raise "
                "rl_training.tinker.max_models"
            )
        self._open[name] = _OpenPolicy(lora)
        try:
            await self._learner.open(name, start, lora, seed)
        except BaseException:  # a cancelled caller too: its place must be free again, and the policy gone
            del self._open[name]
            await self._learner.close(name)
            raise
        return self.card(name)

    async def close(self, name: str) -> None:
        """Ends a policy: its gradients, its optimizer's state and the versions that are in no checkpoint are dropped.
        What is under way for it fails."""
        opened = self._policy(name)
        del self._open[name]
        for ref in opened.published:
            self._adapters.discard(ref)
        await self._learner.close(name)

    def card(self, name: str) -> PolicyCard:
        lora = self._policy(name).lora
        step = self._learner.state(name).step
        return PolicyCard(name, lora.lora_rank, lora.lora_alpha, tuple(sorted(lora.lora_target_modules)), step)

    def _policy(self, name: str) -> _OpenPolicy:
        if name not in self._open:
            raise UnknownModelError(f"no policy {name!r} is in training")
        return self._open[name]

    # -- training --------------------------------------------------------------------------------

    async def forward(self, name: str, sequences: Sequence[TargetedTokens], loss: SummedLoss) -> TokenScores:
        """The loss and the logprobs of all targets.

        Raises:
            StepFailedError: the device failed.
        """
        self._policy(name)
        samples = [datum_of(each, range(len(each.token_ids))) for each in sequences]
        logprobs = await self._learner.logprobs(name, samples)
        return TokenScores(loss_value(sequences, logprobs, loss), tuple(logprobs))

    async def forward_backward(self, name: str, sequences: Sequence[TargetedTokens], loss: SummedLoss) -> TokenScores:
        """Adds the gradients of these sequences to those since the last step.

        A target whose advantage and sampling logprob are both 0 adds nothing to a gradient. If a sequence has others,
        the logprob of such a target is not computed, and 0 is returned in its place.

        Raises:
            StepFailedError: the device failed; the gradients are as before.
        """
        self._policy(name)
        places = [scored_positions(each) for each in sequences]
        samples = [datum_of(each, at) for each, at in zip(sequences, places, strict=True)]
        self._warn_of_placeholders(name, samples)
        added = await self._learner.accumulate(name, samples, resolved_loss(loss), TOTALS, returns_logprobs=True)
        logprobs = tuple(
            _spread(values, at, len(each.token_ids))
            for values, at, each in zip(added.logprobs, places, sequences, strict=True)
        )
        return TokenScores(loss_value(sequences, logprobs, loss), logprobs)

    def _warn_of_placeholders(self, name: str, samples: Sequence[Datum]) -> None:
        count, opened = sum(sample.has_placeholder_logprobs for sample in samples), self._policy(name)
        if count and not opened.warned:
            opened.warned = True
            _log.warning(PLACEHOLDERS, count, name)

    async def step(self, name: str, adam: AdamSettings) -> PolicyStep:
        """Makes an optimizer step from the gradients since the last step, which are then forgotten.

        Raises:
            ConflictError: there are none, or something in the step was not finite; the policy is as before.
            StepFailedError: the device failed; the policy is as before.
        """
        opened = self._policy(name)
        try:
            outcome = await self._learner.step(name, _optimizer(adam))
        except ValueError:
            raise ConflictError("there are no gradients since the last step: compute some first") from None
        if outcome.skipped:
            raise ConflictError(f"the step was not made, and its gradients are dropped: {outcome.skipped}")
        opened.current = None
        return PolicyStep(outcome.step, outcome.metrics)

    async def restore(self, name: str, source: str, tag: str, with_optimizer: bool) -> None:
        """Goes back to a checkpoint of the adapter `source`.

        Raises:
            UnknownModelError: there is no such checkpoint.
            InvalidRequestError: it has another rank or other layers, or cannot be used.
        """
        opened = self._policy(name)
        snapshot = await self._snapshot(source, tag, with_optimizer)
        weights, lora = snapshot.weights, opened.lora
        if (weights.rank, set(weights.targets)) != (lora.lora_rank, set(lora.lora_target_modules)):
            raise InvalidRequestError(
                f"the checkpoint has rank {weights.rank} and changes {', '.join(weights.targets)}; this model has rank "
                f"{lora.lora_rank} and changes {', '.join(sorted(lora.lora_target_modules))}: create the model from "
                "the checkpoint"
            )
        await self._learner.restore(name, snapshot)
        opened.current = None

    # -- versions and checkpoints ----------------------------------------------------------------

    async def publish(self, name: str) -> AdapterRef:
        """Makes the policy as it is now a version that requests can name. The newest few of a policy are kept, until it
        is closed.

        Raises:
            UnknownModelError: the policy was closed meanwhile.
        """
        opened = self._policy(name)
        if opened.current is not None and self._is_known(opened.current):
            return opened.current
        weights = self._learner.weights(name)
        version = await self._adapters.publish(name, weights, VersionInfo.of(weights), goes_live=False)
        if self._open.get(name) is not opened:
            self._adapters.discard(version.ref)  # `close` did not know of it
            raise UnknownModelError(f"the policy {name!r} was closed while it was published")
        opened.current = version.ref
        opened.published.append(version.ref)
        while len(opened.published) > KEPT_VERSIONS:
            self._adapters.discard(opened.published.popleft())
        return version.ref

    def _is_known(self, ref: AdapterRef) -> bool:
        """Whether requests can name this version: the operator may have unloaded it."""
        version = self._registry.version(ref)
        return version is not None and not version.forgotten

    async def save(self, name: str, tag: str, overwrite: bool) -> CheckpointCard:
        """Writes the policy and its optimizer's state as a checkpoint with this tag.

        Raises:
            InvalidRequestError: the tag is not a plain name.
            ConflictError: another checkpoint has the tag, and `overwrite` is false.
            StorageError: the disk failed.
        """
        opened = self._policy(name)
        if not overwrite and any(tag in card.tags for card in self.checkpoints(name)):
            raise ConflictError("there is a checkpoint of that name: choose another name, or overwrite it")
        snapshot = await self._learner.snapshot(self._learner.state(name))
        ref = opened.current or self._registry.add(name, VersionInfo.of(snapshot.weights)).ref
        try:
            card = await self._checkpoints.save(ref, snapshot, [tag], {})
        except BaseException:  # a cancelled caller too: a version without weights must not be found
            if ref != opened.current:
                self._adapters.discard(ref)
            raise
        opened.current = ref
        if ref in opened.published:
            opened.published.remove(ref)  # its weights are in a file now
        return card

    def saved(self, name: str, tag: str) -> AdapterRef:
        """The version in a checkpoint, which requests can name from now on. The policy need not be open.

        Raises:
            UnknownModelError: there is no such checkpoint.
        """
        return self._checkpoints.version(name, tag)

    def checkpoints(self, name: str) -> tuple[CheckpointCard, ...]:
        """The checkpoints of an adapter, oldest first. The policy need not be open."""
        return self._checkpoints.cards(name)

    async def _snapshot(self, source: str, tag: str, with_optimizer: bool) -> PolicySnapshot:
        _, snapshot = await self._checkpoints.load(source, tag)
        return snapshot if with_optimizer else replace(snapshot, optimizer={})


def _spread(values: Sequence[float], places: Sequence[int], length: int) -> tuple[float, ...]:
    """Values at these places, and 0 elsewhere."""
    every = [0.0] * length
    for at, value in zip(places, values, strict=True):
        every[at] = value
    return tuple(every)


def _optimizer(adam: AdamSettings) -> OptimizerConfig:
    """The trainer's settings. They are not checked again: a learning rate may be 0, which the configuration refuses."""
    return OptimizerConfig.model_construct(
        learning_rate=adam.learning_rate,
        beta1=adam.beta1,
        beta2=adam.beta2,
        eps=adam.eps,
        weight_decay=adam.weight_decay,
        max_grad_norm=adam.max_grad_norm,
    )


def serve(config: Config, served: Served, training: TrainingService) -> TinkerServer:
    """What requests of the Tinker API ask."""
    settings, known = config.rl_training.tinker, served.known
    policies = TinkerService(
        training.parts.learner,
        served.adapters,
        training.parts.checkpoints,
        known.registry,
        known.library.layout,
        known.library.max_rank,
        settings.max_models,
    )
    return TinkerServer(policies, served.card, settings)
