"""The servers that are compared, and one chat request to one of them."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.lib.load import Body, Stream, closed_loop, greedy
from benchmarks.lib.peers import Peer, PeerError
from benchmarks.lib.prefix.texts import Messages

OURS, WITHOUT, THEIRS = "ours", "ours, no prefix cache", "mlx_lm.server"
END_OF_MESSAGE_ID = 2


@dataclass(frozen=True, slots=True)
class Side:
    """One server. A request is tried `attempts` times, because mlx_lm.server resets connections of many clients."""

    name: str
    peer: Peer
    attempts: int = 1


def body(messages: Messages, max_tokens: int) -> Body:
    """A greedy streaming chat request with a token count at the end."""
    return {"messages": messages, **greedy(max_tokens)}


async def ask(side: Side, messages: Messages, max_tokens: int) -> Stream:
    """Sends one chat request and returns its finished stream. Raises PeerError if it fails.

    The model may not draw the token that ends a message, so the answer's text stands for exactly `max_tokens` tokens,
    and a prompt that repeats it continues the tokens that the server has computed.
    """
    plain = {**body(messages, max_tokens), "logit_bias": {str(END_OF_MESSAGE_ID): -100}}
    load = await closed_loop(side.peer.port, [plain], 1, side.attempts)
    if load.errors:
        raise PeerError(f"{side.name}: {load.errors[0]}")
    return load.streams[0]


def rotated(sides: Sequence[Side], repeat: int) -> list[Side]:
    """The sides in another order in each repeat, so that none always goes first."""
    shift = repeat % len(sides)
    return [*sides[shift:], *sides[:shift]]
