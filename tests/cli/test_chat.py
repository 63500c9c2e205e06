"""`mlx_parallm chat` and `mlx_parallm bench`, against a small server that streams what a test says."""

import io
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from mlx_parallm.cli.main import main

MODELS = {"data": [{"id": "tiny"}]}


class Streams(BaseHTTPRequestHandler):
    """Answers each chat with `server.answer(body)`: a list of chunks, or (status, body); keeps what was posted."""

    def do_GET(self):
        self._send(200, json.dumps(MODELS).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.posted.append((self.path, body))
        answer = self.server.answer(body) if self.path.endswith("completions") else (200, b"{}")
        if isinstance(answer, tuple):
            self._send(*answer)
        else:
            events = [f"data: {json.dumps(chunk)}\n\n" for chunk in answer]
            self._send(200, "".join([": ping\n\n", *events, "data: [DONE]\n\n"]).encode())

    def _send(self, status, body):
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Streams) as http:
        http.posted, http.url = [], f"http://127.0.0.1:{http.server_port}"
        http.answer = lambda body: said(f"{body.get('model', 'nobody')} says {body['messages'][-1]['content']}")
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield http
        http.shutdown()
        thread.join()


def said(text, usage=None, **last):
    """An answer in chunks of one word. `last`: fields of the last chunk."""
    words = [word + " " for word in text.split(" ")]
    chunks = [{"choices": [{"index": 0, "delta": {"content": word}}]} for word in words]
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], **last}
    return [*chunks, end, *([{"choices": [], "usage": usage}] if usage else [])]


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


def chats(server):
    return [body["messages"] for path, body in server.posted if path.endswith("completions")]


def test_piped_text_is_one_question(server, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is\nit?\n"))
    argv = ["chat", "--url", server.url, "--system", "Be brief.", "--max-tokens", "9", "--adapter", "tone"]
    assert main(argv) == 0
    assert capsys.readouterr().out == "tone says What is\nit? \n"
    ((_, body),) = server.posted
    assert body == {
        "model": "tone",
        "max_tokens": 9,
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is\nit?"}],
        "stream": True,
    }


def test_a_conversation_keeps_what_was_said(server, capsys, monkeypatch):
    typed(monkeypatch, "one", '"""two', 'lines"""', "/retry", "/clear", "three", "/quit")
    assert main(["chat", "--url", server.url]) == 0
    first, second, again, third = chats(server)
    assert [message["content"] for message in second] == ["one", "nobody says one ", "two\nlines"]
    assert again == second
    assert (len(first), third) == (1, [{"role": "user", "content": "three"}])
    assert capsys.readouterr().out.startswith(f"tiny at {server.url}; /help lists the commands\n")


def test_two_adapters_answer_side_by_side(server, capsys, monkeypatch, tmp_path):
    typed(monkeypatch, "/adapter a b", "one", "two", f"/save {tmp_path}/kept.txt")
    assert main(["chat", "--url", server.url]) == 0
    by_model = {body["model"]: body["messages"] for _, body in server.posted}
    assert [message["content"] for message in by_model["a"]] == ["one", "a says one ", "two"]
    assert [message["content"] for message in by_model["b"]] == ["one", "b says one ", "two"]
    printed = capsys.readouterr().out
    assert "a:\na says two" in printed
    assert "b:\nb says two" in printed
    kept = (tmp_path / "kept.txt").read_text()
    assert "# a\n\nuser: one\n\nassistant: a says one" in kept
    assert "# b\n\nuser: one" in kept


def test_an_answer_can_be_rewarded(server, capsys, monkeypatch):
    server.answer = lambda body: said("yes", trajectory_ids=["t-1"])
    typed(monkeypatch, "/good", "one", "/set temperature 0.5", "two", "/bad")
    assert main(["chat", "--collect", "--url", server.url]) == 0
    printed = capsys.readouterr().out
    assert "error: no answer to reward; start with --collect" in printed
    assert "rewarded with 0" in printed
    first, second, feedback = server.posted
    assert (first[1]["collect_trajectory"], second[1]["temperature"]) == (True, 0.5)
    assert feedback == ("/v1/training/feedback", {"trajectory_id": "t-1", "score": 0.0})


def test_a_failed_answer_is_reported_and_taken_back(server, capsys, monkeypatch):
    answers = iter(
        [(400, b'{"error": {"message": "temperature: too hot"}}'), [{"error": {"message": "gone"}}], said("yes")]
    )
    server.answer = lambda body: next(answers)
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
    assert chats(server)[-1] == [{"role": "user", "content": "three"}]


@pytest.mark.parametrize(("argv", "status"), [(["--adapter", "a", "b", "c"], 2), ([], 1)])
def test_what_cannot_be_asked_ends_it(server, capsys, monkeypatch, argv, status):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi"))
    server.answer = lambda body: (404, b'{"error": {"message": "no such model"}}')
    assert main(["chat", *argv, "--url", server.url]) == status
    assert capsys.readouterr().err.startswith("error: ")


# ---- bench ---------------------------------------------------------------------------------------

USAGE = {"prompt_tokens": 12, "completion_tokens": 3}


def test_bench_measures_each_number_of_requests_at_a_time(server, capsys):
    server.answer = lambda body: said("a b c", usage=USAGE)
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
    sent = [body for _, body in server.posted]
    assert [body["model"] for body in sent[2:8]] == ["x", "y"] * 3
    assert {len(body["messages"][0]["content"].split()) for body in sent} == {10}
    assert len({body["messages"][0]["content"] for body in sent}) == 14, "no prompt is in a prefix cache"
    assert sent[-1]["ignore_eos"] is True


def test_bench_counts_failures_and_servers_that_count_no_tokens(server, capsys):
    answers = iter([said("a b"), said("a b"), (500, b'{"error": {"message": "broken"}}')])
    server.answer = lambda body: next(answers)
    argv = ["bench", "--url", server.url, "--concurrency", "1", "--requests", "2", "--no-ignore-eos"]
    assert main(argv) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split()[:3] == ["1", "2", "1"]
    assert lines[-2:] == ["the server counts no tokens: each chunk is counted as one", "failed: broken"]
    assert "ignore_eos" not in server.posted[0][1]


def test_bench_ends_at_a_first_request_that_fails(server, capsys):
    server.answer = lambda body: (404, b'{"error": {"message": "no such model"}}')
    assert main(["bench", "--url", server.url]) == 1
    assert len(server.posted) == 1
    assert "failed: no such model" in capsys.readouterr().out
