"""Requests that change adapters, training and the server, or that show their state, and those of Atropos."""

from fuzz.wire import Wire, asked

BEGIN = (
    "/v1/load", "/v1/unload", "/v1/adapters", "/v1/model", "/v1/checkpoints", "/v1/training", "/v1/stats", "/pause",
    "/resume", "/sleep", "/wake_up", "/reset", "/debug", "/server_info", "/v1/usage", "/status", "/register-env",
    "/disconnect-env", "/scored_data", "/latest_example", "/batch", "/info", "/metrics",
)  # fmt: skip
ENDLESS = "/v1/training/events"
ENVIRONMENT = b'{"max_token_length": 2048, "desired_name": "gsm8k", "weight": 1.0, "group_size": 2}'
WIRE = Wire(*BEGIN)
mutated = WIRE.mutated


def run(data):
    method, path, body = asked(data)
    if path.startswith(BEGIN) and not path.startswith(ENDLESS):
        WIRE.reset()
        WIRE.ask("GET", "/reset_data", b"")
        WIRE.ask("POST", "/register-env", ENVIRONMENT)
        WIRE.ask(method, path, body)
        WIRE.check_idle()
