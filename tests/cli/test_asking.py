"""The commands that ask a running server: ps, adapters list, load and unload, and training."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from mlx_parallm.cli.main import main

KV_BYTES = {"kv_bytes_held": 2**20, "kv_bytes_budget": 2**30, "kv_bytes_cached": 3 * 2**20}
MACHINE = {"shortage": "", "training_waits_for": ""}
MODELS = {"data": [{"id": name, "root": "m", "parent": None} for name in ("m", "base-model", "base")]}
STATE = {"engine": {"running": 3, "waiting": 1, "machine": MACHINE, **KV_BYTES}}
NO_ADAPTERS = {"data": [], "route": {"base": 1.0}, "slots": {"total": 8, "used": 0, "pinned": 0}, "bank_bytes": 2**21}


def card(name: str, version: int, **fields: object) -> dict[str, object]:
    """One adapter version, as /v1/adapters has it."""
    shape = {"residence": "slot", "root": "", "rank": 8, "bytes": 2**20, "leases": 0, "requests": 0}
    return {"id": f"{name}@{version}", "name": name, "version": version, "live": True, **shape, **fields}


def adapters(*cards: dict[str, object], **fields: object) -> dict[str, object]:
    slots = {"total": 8, "used": len(cards), "pinned": 1}
    return {**NO_ADAPTERS, "data": cards, "slots": slots, **fields}


@pytest.fixture(autouse=True)
def answers(server, monkeypatch):
    """A server without adapters; the commands have its key."""
    monkeypatch.setenv("MLX_PARALLM_API_KEY", "k")
    server.answers["/v1/models"] = json.dumps(MODELS).encode()
    server.answers["/debug/state"] = json.dumps(STATE).encode()
    server.answers["/v1/adapters"] = json.dumps(NO_ADAPTERS).encode()
    return server.answers


# ---- what is shown -----------------------------------------------------------------------------


CLUSTER = {
    "object": "cluster",
    "node": "head",
    "connected": True,
    "nodes": [
        {"id": "head", "role": "head", "url": "http://10.0.0.1:8000", "outstanding_tokens": 7, "requests": 2}
        | {"holds": ["math@1", "math@2"], "ready": True},
        {"id": "replica-1", "role": "replica", "url": "http://10.0.0.2:8000", "outstanding_tokens": 40, "requests": 5}
        | {"holds": ["math@1"], "ready": False},
        {"id": "trainer-1", "role": "trainer", "url": "", "outstanding_tokens": 0, "requests": 0}
        | {"holds": [], "ready": False},
    ],
    "versions": [
        {"name": "math", "version": 1, "sha256": "a", "bytes": 5, "fence": 0, "live": False},
        {"name": "math", "version": 2, "sha256": "b", "bytes": 5, "fence": 0, "live": True},
    ],
    "unusable": {},
    "waiting": {"math": 12},
    "nodes_lost": 1,
    "requests_retried": 3,
    "streams_broken": 2,
}


STATUS = {
    "training_enabled": True,
    "lora_adapter": "default",
    "state": "running",
    "pause_reason": None,
    "metrics": {},
    "live_lora": "default@3",
    "best_lora": "default@2",
    "updates_total": 3,
    "step": 13,
    "last_update": "2026-01-02T03:04:05Z",
    "reward_mean": 0.5,
    "reward_running_mean": None,
    "trajectories_collected": 96,
    "trajectories_waiting": 4,
    "groups_ready": 2,
    "drops": {"stale": 8},
    "skips": {},
    "divergences": [{"signal": "kl"}],
    "advice": "",
}

FAULTY = {**CLUSTER, "connected": False, "nodes": [], "versions": [], "waiting": {}}
LACKS = {"shortage": "too much is taken", "training_waits_for": "the machine is too hot"}
TWO_BASES = [{"id": "two", "root": "two", "parent": None}, {"id": "tone", "root": "tone", "parent": "m"}]
AT_WORK = (card("math", 1, live=False, leases=2), card("math", 2), card("tone", 1, live=False))
OLD = card("math", 1, live=False, residence="file", root="/a/math", rank=16, requests=12)
PRINTED = {
    "a running server": (
        *(["ps"], {}),
        [
            "URL",
            "  models    m",
            "  adapters  none (0 of 8 slots used)",
            "  running   3",
            "  waiting   1",
            "  KV cache  1.0 MiB of 1.0 GiB, cached prefixes 3.0 MiB",
        ],
    ),
    "what the machine lacks": (
        *(["ps"], {"/debug/state": {"engine": STATE["engine"] | {"machine": LACKS}}}),
        ["  short of  too much is taken", "  training  the machine is too hot"],
    ),
    "adapters that are live or at work": (
        *(["ps"], {"/v1/adapters": adapters(*AT_WORK)}),
        ["  adapters  math@1 (2 under way), math@2 (3 of 8 slots used)"],
    ),
    "base models": (["ps"], {"/v1/models": {"data": [*MODELS["data"], *TWO_BASES]}}, ["  models    m, two"]),
    "a cluster": (
        *(["ps", "--cluster"], {"/v1/cluster": CLUSTER}),
        [
            "URL  head, connected",
            "node       role     address               ready  tokens to do  requests  versions  of them live",
            "head       head     http://10.0.0.1:8000  yes    7             2         2 of 2    1 of 1",
            "replica-1  replica  http://10.0.0.2:8000  no     40            5         1 of 2    0 of 1",
            "trainer-1  trainer  -                     no     0             0         0 of 2    0 of 1",
            "",
            "live      math@2",
            "other     math@1",
            "to learn  12 requests for math",
            "faults    1 nodes lost, 3 requests retried, 2 streams broken",
        ],
    ),
    "what is wrong in a cluster": (
        *(["ps", "--cluster"], {"/v1/cluster": {**FAULTY, "unusable": {"math@2": "its rank is too high"}}}),
        [
            "URL  head, NOT CONNECTED to NATS: what follows may be old",
            "no nodes",
            "",
            "live      none",
            "other     none",
            "unusable  math@2: its rank is too high",
            "faults    1 nodes lost, 3 requests retried, 2 streams broken",
        ],
    ),
    "a node that does not count": (
        *(["ps", "--cluster"], {"/v1/cluster": {**CLUSTER, "node": "replica-1"}}),
        ["note      only the head counts requests, retries and broken streams"],
    ),
    "adapters": (
        *(["adapters", "list"],),
        {"/v1/adapters": adapters(OLD, card("math", 2), route={"math@2": 2 / 3, "base": 1 / 3})},
        [
            "id      live  residence  rank  bytes    requests  root",
            "math@1  no    file       16    1.0 MiB  12        /a/math",
            "math@2  yes   slot       8     1.0 MiB  0         -",
            "",
            "route  math@2 66.7 %, base 33.3 %",
            "slots  2 of 8 used, 1 pinned, bank 2.0 MiB",
        ],
    ),
    "no adapters": (
        *(["adapters", "list"], {}),
        ["no adapters", "", "route  base 100 %", "slots  0 of 8 used, 0 pinned, bank 2.0 MiB"],
    ),
    "training by keys": (
        *(["training", "status"],),
        {"/v1/training/status": STATUS | {"metrics": {"keys": 2.0, "largest_key_share": 0.8}}},
        ["keys        2 in the last update, 80% of it from one"],
    ),
    "training": (
        *(["training", "status"],),
        {"/v1/training/status": STATUS | {"state": "paused", "pause_reason": "it is too hot"}},
        [
            "training    default, paused: it is too hot",
            "live        default@3",
            "best        default@2",
            "updates     3 since the start, 13 steps in all",
            "last        2026-01-02T03:04:05Z",
            "reward      0.500, running mean -",
            "collected   96 answers; 4 wait for a reward, 2 groups for an update",
            "dropped     stale 8",
            "skipped     none",
            "divergences kl",
        ],
    ),
    "advice": (
        *(["training", "status"], {"/v1/training/status": STATUS | {"advice": "Reward more."}}),
        ["advice      Reward more."],
    ),
    "no training": (
        *(["training", "status"], {"/v1/training/status": STATUS | {"training_enabled": False}}),
        ["URL does not train; start it with --enable-rl-training"],
    ),
}
"""A command, what the server answers it, and the lines that it prints one after another. URL is that of the server."""


@pytest.mark.parametrize(("command", "said", "lines"), PRINTED.values(), ids=PRINTED)
def test_a_command_shows(server, answers, capsys, command, said, lines):
    answers.update({path: json.dumps(answer).encode() for path, answer in said.items()})
    assert main([*command, "--url", f"{server.url}/v1/"]) == 0
    assert "\n".join(lines) in capsys.readouterr().out.replace(server.url, "URL")


def test_ps_cluster_of_a_server_that_is_no_node_gives_the_servers_words(server, answers, capsys):
    message = "This server is not a node of a cluster; start it with --share-model or --connect-to."
    answers["/v1/cluster"] = (409, json.dumps({"error": {"message": message}}).encode())
    assert main(["ps", "--cluster", "--url", server.url]) == 1
    assert capsys.readouterr().err == f"error: {message}\n"


# ---- adapters ----------------------------------------------------------------------------------


LOADED = b'{"status": "success", "lora_name": "math", "version": 2, "lora_adapter": "math@2", "warning": ""}'


def test_load_sends_a_folder_of_this_machine_as_an_absolute_path(server, answers, capsys, tmp_path, monkeypatch):
    answers["/v1/load_lora_adapter"] = LOADED
    (tmp_path / "loras" / "math").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "loras")
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in ("math", "../loras/math", "~/loras/math"):
        assert main(["adapters", "load", "math", path, "--url", server.url]) == 0
    assert capsys.readouterr().out == "math@2 is live\n" * 3
    body = {"lora_name": "math", "lora_path": str(Path.cwd() / "math"), "load_inplace": False}
    assert server.posted == [("/v1/load_lora_adapter", "application/json", body)] * 3


def test_load_shows_the_servers_warning(server, answers, capsys):
    answers["/v1/load_lora_adapter"] = LOADED.replace(b'"warning": ""', b'"warning": "its config is odd"')
    assert main(["adapters", "load", "math", "x", "--url", server.url]) == 0
    assert capsys.readouterr().out == "math@2 is live\nwarning: its config is odd\n"


def test_load_leaves_a_path_that_is_not_here_to_the_server(server, answers):
    answers["/v1/load_lora_adapter"] = LOADED
    assert main(["adapters", "load", "math", "not-here/math", "--replace", "--url", server.url]) == 0
    ((_, _, body),) = server.posted
    assert body == {"lora_name": "math", "lora_path": "not-here/math", "load_inplace": True}


def test_unload_says_what_is_gone(server, answers, capsys):
    answers["/v1/unload_lora_adapter"] = b'{"status": "success", "unloaded": ["math@1", "math@2"]}'
    assert main(["adapters", "unload", "math", "--url", server.url]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "unloaded math@1, math@2",
        "What is in --adapter-dir or has checkpoints is loaded again when the server starts.",
    ]
    assert server.posted == [("/v1/unload_lora_adapter", "application/json", {"lora_name": "math"})]


def test_load_and_unload_name_a_base_model(server, answers):
    answers["/v1/load_lora_adapter"] = LOADED
    answers["/v1/unload_lora_adapter"] = b'{"status": "success", "unloaded": ["math@1"]}'
    for command in (["load", "math", "x"], ["unload", "math"]):
        assert main(["adapters", *command, "--base", "two", "--url", server.url]) == 0
    assert [body["base_model_name"] for _, _, body in server.posted] == ["two", "two"]


def test_load_sends_the_checkpoint_that_a_path_into_a_run_means(server, answers, tmp_path):
    answers["/v1/load_lora_adapter"] = LOADED
    checkpoint = tmp_path / "run" / "default" / "checkpoint-3"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").touch()
    (tmp_path / "run" / "run.lock").touch()
    (tmp_path / "run" / "default" / "tags.json").write_text('{"best": "checkpoint-3"}')
    for path in ("run", "run/default", "run/default/latest", "run/default/best", "run/default/checkpoint-3"):
        assert main(["adapters", "load", "math", str(tmp_path / path), "--url", server.url]) == 0
    assert {body["lora_path"] for _, _, body in server.posted} == {str(checkpoint)}


ROUTE = {"route": {"tone": 0.1, "base": 0.9}}
SAVED = {"name": "checkpoint-2", "lora_adapter": "tone@3", "tags": ["latest", "mine"]}
ROLLED = {"status": "success", "lora_adapter": "tone@1", **ROUTE}


@pytest.mark.parametrize(
    ("command", "path", "body", "answer", "printed"),
    [
        (["rollback", "tone"], "/v1/adapters/rollback", {"lora_name": "tone"}, ROLLED, "tone@1 is live"),
        (["rollback"], "/v1/adapters/rollback", {}, ROLLED, "route  tone 10 %, base 90 %"),
        (["route"], "/v1/adapters/route", None, ROUTE, "route  tone 10 %, base 90 %"),
        (
            ["route", "base=9", "tone=1"],
            "/v1/adapters/route",
            {"weights": {"base": 9, "tone": 1}},
            ROUTE,
            "route  tone",
        ),
        (["route", "tone@2"], "/v1/adapters/route", {"weights": {"tone@2": 1}}, ROUTE, "route  tone"),
        (["save"], "/v1/training/checkpoint", {}, SAVED, "saved tone@3 as checkpoint-2, latest, mine"),
        (
            ["save", "tone", "--tag", "mine", "--step", "2"],
            "/v1/training/checkpoint",
            {"lora_name": "tone", "checkpoint_name": "mine", "step": 2},
            SAVED,
            "saved tone@3 as checkpoint-2, latest, mine",
        ),
    ],
)
def test_an_operator_needs_no_curl(server, answers, capsys, command, path, body, answer, printed):
    answers[path] = json.dumps(answer).encode()
    assert main(["adapters", *command, "--url", server.url]) == 0
    assert capsys.readouterr().out.startswith(printed)
    assert server.posted == ([] if body is None else [(path, "application/json", body)])
    assert main(["adapters", *command, "--json", "--url", server.url]) == 0
    assert json.loads(capsys.readouterr().out) == answer


def test_a_share_is_a_number(capsys):
    assert main(["adapters", "route", "tone=much"]) == 2
    assert "'tone=much': after '=' comes a number, such as tone=0.1" in capsys.readouterr().err


PARTS = [
    {"what": "versions that are loaded", "path": "", "count": 2, "bytes": 0},
    {"what": "collected trajectories", "path": "/run/journal.sqlite", "count": 30, "bytes": 0},
    {"what": "files of checkpoints and versions", "path": "/run/tone", "count": 4, "bytes": 2**21},
]
LISTED = [
    "what                               count  size     where",
    "versions that are loaded           2      -        memory",
    "collected trajectories             30     -        /run/journal.sqlite",
    "files of checkpoints and versions  4      2.0 MiB  /run/tone",
    "",
]


def test_delete_lists_first_and_removes_with_yes(server, answers, capsys):
    answer = {"status": "success", "lora_name": "tone", "deleted": False, "parts": PARTS, "in_training": True}
    answers["/v1/adapters/delete"] = json.dumps(answer).encode()
    assert main(["adapters", "delete", "tone", "--url", server.url]) == 0
    hint = "nothing was removed; `mlx_parallm adapters delete tone --yes --stop-training` removes all of this"
    assert capsys.readouterr().out.splitlines() == [*LISTED, hint]
    assert [body["dry_run"] for _, _, body in server.posted] == [True]
    assert main(["adapters", "delete", "tone", "--yes", "--stop-training", "--url", server.url]) == 0
    assert capsys.readouterr().out.splitlines() == [*LISTED, "removed tone and all of this"]
    bodies = [body for _, _, body in server.posted[1:]]
    assert bodies == [{"lora_name": "tone", "dry_run": dry_run, "stop_training": True} for dry_run in (True, False)]


@pytest.mark.parametrize(
    ("message", "printed"),
    [
        (
            "'tone' is loaded already; load_inplace true replaces it.",
            "'tone' is loaded already; --replace replaces it.",
        ),
        (
            "'tone' is in training here: POST /v1/training/rollback serves an earlier version.",
            "'tone' is in training here: `mlx_parallm training rollback --adapter NAME` serves an earlier version.",
        ),
        (
            "'tone' is in training here: send stop_training true, or stop that with POST /v1/training/stop first.",
            "'tone' is in training here: add --stop-training, or stop that with "
            "`mlx_parallm training stop --adapter NAME` first.",
        ),
        ("lora_path: say which one with base_model_name.", "say which one with --base."),
    ],
)
def test_errors_name_flags_and_commands_in_place_of_json_and_routes(server, answers, capsys, message, printed):
    answers["/v1/load_lora_adapter"] = (400, json.dumps({"error": {"message": message}}).encode())
    assert main(["adapters", "load", "tone", "x", "--url", server.url]) == 1
    assert capsys.readouterr().err == f"error: {printed}\n"


# ---- training ------------------------------------------------------------------------------------

UPDATED = {"status": "published", "reason": "", "lora_adapter": "default@4", "step": 14, "checkpoint": "checkpoint-14"}


@pytest.mark.parametrize(
    ("command", "path", "body"),
    [
        (["pause"], "pause", {}),
        (["resume", "--adapter", "tone"], "resume", {"lora_adapter": "tone"}),
        (["start", "--adapter", "tone"], "start", {"lora_adapter": "tone"}),
        (["stop", "--adapter", "tone"], "stop", {"lora_adapter": "tone"}),
        (["rollback"], "rollback", {}),
        (["rollback", "--to", "checkpoint-2"], "rollback", {"to": "checkpoint-2"}),
    ],
)
def test_training_is_controlled(server, answers, capsys, command, path, body):
    answers[f"/v1/training/{path}"] = json.dumps(STATUS).encode()
    assert main(["training", *command, "--url", server.url]) == 0
    assert server.posted == [(f"/v1/training/{path}", "application/json", body)]
    assert "default, running" in capsys.readouterr().out


def test_an_update_says_what_became_of_it(server, answers, capsys):
    answers["/v1/training/update"] = json.dumps(UPDATED).encode()
    assert main(["training", "update", "--checkpoint", "mine", "--url", server.url]) == 0
    assert capsys.readouterr().out == "published: default@4 at step 14, saved as checkpoint-14\n"
    ((_, _, body),) = server.posted
    assert body == {"checkpoint_name": "mine"}
    held = {"status": "held", "reason": "gate_kl", "lora_adapter": None, "step": 13, "checkpoint": None}
    answers["/v1/training/update"] = json.dumps(held).encode()
    assert main(["training", "update", "--url", server.url]) == 0
    assert capsys.readouterr().out == "held (gate_kl): no version at step 13\n"


# ---- all of them -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "path", "answer"),
    [
        (["adapters", "list"], "/v1/adapters", NO_ADAPTERS),
        (["training", "status"], "/v1/training/status", STATUS),
        (["training", "update"], "/v1/training/update", UPDATED),
        (["ps", "--cluster"], "/v1/cluster", CLUSTER),
    ],
)
def test_json_is_the_servers_answer(server, answers, capsys, command, path, answer):
    answers[path] = json.dumps(answer).encode()
    assert main([*command, "--json", "--url", server.url]) == 0
    assert json.loads(capsys.readouterr().out) == answer


def test_json_of_ps_has_all_its_answers(server, capsys):
    assert main(["ps", "--json", "--url", server.url]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == {"url": server.url, "models": MODELS, "adapters": NO_ADAPTERS, "state": STATE}


EVERY = (
    *((["ps"], path) for path in ("/v1/models", "/v1/adapters", "/debug/state")),
    (["ps", "--cluster"], "/v1/cluster"),
    (["usage"], "/v1/usage"),
    (["adapters", "list"], "/v1/adapters"),
    (["adapters", "load", "math", "x"], "/v1/load_lora_adapter"),
    (["adapters", "unload", "math"], "/v1/unload_lora_adapter"),
    (["adapters", "rollback", "math"], "/v1/adapters/rollback"),
    (["adapters", "save"], "/v1/training/checkpoint"),
    (["adapters", "delete", "math"], "/v1/adapters/delete"),
    (["training", "status"], "/v1/training/status"),
    (["training", "pause"], "/v1/training/pause"),
)
"""Commands, and what they ask for."""
STRANGE = (b"<html>", b"{}", b"[]", b"null", b"\xff", b"", (500, b""), (502, b"<html>"), (404, b'{"error": "no"}'))


@pytest.mark.parametrize("answer", STRANGE)
@pytest.mark.parametrize(("command", "path"), EVERY)
def test_another_kind_of_server_is_refused(server, answers, capsys, command, path, answer):
    answers[path] = answer
    assert main([*command, "--url", server.url]) == 1
    output = capsys.readouterr()
    assert output.err.startswith(f"error: {server.url}")
    assert output.out == ""


@pytest.mark.parametrize(("status", "code"), [(400, 1), (403, 2)])
@pytest.mark.parametrize(("command", "path"), EVERY)
def test_user_sees_the_servers_own_error(server, answers, capsys, command, path, status, code):
    answers[path] = (status, b'{"error": {"message": "not that Host (allowed_hosts)"}}')
    assert main([*command, "--url", server.url]) == code
    assert capsys.readouterr().err == "error: not that Host (allowed_hosts)\n"


@pytest.mark.parametrize("command", [command for command, _ in EVERY[2:]])
def test_wrong_key_exits_2_and_does_not_show_it(server, capsys, command):
    assert main([*command, "--url", server.url, "--api-key", "0ther"]) == 2
    assert main([*command, "--url", server.url, "--api-key", "0ther\n"]) == 2
    errors = capsys.readouterr().err
    assert "pass --api-key" in errors
    assert "0ther" not in errors


@pytest.mark.parametrize("command", [command for command, _ in EVERY[2:]])
def test_says_when_nothing_runs(capsys, command):
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as http:
        free = http.server_port
    assert main([*command, "--url", f"http://127.0.0.1:{free}"]) == 1
    assert capsys.readouterr().err.startswith(f"error: no server answers at http://127.0.0.1:{free}")


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://localhost", "http://[::1", ""])
def test_url_must_be_an_http_address(capsys, url):
    assert main(["ps", "--url", url]) == 2
    assert capsys.readouterr().err.startswith("error: --url")


def test_a_server_that_does_not_answer_in_time_is_not_called_absent(server, monkeypatch, capsys):
    def silent(*args, **options):
        raise httpx.ReadTimeout("")

    monkeypatch.setattr(httpx, "request", silent)
    assert main(["adapters", "list", "--url", server.url]) == 1
    assert capsys.readouterr().err == f"error: {server.url} did not answer within 5 s\n"
