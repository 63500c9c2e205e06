"""Logs as JSON: each line is one object, whoever wrote it, and says which request it belongs to."""

import io
import json
import logging

import httpx
import pytest

from mlx_parallm import logs


@pytest.fixture
def log():
    """A stream with the lines of JSON of all loggers at level info. `lines(log)` parses it."""
    stream, root = io.StringIO(), logging.getLogger()
    handler, level = logging.StreamHandler(stream), root.level
    handler.setFormatter(logs.JsonFormatter())
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield stream
    root.removeHandler(handler)
    root.setLevel(level)


def lines(stream):
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_has_time_level_logger_and_message(log):
    logging.getLogger("mlx_parallm.some").warning("%d of %s\n", 3, "ä\u2028\nb")
    (line,) = lines(log)
    assert set(line) == {"time", "level", "logger", "message"}
    assert (line["level"], line["logger"], line["message"]) == ("warning", "mlx_parallm.some", "3 of ä\u2028\nb")
    assert line["time"].endswith("+00:00")


def test_an_exception_is_part_of_its_line_and_its_stack_is_bounded(log):
    def fall(depth):
        return fall(depth - 1) if depth else 1 / 0

    try:
        fall(300)
    except ZeroDivisionError:
        logging.getLogger("x").exception("it failed: %s", "y" * 10_000)
    (line,) = lines(log)
    assert line["exception"] == "ZeroDivisionError: division by zero"
    assert line["stack"].rstrip().endswith("ZeroDivisionError: division by zero")
    assert "1 / 0" in line["stack"]
    assert len(line["stack"]) <= logs.MAX_STACK
    assert len(line["message"]) == logs.MAX_MESSAGE


async def test_the_lines_of_uvicorn_are_json_and_name_the_request(serving, engine, log, monkeypatch):
    for name in ("uvicorn", "uvicorn.error"):
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
    async with serving() as server, httpx.AsyncClient(base_url=server.url) as client:
        monkeypatch.setattr(engine, "stats", lambda: 1 / 0)
        response = await client.get("/health", headers={"authorization": "Bearer a-key"})
        monkeypatch.undo()
    failed = [line for line in lines(log) if "stack" in line]
    assert [(line["logger"], line["level"], line["exception"]) for line in failed] == [
        ("uvicorn.error", "error", "ZeroDivisionError: division by zero")
    ]
    assert failed[0]["message"] == "Exception in ASGI application"
    assert failed[0]["request_id"] == response.headers["x-request-id"]
    assert "a-key" not in log.getvalue()


@pytest.mark.parametrize(("as_json", "starts"), [(True, ['{"time":'] * 2), (False, ["WARNING x: late"])])
def test_lines_go_to_stderr_from_the_level_on(capsys, monkeypatch, as_json, starts):
    """What the program shows by itself is in a log of JSON only."""
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    try:
        logs.set_up("warning", as_json, ("shown",))
        logging.getLogger("x").info("early")
        logging.getLogger("x").warning("late")
        logging.getLogger("shown").warning("held")
    finally:
        logging.captureWarnings(False)
    lines_of = capsys.readouterr().err.splitlines()
    assert [line[: len(starts[0])] for line in lines_of] == starts
