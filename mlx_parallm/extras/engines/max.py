"""MAX (`max serve`), whose completions have token ids since 26.7."""

from __future__ import annotations

from mlx_parallm.extras.engines.api import Draw, Sample, SentAdapter, sample_of
from mlx_parallm.extras.engines.openai import COMPLETIONS, UNFILTERED, OpenAIApi, choices_of, logprobs_of


class MaxApi(OpenAIApi):
    """MAX, started with `--enable-lora` and `--no-enable-overlap-scheduler`, without which it gives no logprobs.

    MAX ignores `n`, so the prompt is sent `n` times; seeds are not sent, because all of them would get the same one.
    `logprobs: 0` means none, so it is asked for the most likely token's too.
    """

    ROUTES = ("/v1",)

    async def draw(self, draw: Draw, adapter: SentAdapter | None) -> list[Sample]:
        body = {
            "model": adapter.name if adapter else self._model,
            "prompt": [list(draw.prompt_ids)] * draw.n,
            "max_tokens": draw.max_tokens,
            "temperature": draw.temperature,
            "logprobs": 1,
            "return_token_ids": True,
            "reasoning_split": False,  # else the logprobs would be those of the tokens after the reasoning only
            **UNFILTERED,
        }
        choices = choices_of(self._server, await self._server.post(COMPLETIONS, body), draw.n)
        return [sample_of(self._server, c.get("token_ids"), logprobs_of(c).get("token_logprobs")) for c in choices]
