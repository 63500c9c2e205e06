"""`mlx_parallm launch`: a coding agent that works with a running server, or with one that starts and ends with it.

The agent gets its address, key and model by environment variables and arguments. No settings file is written.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from urllib.parse import urlsplit

from mlx_parallm.cli.client import SERVER, TIMEOUT_S, Client
from mlx_parallm.cli.flags import flags_of_keys, settings
from mlx_parallm.cli.parser import Command, argument, at_least, group, subcommands, takes
from mlx_parallm.config import API_KEY_VARIABLE, is_loopback
from mlx_parallm.errors import ConfigError, ParaLLMError
from mlx_parallm.processes import stdin_until_exit

_SETTINGS = (
    *("model.base_model_path", "model.max_model_len", "adapters.adapter_dir"),
    *("checkpointing.checkpoint_dir", "rl_training.update_frequency"),
)
_SERVER = (
    "from mlx_parallm.processes import end_with_parent; end_with_parent()\n"
    "from mlx_parallm.cli.main import serve; raise SystemExit(serve())"
)
"""The program of a server that is started: it is killed when this process is, whatever killed it."""
_POLL_S = 0.2
_STOP_S = 60.0
"""Longest time for the end of a server; it may have to save its last updates."""
_CLAUDE_MODELS = (
    *("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_OPUS_MODEL", "ANTHROPIC_DEFAULT_SONNET_MODEL"),
    *("ANTHROPIC_DEFAULT_HAIKU_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL"),
)
"""Variables of the models that Claude Code asks for: in the foreground, in the background, and in its agents."""
_CLAUDE_ANSWER = 32_000
"""Tokens of the longest answer that Claude Code asks for by default."""


@dataclass(frozen=True, slots=True)
class AgentServer:
    """What an agent is told: the server's address, its key, a model, the tokens of its context if they are known, and
    headers for every request."""

    url: str
    key: str | None
    model: str
    context: int | None
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Agent:
    """A coding agent: a program of a package of npm. `setup` returns the arguments and the environment variables that
    make it use a server."""

    name: str
    executable: str
    package: str
    setup: Callable[[AgentServer], tuple[Sequence[str], Mapping[str, str]]]


def _claude_code(served: AgentServer) -> tuple[Sequence[str], Mapping[str, str]]:
    """The variables are in --settings too, because those of the user's settings files override the environment. A key
    is not: other users of the machine can read arguments."""
    variables = {
        "ANTHROPIC_BASE_URL": served.url,
        "ANTHROPIC_API_KEY": "",
        **dict.fromkeys(_CLAUDE_MODELS, served.model),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    if served.context is not None:
        # It compacts a conversation when there is no room for an answer of the maximum length.
        variables["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] = str(served.context)
        variables["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = str(min(_CLAUDE_ANSWER, served.context // 4))
    if served.headers:
        variables["ANTHROPIC_CUSTOM_HEADERS"] = "\n".join(f"{name}: {value}" for name, value in served.headers.items())
    token = {"ANTHROPIC_AUTH_TOKEN": served.key or "none"}
    overriding = variables if served.key else {**variables, **token}
    return ("--settings", json.dumps({"env": overriding})), {**variables, **token}


def _codex(served: AgentServer) -> tuple[Sequence[str], Mapping[str, str]]:
    """A value of -c is TOML, which has JSON's texts and numbers."""
    provider = "model_providers.parallm"
    values: dict[str, object] = {
        "model": served.model,
        "model_provider": "parallm",
        f"{provider}.name": "MLX ParaLLM",
        f"{provider}.base_url": f"{served.url}/v1",
        f"{provider}.wire_api": "responses",
        f"{provider}.env_key": API_KEY_VARIABLE,
        **{f"{provider}.http_headers.{name}": value for name, value in served.headers.items()},
    }
    if served.context is not None:
        values["model_context_window"] = served.context
    arguments = [part for name, value in values.items() for part in ("-c", f"{name}={json.dumps(value)}")]
    return arguments, {API_KEY_VARIABLE: served.key or "none"}


def _launch(agent: Agent, args: Namespace) -> int:
    """Runs an agent in this terminal. Returns its exit status, or 128 and the number of the signal that ended it.

    Raises:
        ConfigError: the agent is not installed, or arguments do not fit together; see also `Client`.
        ParaLLMError: the server cannot be started, or does not train; see also `Client`.
    """
    executable = shutil.which(agent.executable)
    if executable is None:
        raise ConfigError(f"{agent.executable} is not on the PATH; install it: npm install -g {agent.package}")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # ends the agent and the server, too
    episode, client = _episode(agent, args), Client(args)
    with _server(args, client):
        served = _served(args, client, episode)
        print(f"{agent.executable} uses {served.model} at {client.base}", file=sys.stderr)
        arguments, variables = agent.setup(served)
        status = _run([executable, *arguments, *args.arguments], variables)
        if episode and status >= 0:
            _reward(args, client, episode)
    return status if status >= 0 else 128 - status


