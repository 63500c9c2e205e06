"""The section `rl_training.divergence`: when an update counts as diverged, and what is done then. The string below a
field is its description."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, model_validator

from mlx_parallm.config.types import ApiKey, Number, Section, lower


class Action(StrEnum):
    """What is done about a divergence, besides reporting it. All but TELL keep the update's version from going live."""

    TELL = "tell"
    HOLD = "hold"
    PAUSE = "pause"
    ROLL_BACK = "roll_back"


OneAction = Annotated[Action, BeforeValidator(lower)]


class NotFiniteLimit(Section):
    """A loss, gradient, weight or metric that is not a finite number. Such an update is never kept."""

    action: OneAction = Action.HOLD
    """hold, pause or roll_back."""

    @model_validator(mode="after")
    def _does_more_than_tell(self) -> Self:
        if self.action is Action.TELL:
            raise ValueError("action tell would publish numbers that are not finite; use hold, pause or roll_back")
        return self


class KlStepLimit(Section):
    """How far one update moved the policy."""

    limit: Number | None = Field(default=2.0, gt=0)
    """Largest KL divergence of the policy before the update from the one after it, in nats per token. It is measured
    before the version goes live, which costs one more forward pass over a quarter of the tokens. cross_entropy, dpo and
    kto are not measured. null means no limit.
    """
    action: OneAction = Action.HOLD
    """tell, hold, pause or roll_back."""


class RatioLimit(Section):
    """How far the policy has moved since the samples of the update."""

    limit: Number | None = Field(default=2.0, gt=1)
    """Largest mean policy ratio over the trained tokens; the mean must not be below 1 / limit either. It is 1 for
    samples of the version in training, and far from it for samples of another model. null means no limit.
    """
    action: OneAction = Action.TELL
    """tell, hold, pause or roll_back."""


class KlLimit(Section):
    """How far the policy is from the base model."""

    limit: Number | None = Field(default=10.0, gt=0)
    """Largest KL divergence of the policy from the base model in two updates in a row, in nats per token. A single
    large value is often chance, because the divergence is estimated from a few samples. null means no limit.
    """
    action: OneAction = Action.TELL
    """tell, hold, pause or roll_back."""


class EntropyLimit(Section):
    """Whether the policy has become certain of its answers while these became worse."""

    limit: Number | None = Field(default=0.1, gt=0, lt=1)
    """Smallest entropy, as a fraction of the median of the last 8 updates. It may be smaller if the mean reward is
    not below its median. null means no limit.
    """
    action: OneAction = Action.PAUSE
    """tell, hold, pause or roll_back."""


class LengthLimit(Section):
    """Whether answers have become much longer, and worse."""

    limit: Number | None = Field(default=3.0, gt=1)
    """Largest mean number of completion tokens, as a multiple of the median of the last 8 updates. It may be larger if
    the mean reward is not below its median. null means no limit.
    """
    action: OneAction = Action.TELL
    """tell, hold, pause or roll_back."""


class RewardLimit(Section):
    """Whether rewards have collapsed."""

    limit: Number | None = Field(default=0.15, gt=0)
    """Largest fall of the running mean reward below its best value. The fall must also exceed eight standard errors, so
    that chance alone does not cause it. null means no limit.
    """
    action: OneAction = Action.ROLL_BACK
    """tell, pause or roll_back."""

    @model_validator(mode="after")
    def _acts_on_live_versions(self) -> Self:
        if self.action is Action.HOLD:
            raise ValueError(
                "action hold is for new versions, and rewards are of live ones; use tell, pause or roll_back"
            )
        return self


class DivergenceConfig(Section):
    """When an update counts as diverged, and what is done then: tell (an event, a metric and the webhook), hold (the
    version does not go live either, and the policy is as before), pause (automatic updates stop too), or roll_back (the
    best version goes live again; if that is the live one, the update is only held). After max_skips updates in a row
    that were held, training pauses."""

    not_finite: NotFiniteLimit = NotFiniteLimit()
    kl_step: KlStepLimit = KlStepLimit()
    ratio: RatioLimit = RatioLimit()
    kl: KlLimit = KlLimit()
    entropy: EntropyLimit = EntropyLimit()
    length: LengthLimit = LengthLimit()
    reward: RewardLimit = RewardLimit()
    webhook: ApiKey | None = Field(default=None, repr=False)
    """URL that gets a POST with a JSON object for each divergence. Such URLs are often secrets: prefer the environment
    variable, because flags and files are easily seen by others. null means none.
    """

    @model_validator(mode="after")
    def _webhook_is_a_url(self) -> Self:
        if self.webhook is not None:
            parts = urlsplit(self.webhook.get_secret_value())
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError("webhook must begin with http:// or https://, such as https://hooks.example.org/T000")
        return self
