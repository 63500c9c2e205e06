"""The section `rl_training.teacher`: what distillation imitates. The string below a field is its description."""

from __future__ import annotations

from typing import Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from mlx_parallm.config.types import ApiKey, Number, Section, Text


class TeacherConfig(Section):
    """The model that distillation imitates: an adapter or the base model here, or a model of another server."""

    adapter: Text | None = None
    """Adapter of this server that teaches, such as tone or tone@3. null means the base model."""
    prompt: Text | None = None
    """Text that only the teacher sees, before the prompt of each sample, with the special tokens of the chat template
    if it is a message. A value that begins with @ names a file that has the text. null means none.
    """
    url: Text | None = None
    """Base URL of another server that teaches, such as http://127.0.0.1:8001/v1. It must answer completions of token
    ids with prompt_logprobs, as vLLM and this server do, and its model must have the same tokenizer. null means this
    server.
    """
    model: Text | None = None
    """Model that the other server is asked for. Needed with url."""
    api_key: ApiKey | None = Field(default=None, repr=False)
    """Secret that is sent to url as a bearer token. null means none. Prefer the environment variable, because flags and
    files are easily seen by others.
    """
    timeout_s: Number = Field(default=60.0, gt=0)
    """Longest wait for the teacher's log-probabilities of one sample, in seconds. A sample without them is left out."""

    @property
    def is_set(self) -> bool:
        """Whether there is a teacher that differs from the base model as it is."""
        return any(value is not None for value in (self.adapter, self.prompt, self.url))

    @model_validator(mode="after")
    def _url_is_complete(self) -> Self:
        if self.url is None:
            if self.model is not None:
                raise ValueError("model is a model of another server: set url too, or adapter in its place")
            return self
        if urlsplit(self.url).scheme not in ("http", "https") or not urlsplit(self.url).netloc:
            raise ValueError("url must begin with http:// or https://, such as http://127.0.0.1:8001/v1")
        if self.model is None:
            raise ValueError("url needs model, the name that its server gives the teacher")
        if self.adapter is not None:
            raise ValueError("url and adapter name two teachers: leave one of them out")
        return self
