"""`mlx_parallm chat` and `mlx_parallm bench`, against a small server that streams what a test says."""

import io
import json
import sys

import pytest

from mlx_parallm.cli.main import main

CHAT = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def answers(server, monkeypatch):
    """A server that repeats the question; the commands have its key."""
    monkeypatch.setenv("MLX_PARALLM_API_KEY", "k")
    server.answers["/v1/models"] = b'{"data": [{"id": "tiny"}]}'
    server.answers["/v1/training/feedback"] = b"{}"
    server.answers[CHAT] = lambda body: said(f"{body.get('model', 'nobody')} says {body['messages'][-1]['content']}")
    return server.answers


def said(text, usage=None, **last):
    """A stream with chunks of one word. `last`: fields of the last chunk."""
    words = [{"choices": [{"index": 0, "delta": {"content": f"{word} "}}]} for word in text.split(" ")]
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], **last}
    return stream(*words, end, *([{"choices": [], "usage": usage}] if usage else []))


def stream(*chunks):
    events = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    return "".join([": ping\n\n", *events, "data: [DONE]\n\n"]).encode()


def bodies(server, path=CHAT):
    return [body for posted_to, _, body in server.posted if posted_to == path]


def typed(monkeypatch, *lines):
    """The user types these lines at a terminal, and then Ctrl-D."""
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    left = iter(lines)

    def line(prompt):
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", line)


def test_piped_text_is_one_question(server, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is\nit?\n"))
    argv = ["chat", "--url", server.url, "--system", "Be brief.", "--max-tokens", "9", "--adapter", "tone"]
    assert main(argv) == 0
    assert capsys.readouterr().out == "tone says What is\nit? \n"
    (body,) = bodies(server)
    assert body == {
        "model": "tone",
        "max_tokens": 9,
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is\nit?"}],
        "stream": True,
    }


def test_a_conversation_keeps_what_was_said(server, capsys, monkeypatch):
    typed(monkeypatch, "one", '"""two', 'lines"""', "/retry", "/clear", "three", "/quit")
    assert main(["chat", "--url", server.url]) == 0
    first, second, again, third = (body["messages"] for body in bodies(server))
    assert [message["content"] for message in second] == ["one", "nobody says one ", "two\nlines"]
    assert again == second
    assert (len(first), third) == (1, [{"role": "user", "content": "three"}])
    assert capsys.readouterr().out.startswith(f"tiny at {server.url}; /help lists the commands\n")


def test_two_adapters_answer_side_by_side(server, capsys, monkeypatch, tmp_path):
    typed(monkeypatch, "/adapter a b", "one", "two", f"/save {tmp_path}/kept.txt")
    assert main(["chat", "--url", server.url]) == 0
    by_model = {body["model"]: body["messages"] for body in bodies(server)}
    assert [message["content"] for message in by_model["a"]] == ["one", "a says one ", "two"]
    assert [message["content"] for message in by_model["b"]] == ["one", "b says one ", "two"]
    printed = capsys.readouterr().out
    assert "a:\na says two" in printed
    assert "b:\nb says two" in printed
    kept = (tmp_path / "kept.txt").read_text()
    assert "# a\n\nuser: one\n\nassistant: a says one" in kept
    assert "# b\n\nuser: one" in kept


def test_an_answer_can_be_rewarded(server, answers, capsys, monkeypatch):
    answers[CHAT] = said("yes", trajectory_ids=["t-1"])
    typed(monkeypatch, "/good", "one", "/set temperature 0.5", "two", "/bad")
    assert main(["chat", "--collect", "--url", server.url]) == 0
    printed = capsys.readouterr().out
    assert "error: no answer to reward; start with --collect" in printed
    assert "rewarded with 0" in printed
    first, second = bodies(server)
    assert (first["collect_trajectory"], second["temperature"]) == (True, 0.5)
    assert bodies(server, "/v1/training/feedback") == [{"trajectory_id": "t-1", "score": 0.0}]


def test_a_failed_answer_is_reported_and_taken_back(server, answers, capsys, monkeypatch):
    refused = (400, b'{"error": {"message": "temperature: too hot"}}')
    given = iter([refused, stream({"error": {"message": "gone"}}), said("yes")])
    answers[CHAT] = lambda body: next(given)
    typed(monkeypatch, "one", "two", "/nonsense", "/set top_p x", "three")
    assert main(["chat", "--url", server.url]) == 0
    printed = capsys.readouterr().out
    for error in (
        "temperature: too hot",
        "the answer failed: gone",
        "/nonsense is no command",
        "/set top_p: 'x' is no number",
    ):
        assert f"error: {error}" in printed
    assert bodies(server)[-1]["messages"] == [{"role": "user", "content": "three"}]


@pytest.mark.parametrize(("argv", "status"), [(["--adapter", "a", "b", "c"], 2), ([], 1)])
def test_what_cannot_be_asked_ends_it(server, answers, capsys, monkeypatch, argv, status):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi"))
    answers[CHAT] = (404, b'{"error": {"message": "no such model"}}')
    assert main(["chat", *argv, "--url", server.url]) == status
    assert capsys.readouterr().err.startswith("error: ")


# ---- bench ---------------------------------------------------------------------------------------

USAGE = {"prompt_tokens": 12, "completion_tokens": 3}


def test_bench_measures_each_number_of_requests_at_a_time(server, answers, capsys):
    answers[CHAT] = said("a b c", usage=USAGE)
    argv = ["bench", "--url", server.url, "--concurrency", "1", "3", "--requests", "6", "--prompt-words", "10"]
    assert main([*argv, "--max-tokens", "3", "--model", "x", "y", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [(level["concurrency"], level["requests"], level["failed"]) for level in printed["levels"]] == [
        (1, 6, 0),
        (3, 6, 0),
    ]
    for level in printed["levels"]:
        assert (level["prompt_tokens"], level["completion_tokens"], level["counted"]) == (72, 18, True)
        assert level["tokens_per_second"] == pytest.approx(18 / level["seconds"])
        assert 0 <= level["first"]["median"] <= level["whole"]["median"] <= level["whole"]["p95"] <= level["seconds"]
    sent = bodies(server)
    assert [body["model"] for body in sent[2:8]] == ["x", "y"] * 3
    assert {len(body["messages"][0]["content"].split()) for body in sent} == {10}
    assert len({body["messages"][0]["content"] for body in sent}) == 14, "no prompt is in a prefix cache"
    assert sent[-1]["ignore_eos"] is True


def test_bench_counts_failures_and_servers_that_count_no_tokens(server, answers, capsys):
    given = iter([said("a b"), said("a b"), (500, b'{"error": {"message": "broken"}}')])
    answers[CHAT] = lambda body: next(given)
    argv = ["bench", "--url", server.url, "--concurrency", "1", "--requests", "2", "--no-ignore-eos"]
    assert main(argv) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split()[:3] == ["1", "2", "1"]
    assert lines[-2:] == ["the server counts no tokens: each chunk is counted as one", "failed: broken"]
    assert "ignore_eos" not in bodies(server)[0]
