"""Rewards that a language model gives, over HTTP: `judge` grades each answer, `rank` compares the answers of a group.

The model is any that has OpenAI's chat API, the base model on this very server too. Only child processes ask it.
"""

from __future__ import annotations

import itertools
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from mlx_parallm.rl.scoring.sample import GroupScorer, Metadata, ScorerError, ScorerInput, as_number

_AT_ONCE = 8
"""Answers of a group that are graded at the same time."""

_PAUSES_S = (0.5, 1.0, 2.0, 4.0)
"""Pauses before another try, when the model's server is busy."""

_BUSY = frozenset({429, 500, 502, 503, 504})
_MAX_BODY = 1 << 20
_SHOWN = 120
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})

_BEST = 10
"""The best score. Whole numbers keep a small model from writing digits without end. Rewards are scores / _BEST."""

_NUMBER = {"type": "integer", "minimum": 0, "maximum": _BEST}
_SCALE = f"a whole number from 0 (worst) to {_BEST} (best)"

_GRADE = "You grade an answer. The best one is right and does all that was asked. The worst is wrong or useless."
_COMPARE = (
    "You compare several answers to the same conversation. A better answer must get a higher score, even if all are "
    "good or all are bad."
)


@dataclass(frozen=True, slots=True)
class Judge:
    """The model that gives rewards.

    Attributes:
        url: base URL of the API, such as http://127.0.0.1:8000/v1; empty if there is none to ask.
        instruction: what a good answer is; empty means a general one.
        api_key: sent as a bearer token; empty means none.
    """

    url: str = ""
    model: str = "base"
    instruction: str = ""
    api_key: str = field(default="", repr=False)


def grader(judge: Judge) -> GroupScorer:
    """Has the model grade each answer by itself, several at the same time, which gives rewards from 0 to 1."""
    instruction = f'{judge.instruction or _GRADE}\nReply with JSON: {{"score": {_SCALE}}}.'

    def score(group: Sequence[ScorerInput]) -> list[float | None]:
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            return list(threads.map(grade, group))

    def grade(sample: ScorerInput) -> float:
        text = f"{_conversation(sample, -1)}\n\n<answer>\n{sample.text}\n</answer>"
        return _reward(_asked(judge, instruction, text, {"score": _NUMBER}).get("score"))

    return score


def ranker(judge: Judge) -> GroupScorer:
    """Shows the model all answers of a group at once. It scores each, which gives rewards from 0 to 1."""
    instruction = f"{judge.instruction or _COMPARE}\nReply with JSON: "

    def score(group: Sequence[ScorerInput]) -> list[float | None]:
        shared = _shared_turns(group)
        rests = [_turns(sample.messages[shared:-1]) + sample.text for sample in group]
        answers = [f'<answer number="{number}">\n{rest}\n</answer>' for number, rest in enumerate(rests, 1)]
        text = "\n\n".join([_conversation(group[0], shared), *answers])
        schema = {"scores": {"type": "array", "items": _NUMBER, "minItems": len(group), "maxItems": len(group)}}
        wanted = f'{{"scores": [{len(group)} numbers in the order of the answers, each {_SCALE}]}}.'
        scores = _asked(judge, instruction + wanted, text, schema).get("scores")
        if not isinstance(scores, list) or len(scores) != len(group):
            raise ScorerError(f"the judge did not give {len(group)} scores")
        return list(map(_reward, scores))

    return score


JUDGE = "judge"

JUDGES: Mapping[str, Callable[[Judge], GroupScorer]] = {JUDGE: grader, "rank": ranker}
"""Names in the configured reward. A request cannot use them."""

INSTRUCTION = "instruction"
"""The key of `metadata` for the judge's instruction, if a lesson has JUDGE as its scorer."""


# ---- what the model is asked ---------------------------------------------------------------------


def _conversation(sample: ScorerInput, end: int) -> str:
    """The conversation up to its message `end`, and the right answer if the task has one."""
    known = sample.metadata.get("answer")
    reference = "" if known is None else f"\n\n<reference_answer>\n{known}\n</reference_answer>"
    return f"<conversation>\n{_turns(sample.messages[:end])}</conversation>{reference}"


def _turns(messages: Sequence[Metadata]) -> str:
    return "".join(f"{turn.get('role')}: {_text_of(turn)}\n\n" for turn in messages)


def _text_of(turn: Metadata) -> str:
    """The text of a message, and the calls of tools in it as JSON."""
    calls = (json.dumps(call.get("function"), ensure_ascii=False) for call in turn.get("tool_calls") or ())
    return "\n".join(filter(None, [turn.get("content"), *calls]))


def _shared_turns(group: Sequence[ScorerInput]) -> int:
    """How many messages the conversations of the group begin with in common, their answers not counted. Those of
    episodes may differ after the first turn."""
    first, *others = (sample.messages[:-1] for sample in group)
    same = (all(len(other) > at and other[at] == turn for other in others) for at, turn in enumerate(first))
    return sum(1 for _ in itertools.takewhile(bool, same))


def _reward(score: object) -> float:
    """The reward, from 0 to 1, for a score that the model gave."""
    try:
        number = as_number(score)
    except TypeError:
        number = -1.0
    if not 0 <= number <= _BEST:
        raise ScorerError(f"the judge gave {str(score)[:_SHOWN]!r}; a score is a number from 0 to {_BEST}")
    return number / _BEST


def _asked(judge: Judge, instruction: str, text: str, properties: Mapping[str, object]) -> Mapping[str, Any]:
    """The JSON object that the model replies with.

    Raises:
        ScorerError: the model's server cannot be reached or refuses, or the reply is no JSON object.
    """
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    reply = _post(
        judge,
        {
            "model": judge.model,
            "messages": [{"role": "system", "content": instruction}, {"role": "user", "content": text}],
            "temperature": 0,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "scores", "strict": True, "schema": schema},
            },
        },
    )
    content: object = reply.decode("utf-8", "replace")
    try:
        content = json.loads(reply)["choices"][0]["message"]["content"]
        value = json.loads(str(content))
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ScorerError(f"the judge did not reply with a JSON object but with {str(content)[:_SHOWN]!r}")
    return value


# ---- HTTP ----------------------------------------------------------------------------------------


def _post(judge: Judge, body: Mapping[str, object]) -> bytes:
    """The body of the answer. A server that is busy is asked again; the pool's time limit bounds all of it."""
    if not judge.url:
        raise ScorerError("the judge has no server to ask: set rl_training.judge.url")
    for pause_s in (*_PAUSES_S, None):
        try:
            return _posted(judge, body)
        except urllib.error.HTTPError as error:
            problem = f"answered {error.code}: {error.read(_MAX_BODY).decode('utf-8', 'replace')[:_SHOWN]}"
            if error.code not in _BUSY or pause_s is None:
                break
        except (OSError, HTTPException) as error:
            problem = f"cannot be reached: {getattr(error, 'reason', error)}"
            if pause_s is None:
                break
        time.sleep(pause_s)
    raise ScorerError(f"the judge at {judge.url} {problem}")


def _posted(judge: Judge, body: Mapping[str, object]) -> bytes:
    headers = {"Content-Type": "application/json"}
    if judge.api_key:
        headers["Authorization"] = f"Bearer {judge.api_key}"
    address = f"{judge.url.rstrip('/')}/chat/completions"
    request = urllib.request.Request(address, json.dumps(body).encode(), headers)
    direct = urlsplit(judge.url).hostname in _LOOPBACK  # a proxy does not know this machine's addresses
    opener = urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if direct else []))
    with opener.open(request) as response:
        answer: bytes = response.read(_MAX_BODY)
    return answer
