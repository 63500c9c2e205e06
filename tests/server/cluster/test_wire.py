"""What a request and its events become on their way to another node and back."""

import dataclasses

import pytest

from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.grammar import GrammarKind, GrammarSpec, SpecifiedGrammar
from mlx_parallm.core.requests import (
    CollectionSpec,
    FinishReason,
    GenerationRequest,
    PromptScored,
    RepetitionLimits,
    RequestFailed,
    RequestFinished,
    RequestStarted,
    SamplingParams,
    SequenceOutput,
    StopParams,
    TokenLogprob,
    WorkClass,
)
from mlx_parallm.errors import InvalidRequestError, OverloadedError, QueueTimeoutError
from mlx_parallm.extras.cluster.http.wire import WireEvent, WireRequest, may_travel

SPEC = GrammarSpec(GrammarKind.REGEX, "[a-z]+", frozenset({3}), reasoning_budget=9)
GRAMMAR = SpecifiedGrammar(SPEC, object())
REQUEST = GenerationRequest(
    "cmpl-1",
    ((1, 2, 3), (4,)),
    SamplingParams(
        temperature=float("inf"), seed=2**63, logit_bias=((5, -100.0),), allowed_tokens=b"\x00\xff", top_logprobs=2
    ),
    StopParams(7, stop=("aab", "\n"), stop_token_ids=(9,), repetition=RepetitionLimits(max_period=9)),
    n=3,
    prompt_logprobs=0,
    adapter=AdapterRef("math", 4),
    work_class=WorkClass.TRAINING,
    priority=-2,
    grammar=GRAMMAR,
    visible_specials=frozenset({256}),
    cache_salt="é",
    key="team",
    whole=True,
)
SCORE = TokenLogprob(5, float("-inf"), [(5, -0.25), (6, float("-inf"))], 1)


def test_a_request_arrives_as_it_was_sent():
    arrived = WireRequest.model_validate_json(WireRequest.of(REQUEST).model_dump_json())
    assert arrived.grammar == SPEC
    assert arrived.request(GRAMMAR) == REQUEST


def test_no_field_of_a_request_is_forgotten():
    """A new field either travels or is among those for which a request stays."""
    stays = {"collection", "pooling", "base"}
    fields = {field.name for field in dataclasses.fields(GenerationRequest)}
    assert fields - stays | {"collected"} == set(WireRequest.model_fields)


def test_another_node_gives_what_a_collected_answer_needs_and_collects_nothing_itself():
    sent = dataclasses.replace(REQUEST, collection=CollectionSpec("exact", {"answer": "4"}, ({"role": "user"},)))
    arrived = WireRequest.model_validate_json(WireRequest.of(sent).model_dump_json()).request(GRAMMAR)
    assert arrived.collection == CollectionSpec()
    assert dataclasses.replace(arrived, collection=sent.collection) == sent


@pytest.mark.parametrize("change", [{"pooling": object()}, {"grammar": object()}, {"prompt_logprobs": 200}])
def test_what_another_node_cannot_answer_stays(change):
    assert may_travel(REQUEST)
    assert not may_travel(dataclasses.replace(REQUEST, **change))


@pytest.mark.parametrize(
    "event",
    [
        PromptScored(1, (None, SCORE)),
        SequenceOutput(2, (5, 6), "ä\ud7ff\x00", (SCORE,), FinishReason.STOP, "\n"),
        SequenceOutput(0, (), "", finish_reason=FinishReason.LENGTH, stop_reason=7),
        SequenceOutput(0, (5,), "x"),
    ],
)
def test_an_event_arrives_as_it_was_sent(event):
    assert WireEvent.model_validate_json(WireEvent.line(event)).event(5.0) == event


def test_times_are_moved_to_the_clock_of_the_head():
    for event, names in (
        (RequestStarted(1.0, 2.0), ("arrived_at", "started_at")),
        (RequestFinished(3, 4, 1.0, 2.0, 3.0, 4.0, 1), ("arrived_at", "started_at", "first_token_at", "finished_at")),
    ):
        arrived = WireEvent.model_validate_json(WireEvent.line(event)).event(100.0)
        moved = {name: getattr(event, name) + 100.0 for name in names if hasattr(event, name)}
        assert arrived == dataclasses.replace(event, **moved)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (QueueTimeoutError("it waited 600 s"), "it waited 600 s"),
        (InvalidRequestError("too long", param="stop"), "too long"),
        (OverloadedError("full", retry_after_s=9), "full"),
        (MemoryError("no room"), "no room"),
    ],
)
def test_an_error_keeps_its_kind_its_text_and_its_field(error, message):
    arrived = WireEvent.model_validate_json(WireEvent.line(RequestFailed(error))).event(0.0).error
    known = type(error).__module__.startswith("mlx_parallm")
    assert str(arrived) == message
    assert getattr(arrived, "param", None) == getattr(error, "param", None)
    assert not known or type(arrived) is type(error)
