"""The three scripts as a user meets them: flags, exit statuses, messages."""

import re
import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import get_args

import pytest

from mlx_parallm.cli.flags import FLAGS, settings
from mlx_parallm.cli.main import main, serve, serve_parser, train
from mlx_parallm.config import KEYS, SECTIONS, SERVE, TRAIN, Mode, resolve
from mlx_parallm.errors import ModelNotFoundError


@pytest.fixture
def app(monkeypatch):
    """A stand-in for the server: remembers the configuration it was started with."""
    module = ModuleType("mlx_parallm.app.serve")
    module.started = []
    module.run = lambda config: module.started.append(config) or 0
    monkeypatch.setitem(sys.modules, "mlx_parallm.app.serve", module)
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


def test_the_token_of_a_cluster_has_a_short_variable_and_is_not_shown(app, monkeypatch, capsys):
    monkeypatch.setenv("MLX_PARALLM_CLUSTER_TOKEN", "s3cret")
    assert serve(["--share-model"]) == 0
    assert app.started[0].cluster.token.get_secret_value() == "s3cret"
    assert serve(["--share-model", "--print-config"]) == 0
    assert "s3cret" not in capsys.readouterr().out


VALUES = {
    **dict.fromkeys(("rl_training.judge.url", "rl_training.teacher.url", "rl_training.atropos_url"), "http://a"),
    **dict.fromkeys(("rl_training.divergence.webhook", "server.otlp_traces_endpoint"), "http://a"),
    **dict.fromkeys(("cluster.connect_to", "cluster.advertise"), "node1:1"),
    "cluster.nats_url": "nats://node1:1",
    "server.access_log": "false",
    "server.cors_origins": "http://a",
    "server.kv_bits": "4",
    "server.priority_ratios.inference": "0.5",
    "server.priority_ratios.training": "0.5",
    "server.speculation": "off",
    "server.trusted_proxies": "127.0.0.1",
}
"""Values of the settings that do not take what `another_value` returns."""
NEEDED = {
    "cluster.nats_url": ["--share-model"],
    "model.draft_model": ["--speculation", "draft"],
    "rl_training.atropos_url": ["--enable-rl-training"],
    "rl_training.curriculum.enabled": ["--environment", "text"],
    "rl_training.evaluation.every": ["--environment", "text"],
    "rl_training.evaluation.samples": ["--rl_training.evaluation.temperature", "1"],
    "rl_training.evaluation.tasks": ["--eval-every", "7"],
    "rl_training.gate.eval_floor": ["--eval-every", "7", "--environment", "text"],
    "rl_training.judge.url": ["--judge-model", "m"],
    "rl_training.teacher.model": ["--teacher-url", "http://a"],
    "rl_training.teacher.url": ["--teacher-model", "m"],
    "server.atropos_api": ["--enable-rl-training"],
    "server.prefix_cache_disk": ["--prefix-cache-dir", "text"],
    "server.priority_ratios.inference": ["--server.priority_ratios.training", "0.5"],
    "server.priority_ratios.training": ["--server.priority_ratios.inference", "0.5"],
}
"""Flags without which a setting is refused."""
ADJUSTED = {
    "cluster.connect_to": {"server.host"},
    "cluster.nats_url": {"server.host"},
    "cluster.share_model": {"server.host"},
    "rl_training.atropos_url": {"server.mode"},
    "rl_training.enabled": {"server.mode"},
    "server.atropos_api": {"server.mode"},
    "server.mode": {"rl_training.enabled"},
}
"""Settings that follow another one."""


def another_value(key):
    """A value that a setting takes and that is not its default, as the text of a flag."""
    kind, default = key.field.annotation, key.field.default
    kinds = [kind, *(getattr(each, "__origin__", each) for each in get_args(kind))]
    enums = [each for each in kinds if isinstance(each, type) and issubclass(each, StrEnum)]
    if words := [*enums[0]] if enums else [each for each in kinds if isinstance(each, str)]:
        return [word for word in words if word != default][-1]
    if int in kinds:
        return str(7 if default is None else default + 1)
    if float in kinds:
        return str(0.9 * default if default else 0.5)
    return '{"a": 1}' if key.flag.metavar == "JSON" else "text"


SERVE_FLAGS = serve_parser().filled()


def is_switch(name):
    """Whether the flag of a server takes no value, or need not have one."""
    return name.replace("--", "--no-", 1) in SERVE_FLAGS._option_string_actions


@pytest.mark.parametrize("path", [path for path, key in KEYS.items() if key.flag.only != TRAIN])
def test_every_flag_sets_its_own_key(path):
    key, needed = KEYS[path], NEEDED.get(path, [])
    others = {FLAGS[word].path for word in needed if word in FLAGS} | ADJUSTED.get(path, set())
    for name in (name for name, only in key.flags.items() if only != TRAIN):
        switch = name.replace("--", "--no-", 1) if key.field.default is True else name
        given = [switch] if is_switch(name) else [name, VALUES.get(path) or another_value(key)]
        resolved = resolve(settings(SERVE_FLAGS.parse_args([*needed, *given])))
        assert {*leaves(resolved.config.model_dump(exclude_defaults=True))} - others == {path}
        assert resolved.sources.keys() - others == {path}
        assert resolved.sources[path] == (name if name == f"--{path}" else key.flag.name)


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
        (["--server.prot", "1"], "error: --server.prot: unknown flag; did you mean --server.port?"),
        (["--port", "1", "--server.port", "2"], "error: --server.port: --port sets server.port too; keep one of them"),
        (
            ["--model-path", "a", "b", "--model.other_base_models", "c"],
            "error: --model.other_base_models: --model-path sets model.other_base_models too; keep one of them",
        ),
        (
            ["--resume", "a", "--checkpointing.checkpoint_dir", "b"],
            "error: --resume: a is a run, and --checkpointing.checkpoint_dir names one too; keep one",
        ),
        (["--no-checkpointing.resume", "a"], "error: --no-checkpointing.resume takes no value, got 'a'"),
        (["--api-kee=s3cret"], "error: --api-kee: unknown flag; did you mean --api-key?"),
        (["8000"], "error: unexpected argument '8000'"),
        (["--port"], "error: argument --port: expected one argument"),
        (["--port", "x"], "error: server.port: must be a valid integer"),
        (["--max-tokens", "9"], "error: --max-tokens: only mlx_parallm_train has this flag; leave it out"),
        (
            ["--inference.timeout", "9"],
            "error: --inference.timeout: only mlx_parallm_train has this flag; leave it out",
        ),
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