def _command(agent: Agent) -> Command:
    learn = "Collect the requests as one episode. GROUP: a name for attempts at one task, whose rewards are compared."
    attempts = "The attempts after which the GROUP is learnt from."
    reward = "Rewards the episode at the end: 1 if this shell command succeeds, or else 0. Default: you are asked."
    return takes(
        argument("arguments", nargs="*", metavar="ARGUMENT", help=f"Arguments of {agent.executable}, after --."),
        argument("--adapter", metavar="NAME", help="The adapter that answers. Default: what the server chooses."),
        argument("--learn", nargs="?", const="", metavar="GROUP", help=learn),
        argument("--group-size", type=at_least(1), metavar="N", help=attempts),
        argument("--reward-command", metavar="COMMAND", help=reward),
        *SERVER,
        group("a server", flags_of_keys(*_SETTINGS), description="Started at --url if none answers there."),
    )(partial(_launch, agent))


COMMANDS = subcommands(
    *(
        (agent.name, f"Run {agent.executable}. Its own arguments come after --.", _command(agent))
        for agent in (
            Agent("claude-code", "claude", "@anthropic-ai/claude-code", _claude_code),
            Agent("codex", "codex", "@openai/codex", _codex),
        )
    )
)


def _run(command: Sequence[str], variables: Mapping[str, str]) -> int:
    """Runs the agent, which gets Ctrl-C from the terminal. A negative exit status is the signal that ended it."""
    agent = subprocess.Popen(command, env={**os.environ, **variables})
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        return agent.wait()
    finally:
        signal.signal(signal.SIGINT, before)
        agent.terminate()
        agent.wait()


# -- the episode -----------------------------------------------------------------------------------


def _episode(agent: Agent, args: Namespace) -> dict[str, str]:
    """The names of the episode, as feedback has them. Empty: nothing is collected."""
    if args.group_size is not None and not args.learn:
        raise ConfigError("--group-size needs --learn GROUP")
    if args.learn is None:
        if args.reward_command is not None:
            raise ConfigError("--reward-command needs --learn")
        return {}
    if args.reward_command is None and not sys.stdin.isatty():
        raise ConfigError("--learn: nobody can be asked without a terminal; add --reward-command")
    return {"episode_id": f"{agent.name}-{uuid.uuid4().hex}", **({"group_id": args.learn} if args.learn else {})}


def _reward(args: Namespace, client: Client, episode: Mapping[str, str]) -> None:
    """Ends the episode with its reward, if there is one."""
    if args.reward_command is not None:
        answer = "n" if subprocess.run(args.reward_command, shell=True).returncode else "y"
    else:
        answer = input("Was it well done? y or n, anything else for no reward: ").strip().lower()
    score = {"y": 1.0, "n": 0.0}.get(answer)
    if score is not None:
        client.ask("/v1/training/feedback", {**episode, "score": score})
    print("no reward" if score is None else f"rewarded with {score:g}", file=sys.stderr)


# -- the server ------------------------------------------------------------------------------------


def _served(args: Namespace, client: Client, episode: Mapping[str, str]) -> AgentServer:
    if episode:
        client.ask("/v1/training/status")  # an error if the server does not train
    answer = client.ask(f"/v1/models/{args.adapter}" if args.adapter else "/v1/models")
    with client.reading():
        card = answer if args.adapter else answer["data"][0]
        model, context = args.adapter or card["id"], card["max_model_len"]
    fields = episode if args.group_size is None else {**episode, "group_size": str(args.group_size)}
    headers = {f"X-{name.replace('_', '-').title()}": value for name, value in fields.items()}
    return AgentServer(client.base, args.api_key or os.environ.get(API_KEY_VARIABLE), model, context, headers)


@contextmanager
def _server(args: Namespace, client: Client) -> Iterator[None]:
    """A server at the client's address while the block runs: the one that answers there, or one that is started."""
    given = [*settings(args).values()]
    if _answers(client):
        if given:
            raise ConfigError(f"{given[0].source}: a server runs at {client.base}; leave it out, or give another --url")
        yield
        return
    url = urlsplit(client.base)
    if url.scheme != "http" or not is_loopback(url.hostname or ""):
        raise ParaLLMError(f"no server answers at {client.base}, and none can be started there")
    flags = [f"--host={url.hostname}", f"--port={url.port or 80}"]
    flags += ["--enable-rl-training"] if args.learn is not None else []
    for setting in given:
        flags += [setting.source, *(setting.value if isinstance(setting.value, list) else [str(setting.value)])]
    with _started(flags, {API_KEY_VARIABLE: args.api_key} if args.api_key else {}, client):
        yield


def _answers(client: Client) -> bool:
    """Whether anything listens at the server's address."""
    import httpx

    with client.asking(), suppress(httpx.ConnectError):
        httpx.get(f"{client.base}/health", timeout=TIMEOUT_S)
        return True
    return False


@contextmanager
def _started(flags: Sequence[str], variables: Mapping[str, str], client: Client) -> Iterator[None]:
    """Runs a server until the block ends, in a process group of its own, because Ctrl-C is for the agent."""
    print("starting a server", file=sys.stderr)
    command, env = (sys.executable, "-P", "-c", _SERVER, *flags), {**os.environ, **variables}
    with stdin_until_exit() as stdin, tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(command, env=env, stdin=stdin, stdout=log, stderr=log, process_group=0)
        try:
            while not _answers(client):
                if server.poll() is not None:
                    log.seek(0)
                    raise ParaLLMError(f"the server did not start:\n{log.read()[-2000:]}")
                time.sleep(_POLL_S)
            yield
        finally:
            server.terminate()
            with suppress(subprocess.TimeoutExpired):
                server.wait(_STOP_S)
