"""Requests that change adapters, training and the server, or that show their state, and those of Atropos."""

from fuzz.wire import Wire, asked

WIRE = Wire()
BEGIN = (
    "/v1/load", "/v1/unload", "/v1/adapters", "/v1/model", "/v1/checkpoints", "/v1/training", "/v1/stats", "/pause",
    "/resume", "/sleep", "/wake_up", "/reset", "/debug", "/server_info", "/v1/usage", "/status", "/register-env",
    "/disconnect-env", "/scored_data", "/latest_example", "/batch", "/info", "/metrics",
)  # fmt: skip
ENDLESS = ("/v1/training/events",)
GROUP = (
    b'{"tokens": [[1, 2, 3], [1, 2, 4]], "masks": [[-100, -100, 3], [-100, -100, 4]], "scores": [1.0, 0.0], '
    b'"inference_logprobs": [[1.0, 1.0, -0.5], [1.0, 1.0, -0.7]], "group_overrides": {}, "env_id": 0}'
)
ENVIRONMENT = b'{"max_token_length": 2048, "desired_name": "gsm8k", "weight": 1.0, "group_size": 2}'
EXAMPLES = [
    *(each for each in WIRE.examples(*BEGIN) if not any(path.encode() in each for path in ENDLESS)),
    *(b"POST /scored_data\n" + GROUP, b"POST /scored_data_list\n[" + GROUP + b"]"),
    *(b"POST /register-env\n" + ENVIRONMENT, b'POST /disconnect-env\n{"env_id": 0}'),
]
LINES = sorted({example.partition(b"\n")[0].decode() for example in EXAMPLES})
mutated = WIRE.mutate(LINES)


def run(data):
    method, path, body = asked(data)
    if f"{method} {path}" in LINES:
        WIRE.reset()
        WIRE.ask("GET", "/reset_data", b"")
        WIRE.ask("POST", "/register-env", ENVIRONMENT)
        WIRE.ask(method, path, body)
        WIRE.check_idle()