HEAVY = {"mlx", "mlx.core", "transformers", "fastapi", "huggingface_hub", "matplotlib", "rich"}


@pytest.mark.parametrize(("command", "program"), [("serve", SERVE), ("train", TRAIN)])
def test_help_all_has_every_flag_that_the_command_obeys_in_its_section(command, program):
    printed, modules = modules_after(command, "--help-all")
    _, *parts = re.split(r"^(\S+):\n", printed, flags=re.MULTILINE)
    blocks = dict(zip(parts[::2], parts[1::2], strict=True))
    for section in SECTIONS:
        keys = [key for path, key in KEYS.items() if path.rpartition(".")[0] == section]
        first = [next((name for name, only in key.flags.items() if only in (None, program)), None) for key in keys]
        shown = blocks.get(section, "").replace(",", "").split()
        assert [name for name in first if name and name not in shown] == []
        assert (section in blocks) is any(first)
    hidden = [f"--{path}" for path, key in KEYS.items() if key.flag.name and key.flag.short_in is None]
    assert [name for name in hidden if name in printed] == []
    assert not HEAVY & modules


@pytest.mark.parametrize(("command", "program"), [("serve", SERVE), ("train", TRAIN)])
def test_help_has_the_common_flags_and_loads_no_model_library(command, program):
    printed, modules = modules_after(command, "-h")
    shown = {word.strip(",") for word in printed.split() if word.startswith("--")} - {"--help", "--help-all"}
    common = {key.flag.name for key in KEYS.values() if key.flag.common and key.flags[key.flag.name] in (None, program)}
    assert common <= shown
    assert {name for name in shown if name in FLAGS} - common <= {"--run", "--mode", "--connect-to"}
    assert len(common) <= 30
    assert printed.endswith("--help-all shows all settings.")
    assert not HEAVY & modules


def test_help_of_all_commands_imports_none_of_them():
    """It has to be quick, so it needs neither the configuration nor what a command imports."""
    printed, modules = modules_after("-h")
    assert {"serve", "adapters", "completion"} <= set(printed.split())
    ours = {name for name in modules if name.startswith("mlx_parallm")}
    assert ours <= {f"mlx_parallm{name}" for name in ("", ".blas", ".errors", ".cli", ".cli.main", ".cli.parser")}
    assert not {"pydantic", "yaml", "asyncio", "numpy"} & modules


@pytest.mark.parametrize("path", [path for path, key in KEYS.items() if key.flag.only == SERVE])
def test_a_run_refuses_what_only_a_server_obeys(capsys, path):
    for name in KEYS[path].flags.keys() - {"--mode"}:
        for given in (name, *([name.replace("--", "--no-", 1)] if is_switch(name) else [])):
            assert train([given]) == 2
            refused = f"error: {given}: only mlx_parallm_serve has this flag; leave it out"
            assert capsys.readouterr().err.startswith(refused)


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
def exported(monkeypatch):
    """A stand-in for what writes models and adapters: remembers its arguments."""
    module = ModuleType("mlx_parallm.model.merge")
    calls = []
    module.merge = lambda *args, **options: calls.append((*args, options))
    module.export_adapter = lambda *args: calls.append(args)
    monkeypatch.setitem(sys.modules, "mlx_parallm.model.merge", module)
    return calls


def test_export_hands_its_folders_on(exported, capsys):
    assert main(["adapters", "export", "a/math", "--to", "fused", "--out", "out dir"]) == 0
    assert "serve --model-path 'out dir'" in capsys.readouterr().out
    assert main(["adapters", "export", "a", "--to=fused", "--out=b", "--model-path=o/m", "--dequantize"]) == 0
    assert main(["adapters", "export", "a", "--to=mlx", "--out=b", "--base-name=o/n"]) == 0
    assert main(["adapters", "export", "a", "--to=gguf", "--out=b"]) == 0
    assert exported == [
        (None, Path("a/math"), Path("out dir"), {"dequantize": False}),
        ("o/m", Path("a"), Path("b"), {"dequantize": True}),
        (None, Path("a"), Path("b"), "mlx-lm", "o/n"),
        (None, Path("a"), Path("b"), "gguf", "HuggingFaceTB/SmolLM2-135M-Instruct"),
    ]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["load", "math"], "error: the following arguments are required: PATH"),
        (["load", "math", "x", "y"], "error: unexpected argument 'y'"),
        (["load", "math", "x", "--replce"], "error: --replce: unknown flag; did you mean --replace?"),
        (["export", "a"], "error: the following arguments are required: --to"),
        (["export", "a", "--to=peft", "--out=b", "--dequantize"], "error: --dequantize: --to peft writes no model"),
        (["lst"], "error: argument COMMAND: invalid choice: 'lst'"),
    ],
)
def test_mistyped_adapter_command_exits_2(exported, capsys, argv, message):
    assert main(["adapters", *argv]) == 2
    assert capsys.readouterr().err.startswith(message)
    assert exported == []
