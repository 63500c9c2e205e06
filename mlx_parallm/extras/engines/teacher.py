"""A teacher on the server of an outside engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from mlx_parallm.config.training import TeacherConfig
from mlx_parallm.extras.engines.http import EngineServer
from mlx_parallm.extras.engines.openai import COMPLETIONS, choices_of
from mlx_parallm.rl.teachers import Score


def teacher_at(config: TeacherConfig) -> tuple[Score, Callable[[], Awaitable[None]]]:
    """How the teacher on another server scores, and what ends its connection."""
    assert config.url is not None
    key = config.api_key.get_secret_value() if config.api_key else ""
    server = EngineServer("teacher's", config.url, key, 2 * config.timeout_s)  # `Teacher` has the shorter limit
    return server_score(server, config.model or ""), server.close


def server_score(server: EngineServer, model: str) -> Score:
    """Scores by a model of another server, whose completions take token ids and `prompt_logprobs`, as vLLM's do."""

    async def score(ids: tuple[int, ...], first: int) -> Sequence[float | None]:
        body = {"model": model, "prompt": [list(ids)], "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        (choice,) = choices_of(server, await server.post(COMPLETIONS, body), 1)
        scores = choice.get("prompt_logprobs")
        if not isinstance(scores, list) or len(scores) != len(ids):
            raise server.unusable("gives no prompt_logprobs for each token of the prompt")
        return [None, *(_logprob(server, token, each) for token, each in zip(ids[1:], scores[1:], strict=True))]

    return score


def _logprob(server: EngineServer, token: int, scores: object) -> float:
    """That of this token, in an entry of `prompt_logprobs`: an object by token id."""
    found = scores.get(str(token)) if isinstance(scores, dict) else None
    value = found.get("logprob") if isinstance(found, dict) else None
    if not isinstance(value, int | float):
        raise server.unusable(f"gives no log-probability for the token {token}: it may have another tokenizer")
    return float(value)
