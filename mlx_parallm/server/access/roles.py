"""What each role of a key may do: the role that every route needs, all in one table."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """The roles of a key. Each may do what those before it may do."""

    INFERENCE = "inference"
    """Asks the model, and reads its own stored responses."""
    TRAIN = "train"
    """Also teaches: collects trajectories, sends rewards, controls training, and loads, publishes and rolls back
    adapters."""
    ADMIN = "admin"
    """Also stops and changes the server for everybody, and reads other people's prompts and usage."""

    def allows(self, needed: Role) -> bool:
        """Whether a key of this role may do what needs `needed`."""
        return self.rank >= needed.rank

    @property
    def rank(self) -> int:
        """The role's place in the order, from 0."""
        return list(Role).index(self)


@dataclass(frozen=True, slots=True)
class Access:
    """What a route needs of a key.

    Attributes:
        role: the least role; None: no key is needed.
        audited: whether it is a control action, which the audit log records.
    """

    role: Role | None
    audited: bool = False


ROUTES: tuple[tuple[Access, str], ...] = (
    # Probes send no key, and people have to log in. The answers reveal the status, and whether memory is short.
    (
        Access(None),
        """
        GET /health
        GET /liveness
        GET /ready
        GET /login
        POST /login
        POST /logout
        """,
    ),
    (
        Access(Role.INFERENCE),
        """
        POST /v1/completions
        POST /v1/chat/completions
        POST /v1/chat/completions/tokens
        POST /v1/chat/completions/render
        POST /inference/v1/generate
        POST /generate
        POST /v1/messages
        POST /v1/messages/count_tokens
        POST /v1/responses
        POST /v1/responses/input_tokens
        GET /v1/responses/{response_id}
        DELETE /v1/responses/{response_id}
        GET /v1/responses/{response_id}/input_items
        POST /v1/embeddings
        POST /v1/score
        POST /score
        POST /v1/rerank
        POST /rerank
        POST /api/chat
        POST /api/generate
        POST /api/embed
        POST /api/embeddings
        POST /api/show
        GET /api/tags
        GET /api/ps
        GET /api/version
        GET /
        POST /tokenize
        POST /detokenize
        GET /tokenizer_info
        GET /v1/models
        GET /v1/models/{name:path}
        GET /v1/adapters
        GET /v1/adapters/{selector:path}
        GET /v1/adapters/route
        GET /is_paused
        GET /is_sleeping
        GET /get_world_size
        GET /version
        GET /server_info
        GET /v1/usage
        GET /v1/stats
        GET /v1/cluster
        GET /metrics
        GET /dashboard
        GET /dashboard/assets/{name}
        GET /docs
        GET /openapi.json
        """,
    ),
    (
        Access(Role.TRAIN),
        """
        GET /v1/checkpoints
        POST /v1/training/feedback
        POST /v1/training/preference
        POST /v1/training/groups/{group_id:path}/close
        GET /v1/training/status
        GET /v1/training/events
        GET /v1/training/history
        GET /v1/training/report
        GET /v1/training/trajectories
        GET /v1/training/trajectories/{group_id:path}
        GET /v1/training/compare
        GET /v1/training/schedule
        GET /v1/training/lesson
        POST /v1/cluster/join
        POST /v1/cluster/generate
        POST /v1/cluster/sample
        GET /v1/cluster/base/{file}
        GET /v1/cluster/adapters/{name}/{version}
        POST /update_weights
        GET /info
        GET /status
        GET /status-env
        GET /wandb_info
        GET /batch
        POST /register
        POST /register-env
        POST /disconnect-env
        POST /scored_data
        POST /scored_data_list
        GET /api/v1/healthz
        GET /api/v1/get_server_capabilities
        POST /api/v1/client/config
        POST /api/v1/client/dynamic_config
        POST /api/v1/telemetry
        POST /api/v1/create_session
        POST /api/v1/session_heartbeat
        GET /api/v1/sessions/{session_id}
        POST /api/v1/sessions/{session_id}/finish
        POST /api/v1/create_model
        POST /api/v1/get_info
        POST /api/v1/unload_model
        POST /api/v1/forward_backward
        POST /api/v1/forward
        POST /api/v1/optim_step
        POST /api/v1/retrieve_future
        POST /api/v1/cancel_future
        POST /api/v1/create_sampling_session
        GET /api/v1/samplers/{sampler_id}
        POST /api/v1/asample
        POST /api/v1/save_weights
        POST /api/v1/save_weights_for_sampler
        POST /api/v1/load_weights
        POST /api/v1/weights_info
        GET /api/v1/training_runs
        GET /api/v1/training_runs/{model_id}
        GET /api/v1/training_runs/{model_id}/checkpoints
        """,
    ),
    (
        Access(Role.TRAIN, audited=True),
        """
        PUT /v1/cluster/adapters/{name}/{version}
        POST /v1/load_lora_adapter
        POST /load_lora_adapter
        POST /v1/unload_lora_adapter
        POST /unload_lora_adapter
        POST /v1/model/switch-lora
        POST /model/switch-lora
        POST /v1/adapters/route
        DELETE /v1/adapters/route
        POST /v1/adapters/rollback
        DELETE /v1/adapters/{selector:path}
        POST /v1/training/checkpoint
        POST /training/checkpoint
        POST /v1/training/update
        POST /v1/training/start
        POST /v1/training/stop
        POST /v1/training/pause
        POST /v1/training/resume
        POST /v1/training/rollback
        POST /v1/training/compare
        POST /v1/training/compare/stop
        POST /v1/training/average
        POST /v1/training/reward_model
        POST /v1/training/lesson
        DELETE /v1/training/lesson
        """,
    ),
    (
        Access(Role.ADMIN),
        """
        GET /debug/state
        GET /debug/training
        GET /debug/trajectories
        GET /latest_example
        GET /api/v1/sessions
        """,
    ),
    (
        Access(Role.ADMIN, audited=True),
        """
        POST /pause
        POST /resume
        POST /sleep
        POST /wake_up
        POST /reset_prefix_cache
        POST /v1/adapters/delete
        POST /v1/training/schedule
        GET /reset_data
        """,
    ),
)
"""What each route needs. A route that is in no list needs `admin` and is audited."""


def _lines(text: str) -> list[tuple[str, str]]:
    return re.findall(r"^\s*([A-Z]+) (\S+)$", text, re.MULTILINE)


DECLARED = {line: access for access, text in ROUTES for line in _lines(text)}
"""What each route needs, by its method and path pattern."""
OPEN_PATHS = frozenset(path for (_, path), access in DECLARED.items() if access.role is None)
UNDECLARED = Access(Role.ADMIN, audited=True)
