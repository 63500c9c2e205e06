"""The three scripts as a user meets them: flags, exit statuses, messages."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import mlx_parallm
from mlx_parallm.cli.flags import FLAGS, GROUPS, SERVE, TRAIN
from mlx_parallm.cli.main import main, serve, train
from mlx_parallm.config import Mode
from mlx_parallm.errors import ModelNotFoundError


@pytest.fixture
def app(monkeypatch):
    """A stand-in for the server: remembers the configuration it was started with."""
    module = ModuleType("mlx_parallm.app.server")
    module.started = []
    module.run = lambda config: module.started.append(config) or 0
    monkeypatch.setitem(sys.modules, "mlx_parallm.app.server", module)
    return module


def test_flags_reach_the_server(app, tmp_path, monkeypatch):
    file = tmp_path / "settings.yaml"
    file.write_text("server: {port: 1, host: 127.0.0.2}\ndebug: {check_when_idle: true}")
    monkeypatch.setenv("MLX_PARALLM_SERVER__HOST", "127.0.0.3")
    argv = ["--config", str(file), "--port", "9000", "--no-debug", "--kv-cache-memory", "1GiB", "--model-path", "m"]
    assert serve(argv) == main(["serve", *argv]) == 0
    first, second = app.started
    assert first == second
    assert (first.server.port, first.server.host, first.debug.check_when_idle) == (9000, "127.0.0.3", False)
    assert (first.server.kv_cache_memory, first.model.base_model_path) == (2**30, "m")


@pytest.mark.parametrize(
    "argv",
    [
        ["--served-model-name", "a", "b"],
        ["--served-model-name", "a,b"],
        ["--served-model-name", "a", "--served-model-name", "b"],
    ],
)
def test_several_names_for_the_served_model(app, argv):
    assert serve(argv) == 0
    assert app.started[0].server.served_model_name == ("a", "b")


@pytest.mark.parametrize(
    "argv",
    [["--model-path", "a", "b, c", "d"], ["--model-path", "a", "--model-path", "b, c", "--model-path", "d"]],
)
def test_several_base_models(app, argv):
    assert serve(argv) == 0
    model = app.started[0].model
    assert (model.base_model_path, model.other_base_models) == ("a", ("b, c", "d"))


@pytest.mark.parametrize(
    ("argv", "host"),
    [
        ([], "127.0.0.1"),
        (["--share-model"], "0.0.0.0"),
        (["--connect-to", "node1:8000"], "0.0.0.0"),
        (["--connect-to", "node1:8000", "--host", "10.0.0.3"], "10.0.0.3"),
    ],
)
def test_a_node_of_a_cluster_listens_to_the_others(app, argv, host):
    assert serve(["--mode", "inference", *argv]) == 0
    assert app.started[0].server.host == host


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--share-model", "--connect-to", "node1:8000"], "keep one of the two"),
        (["--connect-to", "http://node1:8000"], "must be HOST:PORT, such as node1:8000"),
        (["--connect-to", "node1"], "must be HOST:PORT, such as node1:8000"),
        (["--nats-url", "nats://node1:4222"], "add --share-model or remove it"),
        (["--share-model", "--nats-url", "node1:4222"], "must begin with nats:// or tls://"),
    ],
)
def test_flags_of_a_cluster_that_do_not_fit_are_named(app, capsys, argv, message):
    assert serve(argv) == 2
    assert message in capsys.readouterr().err
    assert not app.started


def test_a_trainer_of_a_cluster_needs_no_environment_but_its_token(capsys):
    assert train(["--mode", "rl", "--connect-to", "node1:8000"]) == 2
    assert "set MLX_PARALLM_CLUSTER_TOKEN" in capsys.readouterr().err
    assert train(["--connect-to", "node1:8000", "--environment", "words"]) == 2
    assert "--steps: say how many updates to make" in capsys.readouterr().err


def test_the_token_of_a_cluster_has_a_short_variable_and_is_not_shown(app, monkeypatch, capsys):
    monkeypatch.setenv("MLX_PARALLM_CLUSTER_TOKEN", "s3cret")
    assert serve(["--share-model"]) == 0
    assert app.started[0].cluster.token.get_secret_value() == "s3cret"
    assert serve(["--share-model", "--print-config"]) == 0
    assert "s3cret" not in capsys.readouterr().out


def test_every_flag_sets_its_own_key(app):
    values = {"--port": "1", "--mode": "inference", "--log-level": "error", "--kv-cache-memory": "1GB"}
    values |= {"--trusted-proxies": "127.0.0.1", "--log-format": "json", "--otlp-traces-endpoint": "http://a"}
    values |= {"--mlx-memory-limit": "8GB", "--mlx-cache-limit": "1GB", "--prefix-cache-disk": "1GB"}
    values |= {"--memory-guard": "8GB"}
    values |= {"--kv-bits": "4", "--logprobs-mode": "processed_logprobs", "--max-logprobs": "100"}
    values |= {"--generation-config": "vllm", "--embedding-pooling": "mean", "--speculation": "auto"}
    values |= {"--judge-url": "http://a", "--judge-model": "m", "--atropos-url": "http://a"}
    values |= {"--teacher-url": "http://a", "--teacher-model": "m"}
    values |= {"--cors-origins": "http://a", "--max-model-len": "5", "--shutdown-timeout": "1", "--access-log": "false"}
    values |= {"--rl-algorithm": "dapo", "--update-frequency": "7", "--trajectory-buffer-size": "700"}
    values |= {"--connect-to": "node1:1", "--advertise": "node1:1", "--nats-url": "nats://node1:1"}
    values |= {"--journal-updates": "700"}
    numbers = ("--max-batch-size", "--max-batched-tokens", "--max-queued", "--max-loras", "--max-cpu-loras")
    numbers += ("--max-lora-rank", "--checkpoint-interval", "--keep-n-checkpoints", "--lora-rank", "--lora-alpha")
    numbers += ("--max-staleness", "--micro-batch-tokens", "--seed", "--max-decode-stall-ms")
    numbers += ("--rollout-group-size", "--rollout-timeout")
    values |= dict.fromkeys(numbers, "7")
    values |= {"--eval-every": "7", "--eval-size": "7", "--trackers": "wandb"}
    floats = ("--learning-rate", "--kl-coef", "--training-time-share", "--checkpoint-minutes", "--idle-unload")
    values |= dict.fromkeys(floats, "5e-4")
    others = {"--prefix-cache-disk": ["--prefix-cache-dir", "text"], "--eval-tasks": ["--eval-every", "7"]}
    others |= {"--eval-every": ["--environment", "text"], "--judge-url": ["--judge-model", "m"]}
    others |= {"--teacher-url": ["--teacher-model", "m"], "--teacher-model": ["--teacher-url", "http://a"]}
    others |= {"--draft-model": ["--speculation", "draft"], "--nats-url": ["--share-model"]}
    others |= {"--curriculum": ["--environment", "text"]}
    others |= {"--atropos-url": ["--enable-rl-training"], "--atropos-api": ["--enable-rl-training"]}
    flags = [flag for flag in FLAGS if flag.only != TRAIN]
    for flag in flags:
        switch = flag.name.replace("--", "--no-") if flag.key.field.default is True else flag.name
        needed = others.get(flag.name, [])
        assert serve([*needed, *([flag.name, values.get(flag.name, "text")] if flag.metavar else [switch])]) == 0
    changed = [list(leaves(config.model_dump(exclude_defaults=True))) for config in app.started]
    followers = {"--mode": [], "--enable-rl-training": ["server.mode", "rl_training.enabled"]}
    followers["--atropos-url"] = ["server.mode", "rl_training.enabled", "rl_training.atropos_url"]
    followers["--atropos-api"] = ["server.mode", "server.atropos_api", "rl_training.enabled"]
    followers["--share-model"] = ["server.host", "cluster.share_model"]
    followers["--connect-to"] = ["server.host", "cluster.connect_to"]
    followers["--nats-url"] = ["server.host", "cluster.share_model", "cluster.nats_url"]
    followers["--judge-url"] = ["rl_training.judge.url", "rl_training.judge.model"]
    for flag in ("--teacher-url", "--teacher-model"):
        followers[flag] = ["rl_training.teacher.url", "rl_training.teacher.model"]
    followers["--prefix-cache-disk"] = ["server.prefix_cache_dir", "server.prefix_cache_disk"]
    followers["--draft-model"] = ["server.speculation", "model.draft_model"]
    followers["--eval-every"] = ["rl_training.environment", "rl_training.evaluation.every"]
    followers["--curriculum"] = ["rl_training.environment", "rl_training.curriculum.enabled"]
    followers["--eval-tasks"] = ["rl_training.evaluation.every", "rl_training.evaluation.tasks"]
    assert changed == [followers.get(flag.name, [flag.path]) for flag in flags]


def leaves(tree, prefix=""):
    for name, node in tree.items():
        yield from leaves(node, f"{prefix}{name}.") if isinstance(node, dict) else [prefix + name]


@pytest.mark.parametrize("argv", [["--enable-rl-training"], ["--mode", "rl"], ["--mode", "inference_and_training"]])
def test_training_beside_requests_is_turned_on_by_either_flag(app, argv):
    argv = [*argv, "--lora-rank", "8", "--learning-rate", "1e-4", "--trajectory-log", "log.jsonl"]
    assert serve(argv) == 0
    (config,) = app.started
    assert (config.server.mode, config.rl_training.enabled) == (Mode.INFERENCE_AND_TRAINING, True)
    assert (config.model.lora_rank, config.rl_training.optimizer.learning_rate) == (8, 1e-4)
    assert config.rl_training.trajectory_log == Path("log.jsonl")


def test_print_config_shows_sources_and_no_secret(app, capsys):
    assert serve(["--print-config", "--port", "9000", "--api-key", "s3cret"]) == 0
    printed = capsys.readouterr().out
    assert "port: 9000  # from --port" in printed
    assert "s3cret" not in printed
    assert app.started == []


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--prot", "1"], "error: --prot: unknown flag; did you mean --port?"),
        (["--max-batchsize=4"], "error: --max-batchsize: unknown flag; did you mean --max-batch-size?"),
        (["--por", "1"], "error: --por: unknown flag; did you mean --port?"),
        (["--api-kee=s3cret"], "error: --api-kee: unknown flag; did you mean --api-key?"),
        (["8000"], "error: unexpected argument '8000'"),
        (["--port"], "error: argument --port: expected one argument"),
        (["--port", "x"], "error: server.port: must be a valid integer"),
        (["--max-tokens", "9"], "error: --max-tokens: only mlx_parallm_train has this flag; leave it out"),
        (["--rl-algorithm", "reinforce"], "error: rl_training.algorithm: must be 'grpo', 'bnpo'"),
        (
            ["--mode", "rl", "--lora-rank", "32", "--max-lora-rank", "16"],
            "error: model.lora_rank: 32 is above adapters.max_lora_rank 16",
        ),
        (["--mode", "inference", "--enable-rl-training"], "error: server.mode: inference_only contradicts"),
        (["--config", "/nonexistent/x.yaml"], "error: /nonexistent/x.yaml: the configuration file cannot be read"),
    ],
)
def test_wrong_configuration_exits_2_and_says_what_to_change(app, capsys, argv, message):
    assert serve(argv) == 2
    output = capsys.readouterr()
    assert output.err.startswith(message)
    assert output.err.count("\n") == 1
    assert "s3cret" not in output.err + output.out
    assert app.started == []


def test_each_problem_is_an_error_line(app, capsys):
    assert serve(["--port", "-1", "--max-queued", "0"]) == 2
    assert [line[:13] for line in capsys.readouterr().err.splitlines()] == ["error: server"] * 2


def test_failures_exit_1_and_interrupts_130_quietly(app, capsys):
    def fail(config):
        raise ModelNotFoundError("no model 'm'; name another with --model-path")

    def interrupt(config):
        raise KeyboardInterrupt

    app.run = fail
    assert serve([]) == 1
    assert capsys.readouterr().err == "error: no model 'm'; name another with --model-path\n"
    app.run = interrupt
    assert serve([]) == 130
    assert capsys.readouterr().err == ""


def modules_after(*argv: str) -> tuple[str, set[str]]:
    """What the command prints, and the modules that it has imported."""
    code = f"import sys; from mlx_parallm.cli.main import main\ntry: main({argv!r})\nfinally: print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    printed, _, modules = done.stdout.strip().rpartition("\n")
    return printed, set(modules.split())


@pytest.mark.parametrize(("command", "program"), [("serve", SERVE), ("train", TRAIN)])
def test_help_has_the_flags_that_the_command_obeys_in_their_groups_and_loads_no_model_library(command, program):
    printed, modules = modules_after(command, "-h")
    blocks = {title: lines for title, _, lines in (part.partition(":\n") for part in printed.split("\n\n"))}
    shown = printed.split()
    for group in GROUPS:
        obeyed = [flag.name for flag in group.flags if flag.only in ("", program)]
        assert (group.title in blocks) is bool(obeyed), group.title
        assert [name for name in obeyed if name not in shown and f"{name}," not in shown] == []
    assert [flag.name for flag in FLAGS if flag.only not in ("", program) and f"\n  {flag.name}" in printed] == (
        ["--mode"] if program == TRAIN else []
    )
    assert not {"mlx", "mlx.core", "transformers", "fastapi", "huggingface_hub", "matplotlib", "rich"} & modules


def test_help_of_all_commands_imports_none_of_them():
    """It has to be quick, so it needs neither the configuration nor what a command imports."""
    printed, modules = modules_after("-h")
    assert {"serve", "adapters", "completion"} <= set(printed.split())
    ours = {name for name in modules if name.startswith("mlx_parallm")}
    assert ours <= {f"mlx_parallm{name}" for name in ("", ".blas", ".errors", ".cli", ".cli.main", ".cli.parser")}
    assert not {"pydantic", "yaml", "asyncio", "numpy"} & modules


@pytest.mark.parametrize("flag", [flag for flag in FLAGS if flag.only == SERVE and flag.name != "--mode"])
def test_a_run_refuses_what_only_a_server_obeys(capsys, flag):
    for name in (flag.name, *(() if flag.metavar else (flag.name.replace("--", "--no-", 1),))):
        assert train([name]) == 2
        assert capsys.readouterr().err.startswith(f"error: {name}: only mlx_parallm_serve has this flag; leave it out")


def test_no_command_prints_help(capsys):
    assert main([]) == 2
    assert "doctor" in capsys.readouterr().out


def test_version(capsys):
    assert main(["version"]) == 0
    assert f"mlx_parallm {mlx_parallm.__version__}" in capsys.readouterr().out


def test_list_shows_bundled_and_downloaded_models(capsys, monkeypatch):
    def repository(name, kind, size):
        return SimpleNamespace(repo_id=name, repo_type=kind, size_on_disk=size, repo_path=f"/hub/{name}")

    kinds = (("o/zeta", "model", 2**30), ("o/alpha", "model", 5), ("d", "dataset", 9))
    repositories = [repository(*kind) for kind in kinds]
    monkeypatch.setattr("huggingface_hub.scan_cache_dir", lambda: SimpleNamespace(repos=repositories))
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["model", "SmolLM2-135M-Instruct", "o/alpha", "o/zeta"]
    assert lines[3].split()[1:] == ["1.0", "GiB", "/hub/o/zeta"]


@pytest.fixture
def merged(monkeypatch):
    """A stand-in for the merge: remembers its arguments."""
    module = ModuleType("mlx_parallm.model.merge")
    calls = []
    module.merge = lambda *args, **options: calls.append((*args, options))
    monkeypatch.setitem(sys.modules, "mlx_parallm.model.merge", module)
    return calls


def test_merge_hands_its_folders_on(merged, capsys):
    assert main(["adapters", "merge", "a/math", "out dir"]) == 0
    assert "serve --model-path 'out dir'" in capsys.readouterr().out
    assert main(["adapters", "merge", "a", "b", "--model-path", "o/m", "--dequantize"]) == 0
    assert merged == [
        (None, Path("a/math"), Path("out dir"), {"dequantize": False}),
        ("o/m", Path("a"), Path("b"), {"dequantize": True}),
    ]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["load", "math"], "error: the following arguments are required: PATH"),
        (["load", "math", "x", "y"], "error: unexpected argument 'y'"),
        (["load", "math", "x", "--replce"], "error: --replce: unknown flag; did you mean --replace?"),
        (["merge", "a"], "error: the following arguments are required: OUTPUT_DIR"),
        (["lst"], "error: argument COMMAND: invalid choice: 'lst'"),
    ],
)
def test_mistyped_adapter_command_exits_2(merged, capsys, argv, message):
    assert main(["adapters", *argv]) == 2
    assert capsys.readouterr().err.startswith(message)
    assert merged == []


def test_adapters_alone_prints_its_commands(capsys):
    assert main(["adapters"]) == 2
    assert {"list", "load", "unload", "merge", "average"} <= set(capsys.readouterr().out.split())


def test_completion_knows_the_flags_of_every_command(capsys):
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert {
        flag for flag in ("--enable-rl-training", "--steps", "--replace", "--only-tiny") if flag not in script
    } == set()
    assert main(["completion", "zsh", "--program", "mlx_parallm_train"]) == 0
    assert "--prompts-per-step" in capsys.readouterr().out
    assert main(["completion", "bash", "--program", "other"]) == 2
