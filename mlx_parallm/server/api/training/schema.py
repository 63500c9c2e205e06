"""Request bodies of the training routes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, model_validator

from mlx_parallm.server.api.adapters.schema import MAX_NAME, Name
from mlx_parallm.server.api.fields import INT32_MAX, WireInput, refused
from mlx_parallm.server.api.generation_fields import MAX_EPISODE_ID
from mlx_parallm.server.api.training.people_schema import User
from mlx_parallm.server.api.training.trajectory_schema import GivenTrajectoryBody

MAX_GIVEN = 4096
Signal = Literal["rewards", "late_feedback", "preferences", "corrections"]
GivenTexts = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_GIVEN)]


class UpdateBody(WireInput):
    """One update."""

    trajectories: Annotated[list[GivenTrajectoryBody], Field(min_length=1, max_length=MAX_GIVEN)] | None = None
    """The training data. If it is left out, the complete groups that were collected are used. Either all trajectories
    (or episodes) have a reward or none has."""
    prompts: GivenTexts | None = None
    """The training data as three lists of the same length, in place of `trajectories`: prompts as text, one completion
    for each in `outputs`, and its reward in `rewards`. Equal prompts are one group."""
    outputs: GivenTexts | None = None
    """One completion for each of `prompts`, as text."""
    rewards: Annotated[list[float], Field(min_length=1, max_length=MAX_GIVEN)] | None = None
    """One reward for each of `prompts`."""
    update_inference: bool = True
    """Whether the new version becomes live."""
    checkpoint_name: Name | None = None
    """A tag. After the update, even if it was held or skipped, the adapter is saved as a checkpoint with this tag. If
    it cannot be saved, the answer is an error."""
    lora_adapter: str | None = None
    """The adapter to train. By default, the default adapter."""
    signal: Signal | None = None
    """What the update learns from, without given data: answers with `rewards`, `late_feedback`, `preferences` or
    `corrections`. The default: rewards or, if no answer with one waits, the first of the others that do."""

    @property
    def given(self) -> list[GivenTrajectoryBody] | None:
        """The training data in either form."""
        if self.prompts is None or self.outputs is None:
            return self.trajectories
        rewards: Sequence[float | None] = self.rewards or [None] * len(self.prompts)
        return [
            GivenTrajectoryBody(prompt=prompt, output=output, reward=reward)
            for prompt, output, reward in zip(self.prompts, self.outputs, rewards, strict=True)
        ]

    @model_validator(mode="after")
    def _lists_of_one_length(self) -> UpdateBody:
        lists = {"prompts": self.prompts, "outputs": self.outputs, "rewards": self.rewards}
        given = {name: values for name, values in lists.items() if values is not None}
        if self.signal is not None and (given or self.trajectories is not None):
            raise refused("is for what waits; leave it out with given data", "signal")
        if not given:
            return self
        if self.trajectories is not None:
            raise refused("send trajectories, or the three lists", next(iter(given)))
        if "prompts" not in given or "outputs" not in given:
            raise refused("prompts and outputs need each other", next(iter(given)))
        if len({len(values) for values in given.values()}) > 1:
            raise refused("prompts, outputs and rewards must have the same length", "outputs")
        return self

    @model_validator(mode="after")
    def _given_alike(self) -> UpdateBody:
        alone = [given for given in self.trajectories or () if not given.episode_id]
        if len({given.reward is None for given in alone}) > 1:
            raise refused("give a reward with each of them, or with none", "trajectories")
        if len({given.advantages is None for given in self.trajectories or ()}) > 1:
            raise refused("give advantages with each of them, or with none", "trajectories")
        return self


class ControlBody(WireInput):
    """The adapter to control."""

    lora_adapter: str | None = None
    """The adapter. By default, the default adapter."""


class TrainingRollbackBody(ControlBody):
    """The version to go back to."""

    to: str | None = None
    """A checkpoint's name or tag. By default, the best version."""


class FeedbackBody(WireInput):
    """The reward of an answer, of an episode, of one turn of it, or of the tokens of one answer or turn."""

    trajectory_id: Annotated[str, Field(min_length=1, max_length=MAX_NAME)] | None = None
    """The id of an answer, from the response of the request that was collected. If the answer is a turn of an episode,
    its reward adds to that of the episode."""
    episode_id: Annotated[str, Field(min_length=1, max_length=MAX_EPISODE_ID)] | None = None
    """An episode, in place of `trajectory_id`. Its reward ends it."""
    group_id: Annotated[str, Field(min_length=1, max_length=MAX_EPISODE_ID)] | None = None
    """The group of `episode_id`, if its requests named one."""
    score: float | None = None
    """The reward: any finite number."""
    token_rewards: Annotated[list[float], Field(min_length=1, max_length=INT32_MAX)] | None = None
    """In place of `score`, with `trajectory_id`: one reward for each token of the answer. Each counts for its token and
    for those before it."""
    user: User | None = None
    """With `trajectory_id` and `score`: whose opinion this is. The last one of each user counts, and the reward is the
    mean over users. All that is sent without a `user` is the opinion of one."""

    @model_validator(mode="after")
    def _names_one(self) -> FeedbackBody:
        if (self.trajectory_id is None) == (self.episode_id is None):
            raise refused("send this or episode_id, and not both", "trajectory_id")
        if (self.score is None) == (self.token_rewards is None):
            raise refused("send this or token_rewards, and not both", "score")
        if self.group_id is not None and self.episode_id is None:
            raise refused("needs episode_id", "group_id")
        if self.token_rewards is not None and self.trajectory_id is None:
            raise refused("needs trajectory_id", "token_rewards")
        if self.user is not None and (self.trajectory_id is None or self.score is None):
            raise refused("needs trajectory_id and score", "user")
        return self
