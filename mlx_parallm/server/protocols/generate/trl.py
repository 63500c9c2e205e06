"""`/generate` as TRL's own vLLM server has it (`trl vllm-serve`), which Atropos calls with `server_type: trl`."""

from __future__ import annotations

from typing import Any, ClassVar

from mlx_parallm.server.api.answer import collected_fields
from mlx_parallm.server.api.fields import WireOutput
from mlx_parallm.server.api.logprobs import finite
from mlx_parallm.server.api.sampling_fields import sent_sampling
from mlx_parallm.server.protocols.generate.choices import WholeRequest, WholeWriter
from mlx_parallm.server.protocols.generate.schema import GenerateBody


class TRLAnswer(WireOutput):
    """The answer to a body with `prompts`."""

    LONG: ClassVar[bool] = True

    prompt_ids: list[list[int]]
    """The tokens of each prompt."""
    completion_ids: list[list[int]]
    """The generated tokens of each answer, with the one that ended it; those of one prompt follow each other."""
    logprobs: list[list[float]]
    """The logprob of each of these tokens, in nats."""
    trajectory_ids: list[str] | None = None
    """One id for each answer, with `collect_trajectory`."""
    trajectory_warning: str | None = None
    """Why the trajectories will not be used for training."""


def trl_completion(body: GenerateBody) -> dict[str, Any]:
    """The fields of the completion that a body with `prompts` asks for."""
    return {**sent_sampling(body), "max_tokens": body.max_tokens, "logprobs": 0}


class TRLWriter(WholeWriter):
    """Writes a `TRLAnswer`."""

    def _answer(self, whole: WholeRequest) -> TRLAnswer:
        return TRLAnswer(
            prompt_ids=[list(prompt) for prompt in self.request.prompts],
            completion_ids=[choice.token_ids for choice in whole.choices],
            logprobs=[[finite(token.logprob) for token in choice.logprobs] for choice in whole.choices],
            **collected_fields(self.request, whole.finished),
        )
