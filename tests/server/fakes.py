"""A fake engine and a byte-level tokenizer: HTTP tests need no model, and know every byte."""

import asyncio
import codecs
import time
from array import array
from dataclasses import replace

from mlx_parallm.core.engine import ModelCard
from mlx_parallm.core.requests import (
    FinishReason,
    PromptScored,
    RequestFailed,
    RequestFinished,
    RequestStarted,
    SequenceOutput,
    SequencePooled,
    TokenLogprob,
)
from mlx_parallm.core.text import Reasoning
from mlx_parallm.engine.figures import EngineStats
from mlx_parallm.errors import (
    ContextLengthError,
    EngineDeadError,
    InvalidRequestError,
)
from mlx_parallm.model.tools.formats import HERMES

VOCAB = 258
EOS = 257
CARD = ModelCard("tiny/byte-model", 64, VOCAB, "none", "float32", 1000, 4000)


class ByteTokenizer:
    """One token per UTF-8 byte; 256 is BOS (never added), 257 EOS."""

    vocab_size = VOCAB
    eos_token = "<eos>"
    bos_token = "<bos>"
    eos_token_ids = frozenset({EOS})
    special_ids = frozenset({256, EOS})
    chat_template = "a template"
    tool_format = replace(HERMES, in_template=True)
    reasoning = None

    def encode(self, text, add_special_tokens=True, at_most=None):
        if at_most is not None and len(text) > at_most:
            raise ContextLengthError("the prompt is longer than the context")
        return list(text.encode())

    def decode(self, token_ids, skip_special_tokens=False):
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", "replace")

    def token_bytes(self, token_id):
        return bytes([token_id]) if token_id < 256 else {256: b"<bos>", EOS: b"<eos>"}.get(token_id, b"")

    def token_string(self, token_id):
        return f"0x{token_id:02x}" if token_id < 256 else self.token_bytes(token_id).decode()

    def apply_chat_template(
        self,
        messages,
        add_generation_prompt=True,
        at_most=None,
        *,
        template=None,
        continue_final_message=False,
        **kwargs,
    ):
        if messages[-1]["content"] == "refuse":
            raise InvalidRequestError("the template refuses these messages", param="messages")
        turns = "".join(f"{message['role'][0]}:{message['content']}\n" for message in messages)
        if continue_final_message:
            return self.encode(turns.rstrip("\n"), at_most=at_most)
        if template is not None:
            turns = f"{template}\n{turns}"
        options = "".join(f"{name}={value}\n" for name, value in kwargs.items())
        return self.encode(turns + options + ("a:" if add_generation_prompt else ""), at_most=at_most)


class RecordingTokenizer(ByteTokenizer):
    """Keeps what the template was given last: the messages, and the variables. It renders the messages alone."""

    def apply_chat_template(
        self, messages, add_generation_prompt=True, at_most=None, *, continue_final_message=False, **variables
    ):
        self.given = (messages, {name: value for name, value in variables.items() if value is not None})
        return super().apply_chat_template(
            messages, add_generation_prompt, at_most, continue_final_message=continue_final_message
        )


class ThinkingTokenizer(ByteTokenizer):
    """Of a model that marks its reasoning."""

    reasoning = Reasoning("{think}", "{/think}")


def logprob_of(token_id, top, rank=None):
    """The drawn token is the best, then its successors: -0.5, -1.5, -2.5 …"""
    best = tuple(((token_id + k) % 256, -0.5 - k) for k in range(top))
    return TokenLogprob(token_id, -0.5, best, rank)


