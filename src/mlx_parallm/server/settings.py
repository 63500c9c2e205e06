"""What the operator decides about the HTTP face; frozen, and complete before the app is built."""

from __future__ import annotations

from dataclasses import dataclass, field

LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
MAX_SEQUENCES = 128
"""Most sequences one request may ask for: `n` times its prompts."""


CONNECTIONS_BESIDE = 256


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Limits and guards of the HTTP face.

    `allowed_hosts` are names without a port, compared with the Host header; `*` takes any name.
    `cors_origins` are whole origins (`https://ui.example`); none means that no CORS header is ever sent.
    The bounded queue holds `max_batch_size + max_queued` sequences, running ones included.
    `max_stored_response_bytes` is of all the responses that `previous_response_id` can name, at most
    `max_stored_responses` of them.
    `max_connections` None: every place of the queue, and `CONNECTIONS_BESIDE` more for probes and idle clients.
    `header_timeout_s` and `body_timeout_s`: for the headers and the body of a request to arrive. `write_timeout_s`:
    after it a client that takes nothing of its answer is disconnected.
    `inference` false: the server only trains, and refuses generation requests.
    `strict_fields`: unknown fields of requests are refused, not ignored. `access_log`: a line for each request.
    """

    api_key: str | None = field(default=None, repr=False)
    allowed_hosts: tuple[str, ...] = LOOPBACK_HOSTS
    cors_origins: tuple[str, ...] = ()
    max_batch_size: int = 128
    max_queued: int = 512
    max_sequences_per_request: int = MAX_SEQUENCES
    max_body_bytes: int = 16 * 2**20
    max_connections: int | None = None
    header_timeout_s: float = 10.0
    body_timeout_s: float = 120.0
    write_timeout_s: float = 60.0
    ping_interval_s: float = 15.0
    inference: bool = True
    strict_fields: bool = False
    access_log: bool = True
    max_stored_responses: int = 1000
    max_stored_response_bytes: int = 64 * 2**20

    @property
    def connections(self) -> int:
        """Most open connections."""
        return self.max_connections or self.max_batch_size + self.max_queued + CONNECTIONS_BESIDE
