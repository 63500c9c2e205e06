"""ScoringService checks the metadata that requests give to their scorers, and scores groups of trajectories.

    server's process                                    child processes
    ScoringService ── ScoringPool ── groups ──▶ worker ──▶ scorers ──▶ builtin, gym, functions, judges, ...
       ├── ScoringPool ── metadata of requests ──▶ worker
       └── ScorerCatalogue ── once per scorer name ──▶ worker NAME

The server's process runs no scorer's code and no check that a client can make slow. A child process describes each
scorer that is not built in, once. Another one compiles patterns and checks schemas, once for each of them; the server's
process limits their size before.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from mlx_parallm.core.requests import CollectionSpec
from mlx_parallm.core.trajectories import Trajectory
from mlx_parallm.errors import EngineError, InvalidRequestError, OverloadedError
from mlx_parallm.rl.scoring.builtin import BUILTINS
from mlx_parallm.rl.scoring.catalogue import ScorerCatalogue, no_reward_model
from mlx_parallm.rl.scoring.judges import INSTRUCTION, JUDGE, Judge
from mlx_parallm.rl.scoring.pool import Rule, ScoringError, ScoringPool
from mlx_parallm.rl.scoring.sample import PARAM, ScorerInput
from mlx_parallm.rl.scoring.scorers import REWARD, REWARD_MODEL, RewardSpec, Term

if TYPE_CHECKING:
    from mlx_parallm.extras.reward_models.service import RewardModels

_WAIT_S = 15.0
"""How long a request waits for its check, and for the checks of other requests before it."""

_CHECK_S = 5.0
"""Time after which a checking process is killed. A check ends by itself after `worker.CHECK_S` if Python can end it."""

_REMEMBERED = 1024


class ScoringService:
    """Checks requests and scores groups, in child processes. On one event loop. A fault affects only its own group.

    Args:
        processes: number of scoring processes at most. Another one checks the metadata of requests.
        batch_size: trajectories of one batch at most; a larger group is a batch by itself. See `FairQueue`.
        timeout_s: how long a group may take, not counting the import of its scorer.
        reward: what the scorer `reward` stands for; None: there is none of that name.
        reward_models: those that requests may name; None: there are none.
        judge: the model that grades the answers of lessons.

    Attributes:
        catalogue: the scorers that there are.
        reward_models: those of its arguments.
        last_fault: why the last group that could not be scored failed.
        on_device: groups that reward models are scoring.
    """

    def __init__(
        self,
        processes: int,
        batch_size: int,
        timeout_s: float,
        reward: RewardSpec | None = None,
        reward_models: RewardModels | None = None,
        judge: Judge | None = None,
    ) -> None:
        self.last_fault = ""
        self.on_device = 0
        self._reward, self._judge = reward, judge or Judge()
        self._timeout_s = timeout_s
        self._pool = ScoringPool(processes, batch_size, timeout_s)
        self._checks = ScoringPool(1, 1, _CHECK_S)
        self.reward_models = reward_models
        self.catalogue = ScorerCatalogue(reward, reward_models.check if reward_models else no_reward_model)
        self._describing = asyncio.Lock()
        self._refusals: OrderedDict[bytes, str] = OrderedDict()  # by digest of scorer and value; "": not refused

    # -- rewards ---------------------------------------------------------------------------------

    async def score(self, group: Sequence[Trajectory]) -> tuple[float, ...]:
        """The rewards of trajectories that have the same scorer, in order: finite numbers.

        Raises:
            ScoringError: the group names no scorer, or the scorer failed.
        """
        if not group:
            return ()
        collection = group[0].collection
        if (scorer := collection.scorer) is None:
            raise ScoringError("the group names no scorer")
        rule = Rule(collection.client, scorer, _digest(dict(collection.metadata)).hex())
        try:
            reply = await self._pool.run(rule, len(group), await self._message(group))
            return _checked_rewards(reply, len(group))
        except (ScoringError, InvalidRequestError, EngineError) as error:
            slow = str(error) == f"took more than {self._timeout_s:g} s"
            advice = "; rl_training.scoring_timeout_s is the limit" if slow else ""
            self.last_fault = f"{scorer}: {error}{advice}"
            raise ScoringError(self.last_fault) from error

    async def _message(self, group: Sequence[Trajectory]) -> Mapping[str, Any]:
        """What a scoring process needs to score the group: the samples, with the rewards of reward models, and what the
        scorer `reward` stands for if it is used, which a lesson's judge is too."""
        collection, reward = group[0].collection, None
        scorer, scorers = collection.scorer, self.catalogue.scorers(collection)
        if scorer == JUDGE and INSTRUCTION in collection.metadata:
            judge = replace(self._judge, instruction=collection.metadata[INSTRUCTION])
            scorer, reward = REWARD, RewardSpec((Term(1.0, JUDGE),), judge)
        elif REWARD in scorers:
            reward = self._reward
        samples = [ScorerInput.to_json(trajectory, reward is not None) for trajectory in group]
        for name in scorers:
            if name.startswith(REWARD_MODEL):
                for sample, value in zip(samples, await self._rewards_of(name, group), strict=True):
                    sample["reward_models"][name] = value
        return {"scorer": scorer, "samples": samples, "reward": reward and asdict(reward)}

    async def _rewards_of(self, reward_model: str, group: Sequence[Trajectory]) -> Sequence[float]:
        name = reward_model.removeprefix(REWARD_MODEL)
        if self.reward_models is None:
            no_reward_model(name)
        self.on_device += 1
        try:
            return await self.reward_models.rewards(name, group)
        finally:
            self.on_device -= 1

    def judge_by(self, url: str, api_key: str) -> None:
        """Sets the server that judges are asked on, if the configuration names none: this one."""
        if not self._judge.url:
            self._judge = replace(self._judge, url=url, api_key=api_key)
        if self._reward is not None and not self._reward.judge.url:
            judge = replace(self._reward.judge, url=url, api_key=api_key)
            self._reward = replace(self._reward, judge=judge)

    async def close(self) -> None:
        """Ends the processes; waiting groups fail."""
        await asyncio.gather(self._pool.close(), self._checks.close())

    # -- what requests bring ---------------------------------------------------------------------

    async def check(self, collection: CollectionSpec) -> None:
        """Checks that the scorer of a request is known, and that `metadata` has what it reads.

        The first time that a scorer is named that is not built in, this waits seconds for a child process.

        Raises:
            InvalidRequestError: the scorer is unknown or cannot be used, or `metadata` lacks what it reads.
            OverloadedError: too many other requests are being checked.
        """
        if self.catalogue.must_ask(collection):
            async with self._describing:  # a single thread waits for the child, other requests wait for the lock
                await asyncio.to_thread(self.catalogue.check_bounds, collection)
        else:
            self.catalogue.check_bounds(collection)
        for name in self.catalogue.scorers(collection):
            if name in BUILTINS and BUILTINS[name].read is not None:
                await self._check_value(name, BUILTINS[name].key, collection)

    async def _check_value(self, scorer: str, key: str, collection: CollectionSpec) -> None:
        """Checks one value of `metadata` in the checking process, unless its result is remembered."""
        digest = _digest([scorer, collection.metadata[key]])
        if digest not in self._refusals:
            rule = Rule(collection.client, scorer, "")
            message = {"check": scorer, "metadata": {key: collection.metadata[key]}}
            try:
                reply = await asyncio.wait_for(self._checks.run(rule, 1, message), _WAIT_S)
                self._refusals[digest] = str(reply["refused"])
            except TimeoutError as error:
                raise OverloadedError("The metadata of other requests is being checked; try again.") from error
            except ScoringError as error:
                self._refusals[digest] = f"{PARAM}.{key} could not be checked: {error}"
            if len(self._refusals) > _REMEMBERED:
                self._refusals.popitem(last=False)
        self._refusals.move_to_end(digest)
        if refusal := self._refusals[digest]:
            raise InvalidRequestError(refusal, PARAM)


def _digest(value: object) -> bytes:
    """The SHA-256 of a JSON value, in which the order of keys does not count."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode(errors="surrogatepass")).digest()


def _checked_rewards(reply: Mapping[str, Any], count: int) -> tuple[float, ...]:
    """The rewards in a reply, which a scorer may have written itself.

    Raises:
        ScoringError: they are not this many finite numbers.
    """
    rewards = reply.get("rewards")
    if not isinstance(rewards, list) or len(rewards) != count:
        raise ScoringError(f"the scoring process did not give {count} rewards")
    if not all(isinstance(reward, float | int) and math.isfinite(reward) for reward in rewards):
        raise ScoringError("a reward must be a finite number")
    return tuple(map(float, rewards))
