"""MAX (`max serve`), whose completions have the texts of tokens but no ids."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar

from mlx_parallm.adapters.files.read import FormatName
from mlx_parallm.core import TextTokenizer
from mlx_parallm.rl.inference.api import Draw, Sample, sample_of
from mlx_parallm.rl.inference.http import EngineServer
from mlx_parallm.rl.inference.openai import COMPLETIONS, OpenAIApi, choices_of, logprobs_of

_UNFILTERED = {"top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0}


class MaxApi(OpenAIApi):
    """MAX, started with `--enable-lora` and `--no-enable-overlap-scheduler`, without which it gives no logprobs.

    A token's id is that of the only token of the vocabulary with its text. MAX ignores `n`, so the prompt is sent `n`
    times; seeds are not sent, because all of them would get the same one.
    """

    adapter_format: ClassVar[FormatName] = "peft"
    ROUTES = ("/v1",)

    def __init__(self, server: EngineServer, model: str | None, tokenizer: TextTokenizer) -> None:
        super().__init__(server, model)
        self._tokenizer = tokenizer

    async def draw(self, draw: Draw, adapter: Any) -> list[Sample]:
        body = {
            "model": adapter.name if adapter else self._model,
            "prompt": [list(draw.prompt_ids)] * draw.n,
            "max_tokens": draw.max_tokens,
            "temperature": draw.temperature,
            "logprobs": 1,
            **_UNFILTERED,
        }
        choices = choices_of(self._server, await self._server.post(COMPLETIONS, body), draw.n)
        return [self._sample(logprobs_of(choice)) for choice in choices]

    def _sample(self, logprobs: Mapping[str, Any]) -> Sample:
        values, candidates = logprobs.get("token_logprobs"), logprobs.get("top_logprobs")
        if not isinstance(values, list) or not isinstance(candidates, list) or len(values) != len(candidates):
            return sample_of(self._server, [], None)
        return sample_of(self._server, list(map(self._drawn, values, candidates)), values)

    def _drawn(self, logprob: object, candidates: object) -> int:
        """The id of the token with this logprob, out of the texts and logprobs of the likely tokens and the drawn one.

        Raises:
            EngineServerError: several tokens have its text or its logprob, or none has.
        """
        texts = [text for text, value in candidates.items() if value == logprob] if isinstance(candidates, dict) else []
        ids = [token for text in texts for token in self._ids_by_text.get(text, ())]
        if len(ids) != 1:
            raise self._server.unusable(f"gives texts of tokens only, and {texts!r} can be {len(ids)} tokens")
        return ids[0]

    @cached_property
    def _ids_by_text(self) -> Mapping[str, list[int]]:
        ids: dict[str, list[int]] = {}
        for token in range(self._tokenizer.vocab_size):
            ids.setdefault(self._tokenizer.decode([token]), []).append(token)
        return ids
