"""`/generate` as SGLang's server has it (`GenerateReqInput` in `sglang/srt/managers/io_struct.py`). Its logprobs are
those after temperature, whatever `--logprobs-mode` says, because SGLang's are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from mlx_parallm.core import FinishReason, TokenLogprob
from mlx_parallm.server.api.answer import collected_fields
from mlx_parallm.server.api.fields import WireList, WireOutput
from mlx_parallm.server.api.logprobs import finite, token_text
from mlx_parallm.server.api.sampling_fields import sent_sampling
from mlx_parallm.server.protocols.generate.choices import WholeChoice, WholeRequest, WholeWriter
from mlx_parallm.server.protocols.generate.schema import GenerateBody

Entry = tuple[float | None, int, str | None]
"""A logprob in nats, null for the first token of a prompt; the token's id; and its text or null."""


class SGLangMeta(WireOutput):
    """What is known about one answer."""

    LONG: ClassVar[bool] = True

    id: str
    """The `rid` of the request, or the server's id of it."""
    finish_reason: dict[str, str | int]
    """`{"type": "stop", "matched": …}` with the stop string or the token that ended the answer, or `{"type": "length",
    "length": …}` with the number of tokens."""
    prompt_tokens: int
    """Tokens of the prompt."""
    completion_tokens: int
    """Generated tokens."""
    cached_tokens: int
    """Tokens of all prompts of the request that were taken from the prefix cache."""
    output_token_logprobs: list[Entry] | None = None
    """With `return_logprob`: logprob, id and text of each generated token. The text is null, unless the request asks
    for it."""
    output_top_logprobs: list[list[Entry]] | None = None
    """With `top_logprobs_num`: the same of the most likely tokens at each position."""
    input_token_logprobs: list[Entry] | None = None
    """With `logprob_start_len`: the same of the prompt's tokens from that one on."""
    input_top_logprobs: list[list[Entry]] | None = None
    """With both: the most likely tokens at the positions of the prompt."""
    trajectory_id: str | None = None
    """With `collect_trajectory`."""
    trajectory_warning: str | None = None
    """Why the trajectory will not be used for training."""


class SGLangAnswer(WireOutput):
    """One answer to a body with `input_ids` or `text`. Several answers are a list of these."""

    LONG: ClassVar[bool] = True

    text: str
    """The answer."""
    output_ids: list[int]
    """The generated tokens, with the one that ended the answer."""
    meta_info: SGLangMeta
    """What is known about it."""


def sglang_completion(body: GenerateBody) -> dict[str, Any]:
    """The fields of the completion that a body with `input_ids` or `text` asks for."""
    sampling = body.sampling_params
    scores_prompt = body.return_logprob and body.logprob_start_len >= 0
    return {
        **sent_sampling(sampling),
        "max_tokens": sampling.max_new_tokens,
        "min_tokens": sampling.min_new_tokens or sampling.min_tokens,
        "seed": sampling.seed if sampling.sampling_seed is None else sampling.sampling_seed,
        "logprobs": body.top_logprobs_num if body.return_logprob else None,
        "prompt_logprobs": body.top_logprobs_num if scores_prompt else sampling.prompt_logprobs,
        "lora_adapter": body.lora_adapter or body.lora_path,
    }


class SGLangWriter(WholeWriter):
    """Writes an `SGLangAnswer`, or a list of them if there are several prompts or answers."""

    def _answer(self, whole: WholeRequest) -> WireOutput:
        collected = collected_fields(self.request, whole.finished)
        ids = collected.pop("trajectory_ids", [None] * len(whole.choices))
        answers = [
            self._one(whole, choice, collected if each is None else {**collected, "trajectory_id": each})
            for choice, each in zip(whole.choices, ids, strict=True)
        ]
        listed = self.request.n > 1 or isinstance((self.sent.input_ids or [0])[0], list) or len(answers) > 1
        return WireList(items=answers) if listed else answers[0]

    def _one(self, whole: WholeRequest, choice: WholeChoice, collected: dict[str, Any]) -> SGLangAnswer:
        meta = SGLangMeta(
            id=self.sent.rid or self.request.request_id,
            finish_reason=_finish_reason(choice),
            prompt_tokens=len(self.request.prompts[choice.prompt]),
            completion_tokens=len(choice.token_ids),
            cached_tokens=whole.finished.cached_tokens,
            **self._logprobs(whole, choice),
            **collected,
        )
        return SGLangAnswer(text=choice.text, output_ids=choice.token_ids, meta_info=meta)

    def _logprobs(self, whole: WholeRequest, choice: WholeChoice) -> dict[str, Any]:
        if not self.sent.return_logprob:
            return {}
        start = self.sent.logprob_start_len
        fields: dict[str, Any] = {"output_token_logprobs": [self._entry(token) for token in choice.logprobs]}
        if self.sent.top_logprobs_num:
            fields["output_top_logprobs"] = self._tops(choice.logprobs)
        if start >= 0:
            prompt = self.request.prompts[choice.prompt]
            scores = whole.prompt_logprobs[choice.prompt]
            pairs = list(zip(prompt, scores, strict=True))[start:]
            fields["input_token_logprobs"] = [
                (None, token_id, self._text(token_id)) if token is None else self._entry(token)
                for token_id, token in pairs
            ]
            if self.sent.top_logprobs_num:
                fields["input_top_logprobs"] = self._tops(token for _, token in pairs)
        return fields

    def _tops(self, tokens: Iterable[TokenLogprob | None]) -> list[list[Entry]]:
        top = self.sent.top_logprobs_num
        return [[(finite(v), i, self._text(i)) for i, v in token.top[:top]] if token else [] for token in tokens]

    def _entry(self, token: TokenLogprob) -> Entry:
        return finite(token.logprob), token.token_id, self._text(token.token_id)

    def _text(self, token_id: int) -> str | None:
        return token_text(self.tokenizer, token_id) if self.sent.return_text_in_logprobs else None


def _finish_reason(choice: WholeChoice) -> dict[str, str | int]:
    if choice.finish_reason is FinishReason.LENGTH:
        return {"type": "length", "length": len(choice.token_ids)}
    return {"type": "stop", "matched": choice.token_ids[-1] if choice.stop_reason is None else choice.stop_reason}
