"""`mlx_parallm top`: the view of a server, and a server that goes away and comes back."""

import io
import json
import os
import sys
from contextlib import nullcontext

import pytest
from rich.console import Console

from mlx_parallm.cli.main import main
from mlx_parallm.cli.remote import top
from mlx_parallm.cli.remote.client import Client
from mlx_parallm.cli.remote.top_view import view

WORK = {"decode": 0.5, "prefill": 0.25, "training": 0.0, "other": 0.0, "running": 2, "waiting": 1}
MEMORY = {"weights": 2**30, "budget": 2**30, "rows": 2**29, "cached_prefixes": 2**28, "free_blocks": 0, "adapters": 0}
LATENCY = {"first_token": {"count": 3, "p50": 0.04, "p95": 1.5, "p99": 2.0}, "between_tokens": None}
STATUS = {"state": "running", "step": 7, "reward_mean": 0.5, "reward_running_mean": 0.4, "loss": -0.01, "kl": None}


def interval(number, tokens):
    count = {"number": number, "at": 0.0, "seconds": 1.0, "generated_tokens": tokens, "prompt_tokens": 5}
    return {**count, **WORK}


def stats(*intervals, started_at=1_800_000_000, role="admin", **fields):
    answer = {
        "started_at": started_at,
        "mode": "inference_and_training",
        "state": "serving",
        "caller": {"name": "", "role": role, "required": True},
        "models": [{"name": "tiny", "state": "loaded"}, {"name": "big", "state": "idle"}],
        "queue": {"running": 2, "rows": 8, "waiting": 1, "held": 3, "limit": 16},
        "latency": LATENCY,
        "memory": {**MEMORY, "training": 0},
        "training": {"target": 0.1, "measured": 0.1, "adapters": [{"name": "tone", "state": "running", "step": 7}]},
        "notices": [],
        "intervals": list(intervals),
    }
    return json.dumps(answer | fields).encode()


@pytest.fixture(autouse=True)
def answers(server, monkeypatch):
    monkeypatch.setenv("MLX_PARALLM_API_KEY", "k")
    monkeypatch.setenv("COLUMNS", "120")
    server.answers["/v1/stats?after=0"] = stats(interval(1, 10), interval(2, 30))
    cards = [{"id": "tone@2", "live": True, "leases": 2}, {"id": "tone@1", "live": False, "leases": 0}]
    server.answers["/v1/adapters"] = json.dumps({"data": cards}).encode()
    server.answers["/v1/training/status?lora_adapter=tone"] = json.dumps(STATUS).encode()
    return server.answers


@pytest.fixture
def reader(server):
    class Args:
        url, api_key = server.url, "k"

    made = top.ServerReader(Client(Args))
    made.read()
    return made


def shown(reader, width=120):
    """The lines of the view, without spaces at their ends."""
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(view(reader.reading, width))
    return [line.rstrip() for line in console.export_text().splitlines()]


def test_once_prints_the_view(server, capsys):
    assert main(["top", "--once", "--url", server.url]) == 0
    head, *rest = capsys.readouterr().out.splitlines()
    assert head.startswith(f"{server.url}  tiny  inference_and_training  serving  up ")
    full, half, quarter = "█", "█" * 30, "█" * 15
    assert [line.rstrip() for line in rest] == [
        f"tokens    ▁{full}  20.0 tokens/s, 5 prompt tokens/s",
        "first     p50 40 ms, p95 1.50 s, p99 2.00 s",
        "between   no token in the last minute",
        "rows      2 of 8 run, 1 wait, 3 of 16 places taken",
        f"memory    {half}{quarter}{'░' * 15}  of 1.0 GiB: rows 512.0 MiB, cached prefixes 256…",
        "weights   1.0 GiB",
        f"device    {half}{quarter}{'░' * 15}  decode 50%, prefill 25%, idle 25%",
        "adapters  1 live; requests now: tone@2 2",
        "training  tone running, step 7, reward 0.500, mean 0.400, loss -0.0100, KL -",
    ]


def test_what_the_machine_lacks_is_said_at_the_top(server, capsys):
    server.answers["/v1/stats?after=0"] = stats(notices=["Training waits: the machine is too hot."])
    assert main(["top", "--once", "--url", server.url]) == 0
    assert capsys.readouterr().out.splitlines()[1].rstrip() == "Training waits: the machine is too hot."


