"""SGLang's own `/generate`, which takes and returns token ids."""

from __future__ import annotations

from typing import Any, ClassVar

from mlx_parallm.adapters.formats import FormatName
from mlx_parallm.extras.engines.api import Draw, Sample, SentAdapter, sample_of
from mlx_parallm.extras.engines.http import EngineServer
from mlx_parallm.extras.engines.openai import UNFILTERED


class SglangApi:
    """SGLang, started with `--enable-lora` and `--max-lora-rank`. It takes a LoRA by `/load_lora_adapter`.

    Its logprobs are computed after the temperature, unless SGLANG_RETURN_ORIGINAL_LOGPROB is set there. Seeds are not
    sent, because all samples of a request would get the same one.
    """

    adapter_format: ClassVar[FormatName] = "peft"
    logprobs_at_temperature: ClassVar[bool] = True

    def __init__(self, server: EngineServer) -> None:
        self._server = server

    async def connect(self) -> None:
        await self._server.get("/health")

    async def load(self, adapter: SentAdapter) -> None:
        body: dict[str, object] = {"lora_name": adapter.name, "lora_path": str(adapter.folder)}
        self._check(await self._server.post("/load_lora_adapter", body))

    async def unload(self, adapter: SentAdapter) -> None:
        self._check(await self._server.post("/unload_lora_adapter", {"lora_name": adapter.name}))

    def _check(self, answer: Any) -> None:
        if isinstance(answer, dict) and answer.get("success") is False:
            raise self._server.unusable(f"refused a LoRA: {answer.get('error_message', 'no reason given')}")

    async def draw(self, draw: Draw, adapter: SentAdapter | None) -> list[Sample]:
        sampling = {
            "n": draw.n,
            "max_new_tokens": draw.max_tokens,
            "temperature": draw.temperature,
            **UNFILTERED,
        }
        body: dict[str, object] = {
            "input_ids": list(draw.prompt_ids),
            "sampling_params": sampling,
            "return_logprob": True,
        }
        if adapter is not None:
            body["lora_path"] = adapter.name
        answer = await self._server.post("/generate", body)
        answers = answer if isinstance(answer, list) else [answer]
        if len(answers) != draw.n:
            raise self._server.unusable(f"gave {len(answers)} answers to a request for {draw.n}")
        return [self._sample(one) for one in answers]

    def _sample(self, answer: Any) -> Sample:
        """`meta_info.output_token_logprobs` has (logprob, token id, text) for each token."""
        try:
            drawn = answer["meta_info"]["output_token_logprobs"]
            logprobs, token_ids = [entry[0] for entry in drawn], [entry[1] for entry in drawn]
        except (KeyError, IndexError, TypeError):
            return sample_of(self._server, answer.get("output_ids") if isinstance(answer, dict) else None, None)
        return sample_of(self._server, token_ids, logprobs)
