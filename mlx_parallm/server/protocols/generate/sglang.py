"""`/generate` as SGLang's server has it (`GenerateReqInput` in `sglang/srt/managers/io_struct.py`). Its logprobs are
those after temperature, whatever `--logprobs-mode` says, because SGLang's are."""

from __future__ import annotations

from typing import Any, ClassVar

from mlx_parallm.core import FinishReason
from mlx_parallm.server.api.answer import collected_fields
from mlx_parallm.server.api.fields import WireList, WireOutput
from mlx_parallm.server.api.logprobs import finite
from mlx_parallm.server.api.sampling_fields import sent_sampling
from mlx_parallm.server.protocols.generate.choices import WholeChoice, WholeRequest, WholeWriter
from mlx_parallm.server.protocols.generate.schema import GenerateBody

Entry = tuple[float, int, None]
"""A logprob in nats, the token's id, and null."""


class SGLangMeta(WireOutput):
    """What is known about one answer."""

    LONG: ClassVar[bool] = True

    id: str
    """The request's id."""
    finish_reason: dict[str, str | int]
    """`{"type": "stop", "matched": …}` with the stop string or the token that ended the answer, or `{"type": "length",
    "length": …}` with the number of tokens."""
    prompt_tokens: int
    """Tokens of the prompt."""
    completion_tokens: int
    """Generated tokens."""
    cached_tokens: int
    """Tokens of the prompt that were taken from the prefix cache."""
    output_token_logprobs: list[Entry] | None = None
    """With `return_logprob`: logprob and id of each generated token, and null."""
    trajectory_id: str | None = None
    """With `collect_trajectory`."""
    trajectory_warning: str | None = None
    """Why the trajectory will not be used for training."""


class SGLangAnswer(WireOutput):
    """One answer to a body with `input_ids`. Several answers are a list of these."""

    LONG: ClassVar[bool] = True

    text: str
    """The answer."""
    output_ids: list[int]
    """The generated tokens, with the one that ended the answer."""
    meta_info: SGLangMeta
    """What is known about it."""


def sglang_completion(body: GenerateBody) -> dict[str, Any]:
    """The fields of the completion that a body with `input_ids` asks for."""
    sampling = body.sampling_params
    return {
        **sent_sampling(sampling),
        "max_tokens": sampling.max_new_tokens,
        "min_tokens": sampling.min_new_tokens or sampling.min_tokens,
        "seed": sampling.seed if sampling.sampling_seed is None else sampling.sampling_seed,
        "logprobs": 0 if body.return_logprob else None,
    }


class SGLangWriter(WholeWriter):
    """Writes an `SGLangAnswer`, or a list of them if there are several answers."""

    def _answer(self, whole: WholeRequest) -> WireOutput:
        collected = collected_fields(self.request, whole.finished)
        ids = collected.pop("trajectory_ids", [None] * len(whole.choices))
        answers = [
            self._one(whole, choice, collected if each is None else {**collected, "trajectory_id": each})
            for choice, each in zip(whole.choices, ids, strict=True)
        ]
        return WireList(items=answers) if self.request.n > 1 else answers[0]

    def _one(self, whole: WholeRequest, choice: WholeChoice, collected: dict[str, Any]) -> SGLangAnswer:
        fields = collected
        if self.sent.return_logprob:
            drawn = [(finite(token.logprob), token.token_id, None) for token in choice.logprobs]
            fields = {**collected, "output_token_logprobs": drawn}
        meta = SGLangMeta(
            id=self.request.request_id,
            finish_reason=_finish_reason(choice),
            prompt_tokens=len(self.request.prompts[0]),
            completion_tokens=len(choice.token_ids),
            cached_tokens=whole.finished.cached_tokens,
            **fields,
        )
        return SGLangAnswer(text=choice.text, output_ids=choice.token_ids, meta_info=meta)


def _finish_reason(choice: WholeChoice) -> dict[str, str | int]:
    if choice.finish_reason is FinishReason.LENGTH:
        return {"type": "length", "length": len(choice.token_ids)}
    return {"type": "stop", "matched": choice.token_ids[-1] if choice.stop_reason is None else choice.stop_reason}
