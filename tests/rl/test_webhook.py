"""What a webhook posts, and that its receiver can neither stop nor delay training."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx
import pytest
from pydantic import SecretStr
from rl.service_rig import GIVEN, SETTINGS, world

from mlx_parallm.config import ResolvedTraining
from mlx_parallm.rl.status import TrainingEvent
from mlx_parallm.rl.webhook import Webhook

DATA = {
    "adapter": "math",
    "version": "math@4",
    "step": 4,
    "signal": "kl_step",
    "value": 5.0,
    "limit": 3.0,
    "action": "hold",
    "reason": "kl_step 5 is above 3: the update moved the policy too far",
}


@dataclass
class Receiver:
    """A server that answers with these statuses, and then with 200. `silent`: it never answers."""

    statuses: list[int] = field(default_factory=list)
    silent: bool = False
    bodies: list[dict[str, object]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    url: str = ""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.lower().splitlines()
                length = next(int(line[15:]) for line in lines if line.startswith(b"content-length"))
                self.bodies.append(json.loads(await reader.readexactly(length)))
                self.paths.append(head.split()[1].decode())
                if self.silent:
                    await asyncio.sleep(60)
                status = self.statuses.pop(0) if self.statuses else 200
                where = b"location: /elsewhere\r\n" if status == 302 else b""
                writer.write(b"HTTP/1.1 %d X\r\n%scontent-length: 0\r\n\r\n" % (status, where))
                await writer.drain()
        except asyncio.IncompleteReadError:
            writer.close()


@asynccontextmanager
async def receiver(*statuses: int, silent: bool = False) -> AsyncIterator[Receiver]:
    one = Receiver([*statuses], silent)
    server = await asyncio.start_server(one.answer, "127.0.0.1", 0)
    one.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/hook?token=s3cret"
    try:
        yield one
    finally:
        server.close()


def event(**data: object) -> TrainingEvent:
    return TrainingEvent("divergence", 1_800_000_000.25, {**DATA, **data})


async def test_a_divergence_is_posted_with_a_text_for_people() -> None:
    async with receiver() as there:
        hook = Webhook(there.url)
        hook.on_event(TrainingEvent("update", 1.0, {}))
        hook.on_event(event())
        hook.on_event(event(signal="not_finite", value=math.nan, limit=None, reason="not finite: loss"))
        await hook.close()
    first, second = there.bodies
    assert first == {
        "text": f"Training of math diverges at step 4: {DATA['reason']} (hold)",
        "kind": "divergence",
        "at": "2027-01-15T08:00:00.250Z",
        **DATA,
    }
    assert (second["value"], second["limit"]) == (None, None)
    assert there.paths == ["/hook?token=s3cret"] * 2
    assert hook.failures == 0


@pytest.mark.parametrize(
    ("statuses", "posts", "failures"),
    [((500, 503), 3, 0), ((429,), 2, 0), ((500, 500, 500), 3, 1), ((404,), 1, 1), ((302,), 1, 1)],
)
async def test_a_receiver_in_trouble_is_asked_again_and_one_that_refuses_is_not(
    statuses: tuple[int, ...], posts: int, failures: int
) -> None:
    async with receiver(*statuses) as there:
        hook = Webhook(there.url, pauses_s=(0.0, 0.0))
        hook.on_event(event())
        await hook.close()
    assert there.paths == ["/hook?token=s3cret"] * posts, "and no redirect is followed"
    assert hook.failures == failures


async def test_a_client_that_cannot_be_made_is_a_failure_and_the_next_divergence_is_posted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client, errors = httpx.AsyncClient, [OSError(24, "Too many open files"), RuntimeError("can't start new thread")]

    def made(**options: object) -> httpx.AsyncClient:
        if errors:
            raise errors.pop()
        return client(**options)

    monkeypatch.setattr(httpx, "AsyncClient", made)
    async with receiver() as there:
        hook = Webhook(there.url, pauses_s=())
        for step in range(3):
            hook.on_event(event(step=step))
        await hook.close()
    assert [body["step"] for body in there.bodies] == [2]
    assert hook.failures == 2


def posting_to(url: str) -> ResolvedTraining:
    divergence = SETTINGS.divergence.model_copy(update={"webhook": SecretStr(url)})
    return SETTINGS.model_copy(update={"divergence": divergence})


async def test_training_does_not_wait_for_it_and_the_end_posts_what_is_left() -> None:
    async with receiver() as there, world(posting_to(there.url)) as one:
        one.learner.metrics = {"loss": 0.5, "kl_step": 9.0}
        assert (await one.service.update(given=GIVEN)).status == "held"
        assert there.bodies == []
        await one.service.close()
        assert [body["signal"] for body in there.bodies] == ["kl_step"]