def test_json_has_the_figures_of_the_view(server, capsys):
    assert main(["top", "--json", "--url", server.url]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["tokens_per_second"], answer["prompt_tokens_per_second"]) == (20.0, 5.0)
    assert answer["device_shares"] == {"decode": 0.5, "prefill": 0.25, "training": 0.0, "other": 0.0}
    assert (answer["stats"]["queue"]["rows"], "intervals" in answer["stats"]) == (8, False)
    assert answer["training"]["tone"]["step"] == 7


def test_a_server_without_training_and_a_key_that_may_not_see_it(server, capsys):
    server.answers["/v1/stats?after=0"] = stats(training=None)
    assert main(["top", "--once", "--url", server.url]) == 0
    assert "\ntraining" not in capsys.readouterr().out
    server.answers["/v1/stats?after=0"] = stats(role="inference")
    assert main(["top", "--once", "--url", server.url]) == 0
    said = "training  this key may not see it, nor its events; use one with the role train or admin"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("answer", [b"<html>", b"{}", b"[]", (404, b"")])
def test_another_server_is_refused(server, capsys, answer):
    server.answers["/v1/stats?after=0"] = answer
    assert main(["top", "--once", "--url", server.url]) == 1
    assert capsys.readouterr().err.startswith(f"error: {server.url}")


def test_a_server_that_goes_away_and_comes_back(server, reader):
    server.answers["/v1/stats?after=2"] = (503, b"")
    reader.refresh()
    first = shown(reader)
    assert first[1].startswith("no answer since ")
    assert "rows      2 of 8 run, 1 wait, 3 of 16 places taken" in first
    server.answers["/v1/stats?after=2"] = stats(interval(3, 100))
    reader.refresh()
    assert not any("no answer" in line for line in shown(reader))
    assert reader.reading.rate("generated_tokens") == pytest.approx(140 / 3, abs=0.1)


def test_a_server_that_was_started_again_begins_a_new_history(server, reader):
    server.answers["/v1/stats?after=2"] = stats(started_at=1_800_000_100)
    server.answers["/v1/stats"] = stats(interval(1, 4), started_at=1_800_000_100)
    reader.refresh()
    assert "the server was started again at" in "\n".join(shown(reader))
    assert (reader.reading.rate("generated_tokens"), reader.reading.last_interval) == (4.0, 1)


def test_events_are_shown_on_one_line_each(reader):
    data = {"adapter": "tone", "text": "a\nb" + "x" * 500, "metrics": {"loss": 1}}
    reader.reading.events = [{"kind": "update", "at": "2026-01-31T12:00:00.000Z", "data": data}]
    *_, last = shown(reader, width=60)
    assert last.startswith("events    ")
    assert " update adapter tone, text a bx" in last
    assert len(last) <= 60


def test_events_that_the_server_refuses_are_said_to_be(server, reader, monkeypatch):
    server.answers["/v1/training/events"] = (403, b'{"error": {"message": "This key may not read events."}}')
    monkeypatch.setattr(top.time, "sleep", lambda seconds: sys.exit())  # after the first attempt
    with pytest.raises(SystemExit):
        reader.listen()
    server.answers["/v1/stats?after=2"] = stats(interval(3, 100))
    reader.refresh()
    assert shown(reader)[-1] == "events    the server sends none: This key may not read events."


def test_p_pauses_the_training_and_resumes_it(server, reader):
    for action, state in (("pause", "paused"), ("resume", "running")):
        server.answers[f"/v1/training/{action}"] = b"{}"
        reader.toggle_training()
        reader.reading.training = {"tone": {**STATUS, "state": state}}
    assert [(path, body) for path, _, body in server.posted] == [
        ("/v1/training/pause", {"lora_adapter": "tone"}),
        ("/v1/training/resume", {"lora_adapter": "tone"}),
    ]
    server.answers["/v1/training/pause"] = (403, b'{"error": {"message": "This key may not."}}')
    reader.toggle_training()
    assert "This key may not." in shown(reader)


def test_q_ends_the_live_view(server, reader, monkeypatch):
    reading, writing = os.pipe()
    os.write(writing, b"xq")
    monkeypatch.setattr(top.Keys, "of_terminal", lambda: nullcontext(top.Keys(reading)))
    monkeypatch.setattr(top.ServerReader, "listen", lambda self: None)
    server.answers["/v1/stats?after=2"] = stats(interval(3, 100))
    screen = io.StringIO()
    assert top._live(reader, 30.0, Console(file=screen, force_terminal=True, width=100, height=30)) == 0
    assert "q quits, p pauses or resumes training" in screen.getvalue()
    assert reader.reading.last_interval == 3