class FakeEngine:
    """Says `text` on every choice, one byte a step, cut at max_tokens. Pools a prompt to its length, the sum of its
    tokens, and `rest`.

    `pause_before` k: stops before the k-th event of each request until `go_on` is set, and sets `paused`.
    `fail_before` k: the k-th event is RequestFailed(`error`).
    `hold_calls`: `reschedule`, `pause` and the like wait for `let_go`, having set `called`; `call_error`: what they
    raise then. `schedules`: those put in force. `pauses`: their modes. `slept`: how often it gave its memory back,
    `banks` the adapters' too. `cached`: tokens in the prefix cache, all of which a reset forgets.
    """

    def __init__(self):
        self.text = "Hi ä!"
        self.rest = [0.0, 2.0]
        self.stop_reason = None
        self.reason = FinishReason.STOP  # why a text ends that max_tokens does not cut
        self.silent_end = False  # the last token adds no text, as EOS does not
        self.pause_before = None
        self.fail_before = None
        self.error = None
        self.cached_tokens = 0
        self.warning = ""
        self.paused = asyncio.Event()
        self.go_on = asyncio.Event()
        self.requests = []
        self.live = set()
        self.aborted = 0
        self.hold_calls = False
        self.called = asyncio.Event()
        self.let_go = asyncio.Event()
        self.call_error = None
        self.schedules = []
        self.pauses = []
        self.slept = self.banks = 0
        self.cached = 100
        self.files_removed = False
        self.state = {"alive": True, "ready": True, "kv_bytes_held": 10, "kv_bytes_budget": 40, "running": 3}

    @property
    def prompt_text(self):
        """Of the last request."""
        return bytes(self.requests[-1].prompts[0]).decode()

    def stats(self):
        return EngineStats(**self.state, waiting=0, aborted_total=self.aborted, detail={"rows": []})

    async def reschedule(self, schedule):
        await self._call()
        self.schedules.append(schedule)
        self.state["schedule"] = schedule

    async def pause(self, mode):
        await self._call()
        self.pauses.append(mode)
        self.state["paused"] = True

    async def resume(self):
        await self._call()
        self.state["paused"] = False

    async def reset_prefix_cache(self, files=False):
        await self._call()
        self.files_removed |= files
        forgotten, self.cached = self.cached, 0
        return forgotten

    async def sleep(self, bank=False):
        assert not self.live
        await self._call()
        self.slept += 1
        self.banks += bank

    async def _call(self):
        self.called.set()
        if self.hold_calls:
            await self.let_go.wait()
        if self.call_error:
            raise self.call_error

    async def generate(self, request):
        if not self.state["alive"]:
            raise EngineDeadError("gone")
        self.requests.append(request)
        self.live.add(request.request_id)
        finished = False
        try:
            yield RequestStarted(time.monotonic() - 0.1, time.monotonic())
            for step, event in enumerate(self._events(request)):
                if step == self.pause_before:
                    self.paused.set()
                    await self.go_on.wait()
                await asyncio.sleep(0)
                if step == self.fail_before:
                    finished = True
                    yield RequestFailed(self.error)
                    return
                finished = isinstance(event, RequestFinished)
                yield event
        finally:
            self.live.remove(request.request_id)
            self.aborted += not finished

    def _events(self, request):
        if request.pooling is not None:
            for index, prompt in reversed(list(enumerate(request.prompts))):
                yield SequencePooled(index, array("f", [len(prompt), sum(prompt), *self.rest]).tobytes())
            yield self._finished(request, 0)
            return
        if request.prompt_logprobs is not None:
            for number, prompt in enumerate(request.prompts):
                first = max(1, request.scored_from)
                scores = tuple(logprob_of(token, request.prompt_logprobs, rank=1) for token in prompt[first:])
                yield PromptScored(number, (*(None for _ in prompt[:first]), *scores))
        tokens = list(self.text.encode())[: request.stopping.max_tokens]
        if not tokens:
            for index in range(request.sequences):
                yield SequenceOutput(index, (), "", finish_reason=FinishReason.LENGTH)
        decoders = [codecs.getincrementaldecoder("utf-8")() for _ in range(request.sequences)]
        for step, token in enumerate(tokens):
            for index, decoder in enumerate(decoders):
                yield self._output(request, index, token, decoder.decode(bytes([token])), step == len(tokens) - 1)
        yield self._finished(request, len(tokens) * request.sequences)

    def _output(self, request, index, token, text, last):
        top = request.sampling.top_logprobs
        logprobs = () if top is None else (logprob_of(token, top),)
        if not last:
            return SequenceOutput(index, (token,), text, logprobs)
        cut = len(self.text.encode()) > request.stopping.max_tokens
        reason = FinishReason.LENGTH if cut else self.reason
        text = "" if self.silent_end else text
        return SequenceOutput(index, (token,), text, logprobs, reason, self.stop_reason)

    def _finished(self, request, completion_tokens):
        now = time.monotonic()
        prompt_tokens = sum(map(len, request.prompts))
        collected = range(request.sequences) if request.collection else ()
        ids = tuple(f"traj-{index}" for index in collected)
        return RequestFinished(
            prompt_tokens,
            completion_tokens,
            now - 0.4,
            now - 0.3,
            now - 0.2,
            now,
            self.cached_tokens,
            ids,
            self.warning,
        )
