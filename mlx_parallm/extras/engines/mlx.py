"""mlx_lm.server, which takes prompts as text and adapters as a path in each request."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from mlx_parallm.adapters.formats import FormatName
from mlx_parallm.core.text import TextTokenizer
from mlx_parallm.extras.engines.api import Draw, Sample, SentAdapter, sample_of
from mlx_parallm.extras.engines.http import EngineServer
from mlx_parallm.extras.engines.openai import COMPLETIONS, choices_of, logprobs_of

_UNFILTERED = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 0.0}
"""As mlx_lm.server writes them: there, 0 turns the repetition penalty off."""


class MlxApi:
    """mlx_lm.server. It loads the whole model again for each adapter version, and has one answer for each request.

    Its prompts are text, so a prompt is sent as a text that becomes the very same tokens. Seeds are not sent, because a
    request with a seed leaves its batch.
    """

    adapter_format: ClassVar[FormatName] = "mlx-lm"
    logprobs_at_temperature: ClassVar[bool] = False

    def __init__(self, server: EngineServer, model: str, tokenizer: TextTokenizer) -> None:
        """`model`: the directory or hub id that the server was started with. Its `default_model` takes no adapter."""
        self._server = server
        self._model = model
        self._tokenizer = tokenizer

    async def connect(self) -> None:
        await self._server.get("/health")

    async def load(self, adapter: SentAdapter) -> None:
        """Nothing: the next request names the folder."""

    async def unload(self, adapter: SentAdapter) -> None:
        """Nothing: the server has forgotten it when a request names another folder."""

    async def draw(self, draw: Draw, adapter: SentAdapter | None) -> list[Sample]:
        body = {
            "model": self._model,
            "prompt": self._text_of(draw.prompt_ids),
            "max_tokens": draw.max_tokens,
            "temperature": draw.temperature,
            "logprobs": True,
            **_UNFILTERED,
            **({"adapters": str(adapter.folder)} if adapter else {}),
        }
        return list(await asyncio.gather(*(self._one(body, len(draw.prompt_ids)) for _ in range(draw.n))))

    async def _one(self, body: dict[str, object], prompt_tokens: int) -> Sample:
        answer = await self._server.post(COMPLETIONS, body)
        (choice,) = choices_of(self._server, answer, 1)
        seen = answer.get("usage", {}).get("prompt_tokens")
        if seen != prompt_tokens:
            raise self._server.unusable(f"made {seen} tokens of a prompt of {prompt_tokens}: has it another tokenizer?")
        drawn = logprobs_of(choice).get("content")
        entries = drawn if isinstance(drawn, list) and all(isinstance(entry, dict) for entry in drawn) else []
        return sample_of(
            self._server,
            [entry.get("id") for entry in entries] or None,
            [entry.get("logprob") for entry in entries] or None,
        )

    def _text_of(self, ids: tuple[int, ...]) -> str:
        """A text that the server encodes as `ids`. Its tokenizer may put a BOS token before it.

        Raises:
            EngineServerError: there is no such text.
        """
        for first in (0, 1):
            text = self._tokenizer.decode(ids[first:])
            if self._tokenizer.encode(text) == list(ids):
                return text
        raise self._server.unusable("takes prompts as text only, and no text becomes the tokens of this prompt")
