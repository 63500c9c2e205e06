"""`mlx_parallm launch` with a stand-in for the agent and a small server: what it gives, rewards and refuses."""

import json
import signal
import sys
import tomllib

import pytest
from stand_in_agent import given, install

from mlx_parallm.cli.main import main

STATUS, FEEDBACK = "/v1/training/status", "/v1/training/feedback"


@pytest.fixture
def url(server, monkeypatch):
    monkeypatch.setenv("MLX_PARALLM_API_KEY", "k")
    models = [{"id": "org/model", "max_model_len": 65536}, {"id": "tone", "max_model_len": 65536}]
    server.answers["/v1/models"] = json.dumps({"data": models}).encode()
    server.answers["/v1/models/tone"] = json.dumps(models[1]).encode()
    server.answers |= {STATUS: b"{}", FEEDBACK: b"{}"}
    return server.url


@pytest.fixture
def agent(tmp_path, monkeypatch):
    """Installs a stand-in that follows a plan."""

    def installed(name="codex", **plan):
        for variable, value in install(tmp_path, name, **plan).items():
            monkeypatch.setenv(variable, value)

    return installed


@pytest.mark.parametrize(("adapter", "model"), [([], "org/model"), (["--adapter", "tone"], "tone")])
def test_claude_code_is_given_the_server_by_variables_and_settings_of_its_command_line(
    agent, url, tmp_path, adapter, model
):
    agent("claude", status=5)
    assert main(["launch", "claude-code", "--url", f"{url}/v1", *adapter, "--", "-p", "--model", "x", "hi"]) == 5
    arguments, variables = given(tmp_path)["arguments"], given(tmp_path)["variables"]
    assert (arguments[0], arguments[2:]) == ("--settings", ["-p", "--model", "x", "hi"])
    overriding = json.loads(arguments[1])["env"]  # without the key
    assert overriding == {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "",
        "ANTHROPIC_MODEL": model,
        "ANTHROPIC_DEFAULT_OPUS_MODEL": model,
        "ANTHROPIC_DEFAULT_SONNET_MODEL": model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": model,
        "CLAUDE_CODE_SUBAGENT_MODEL": model,
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "65536",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "16384",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    assert overriding.items() <= variables.items()
    assert variables["ANTHROPIC_AUTH_TOKEN"] == "k"


def test_codex_is_given_a_provider_by_its_command_line(agent, url, tmp_path):
    agent("codex")
    assert main(["launch", "codex", "--url", url, "--api-key", "k", "--", "exec", "hi"]) == 0
    arguments, variables = given(tmp_path)["arguments"], given(tmp_path)["variables"]
    values = arguments[1:-2:2]
    assert (set(arguments[:-2:2]), arguments[-2:]) == ({"-c"}, ["exec", "hi"])
    settings = tomllib.loads("\n".join(values))
    provider = {"base_url": f"{url}/v1", "wire_api": "responses", "env_key": "MLX_PARALLM_API_KEY"}
    assert settings == {
        "model": "org/model",
        "model_provider": "parallm",
        "model_context_window": 65536,
        "model_providers": {"parallm": {"name": "MLX ParaLLM", **provider}},
    }
    assert variables["MLX_PARALLM_API_KEY"] == "k"


@pytest.mark.parametrize("name", ["claude", "codex"])
def test_the_server_is_asked_with_the_key_and_the_headers_of_an_episode(agent, server, url, tmp_path, name):
    agent(name)
    command = "claude-code" if name == "claude" else name
    learn = ("--learn", "math", "--group-size", "4", "--reward-command", "true")
    assert main(["launch", command, "--url", url, *learn]) == 0
    ((path, _, reward),) = server.posted
    assert (path, reward.pop("group_id"), reward.pop("score")) == (FEEDBACK, "math", 1)
    headers = {"X-Group-Id": "math", "X-Group-Size": "4", "X-Episode-Id": reward["episode_id"]}
    arguments = given(tmp_path)["arguments"]
    if name == "claude":
        sent = dict(line.split(": ") for line in given(tmp_path)["variables"]["ANTHROPIC_CUSTOM_HEADERS"].splitlines())
    else:
        sent = tomllib.loads("\n".join(arguments[1::2]))["model_providers"]["parallm"]["http_headers"]
    assert sent == headers


@pytest.mark.parametrize(
    ("command", "answer", "score"),
    [("true", "", 1), ("exit 3", "", 0), (None, "y", 1), (None, " N ", 0), (None, "", None), (None, "maybe", None)],
)
def test_the_reward_is_a_commands_exit_status_or_an_answer(agent, server, url, monkeypatch, command, answer, score):
    agent()
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda _: answer)
    by = [] if command is None else ["--reward-command", command]
    assert main(["launch", "codex", "--url", url, "--learn", *by]) == 0
    assert [(body["score"], "group_id" in body) for _, _, body in server.posted] == (
        [] if score is None else [(score, False)]
    )


def test_an_agent_that_a_signal_ended_gets_no_reward(agent, server, url):
    agent(status=-signal.SIGKILL)
    assert main(["launch", "codex", "--url", url, "--learn", "--reward-command", "true"]) == 128 + signal.SIGKILL
    assert not server.posted


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--learn"], "nobody can be asked without a terminal; add --reward-command"),
        (["--reward-command", "true"], "--reward-command needs --learn"),
        (["--group-size", "2"], "--group-size needs --learn GROUP"),
        (["--learn", "--reward-command", "true", "--group-size", "2"], "--group-size needs --learn GROUP"),
        (["--model-path", "m"], "--model-path: a server runs at"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_before_the_agent_runs(agent, url, tmp_path, capsys, flags, message):
    agent()
    assert main(["launch", "codex", "--url", url, *flags]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "record.json").exists()


@pytest.mark.parametrize(
    ("command", "package"), [("claude-code", "@anthropic-ai/claude-code"), ("codex", "@openai/codex")]
)
def test_a_missing_agent_is_named_with_its_package(url, tmp_path, monkeypatch, capsys, command, package):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["launch", command, "--url", url]) == 2
    assert f"is not on the PATH; install it: npm install -g {package}" in capsys.readouterr().err
