"""The section `rl_training.judge`: a language model that gives rewards. The string below a field is its description."""

from __future__ import annotations

from typing import Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from mlx_parallm.config.types import ApiKey, Section, Text


class JudgeConfig(Section):
    """The language model behind the rewards judge and rank."""

    url: Text | None = None
    """Base URL of an OpenAI-compatible API, such as https://api.example.org/v1. null means this server itself, with its
    base model; mlx_parallm_train serves nothing, so there a judge needs a URL.
    """
    model: Text | None = None
    """Model that the judge's server is asked for. null means the base model, which only this server has by that name.
    """
    instruction: Text | None = None
    """What a good answer is, in plain words for the model. null means a general instruction.
    """
    api_key: ApiKey | None = Field(default=None, repr=False)
    """Secret that is sent to url as a bearer token. null means none. Prefer the environment variable, because flags and
    files are easily seen by others.
    """

    @model_validator(mode="after")
    def _url_is_complete(self) -> Self:
        if self.url is None:
            return self
        if urlsplit(self.url).scheme not in ("http", "https") or not urlsplit(self.url).netloc:
            raise ValueError("url must begin with http:// or https://, such as https://api.example.org/v1")
        if self.model is None:
            raise ValueError("url needs model, the name that its server gives the judge")
        return self
