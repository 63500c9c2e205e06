"""From flags, environment and yaml to one frozen configuration, or to one line per problem."""

from pathlib import Path

import pytest

from mlx_parallm.config import Config, Setting, resolve
from mlx_parallm.errors import ConfigError


def problems(flags=None, environ=None, file=None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        resolve(flags or {}, environ or {}, file)
    return str(caught.value).splitlines()


def yaml_problems(file: Path) -> list[str]:
    return [line.replace(str(file), "FILE") for line in problems(file=file)]


def test_flag_wins_over_environment_over_yaml_over_default(yaml_file):
    keys = ("port", "max_queued", "max_batch_size", "max_batched_tokens")
    file = yaml_file("server: {port: 1, max_queued: 1, max_batch_size: 1}")
    environ = {"MLX_PARALLM_SERVER__PORT": "2", "MLX_PARALLM_SERVER__MAX_QUEUED": "2"}
    resolved = resolve({"server.port": Setting("3", "--port")}, environ, file)
    assert [getattr(resolved.config.server, key) for key in keys] == [3, 2, 1, 2048]
    assert resolved.sources == {
        "server.port": "--port",
        "server.max_queued": "MLX_PARALLM_SERVER__MAX_QUEUED",
        "server.max_batch_size": str(file),
    }


def test_template_variables_are_a_mapping_or_json(yaml_file):
    for value in ("{enable_thinking: false}", "'{\"enable_thinking\": false}'"):
        resolved = resolve({}, {}, yaml_file(f"model: {{chat_template_kwargs: {value}}}"))
        assert resolved.config.model.chat_template_kwargs == '{"enable_thinking": false}'
    for bad in ("{1: 2}", "{enable_thinking: false, 'two words': 1}"):
        (line,) = problems(file=yaml_file(f"model: {{chat_template_kwargs: {bad}}}"))
        assert "must be a JSON object of variables" in line


def test_sources_of_one_section_are_merged_key_by_key(yaml_file):
    file = yaml_file("server:\n  priority_ratios: {inference: 0.5}\nmodel:\n")
    resolved = resolve({}, {"MLX_PARALLM_SERVER__PRIORITY_RATIOS__TRAINING": "0.5"}, file)
    assert resolved.config.server.priority_ratios.inference == resolved.config.server.priority_ratios.training == 0.5


def test_nothing_set_is_the_default(yaml_file):
    assert resolve({}).config == resolve({}, {}, yaml_file("")).config == Config()
    assert resolve({}, {"MLX_PARALLM_SERVER__PORT": "", "MLX_PARALLM_BLAS": "none", "HOME": "/"}).config == Config()


def test_texts_of_flags_and_environment_are_read_by_type():
    environ = {
        "MLX_PARALLM_SERVER__KV_CACHE_MEMORY": "1.5GiB",
        "MLX_PARALLM_SERVER__MAX_BODY_BYTES": "64KB",
        "MLX_PARALLM_SERVER__ALLOWED_HOSTS": "box.local, fe80::1,*",
        "MLX_PARALLM_SERVER__LOG_LEVEL": "WARNING",
        "MLX_PARALLM_SERVER__ACCESS_LOG": "false",
        "MLX_PARALLM_SERVER__SHUTDOWN_TIMEOUT": "0.5",
    }
    server = resolve({}, environ).config.server
    assert server.kv_cache_memory == 3 * 2**29
    assert server.max_body_bytes == 64_000
    assert server.allowed_hosts == ("box.local", "fe80::1", "*")
    assert (server.log_level, server.access_log, server.shutdown_timeout) == ("warning", False, 0.5)


def test_auto_memory_overrides_a_size(yaml_file):
    file = yaml_file("server: {kv_cache_memory: 4GB}")
    assert resolve({}, {}, file).config.server.kv_cache_memory == 4_000_000_000
    assert resolve({"server.kv_cache_memory": Setting("auto", "-")}, {}, file).config.server.kv_cache_memory is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("server: {max_batchsize: 3}", "server.max_batchsize: unknown key; did you mean server.max_batch_size?"),
        ("server: {priority_ratios: {infer: 1}}", "server.priority_ratios.infer: unknown key; did you mean "),
        ("sever: {port: 1}", "sever: unknown key; did you mean server?"),
        ("modle: {}", "modle: unknown key; did you mean model?"),
        ("port: 1", "port: unknown key; did you mean server.port?"),
        ("adapter: {}", "adapter: unknown key; did you mean adapters?"),
        ("server: {max_loras: 8}", "server.max_loras: unknown key; did you mean adapters.max_loras?"),
        ("server: {lora_rank: 8}", "server.lora_rank: unknown key; did you mean model.lora_rank?"),
        ("qqq: 1", "qqq: unknown key; remove it (in FILE)"),
    ],
)
def test_unknown_yaml_key_is_refused_with_a_suggestion(yaml_file, text, expected):
    (line,) = yaml_problems(yaml_file(text))
    assert line.startswith(expected)
    assert line.endswith("(in FILE)")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("MLX_PARALLM_SERVER__PROT", "MLX_PARALLM_SERVER__PORT"),
        ("MLX_PARALLM_SERVER_PORT", "MLX_PARALLM_SERVER__PORT"),
        ("MLX_PARALLM_PORT", "MLX_PARALLM_SERVER__PORT"),
        ("MLX_PARALLM_SERVER__MAX_BATCHSIZE", "MLX_PARALLM_SERVER__MAX_BATCH_SIZE"),
    ],
)
def test_unknown_variable_is_refused_with_a_suggestion(name, meant):
    assert problems(environ={name: "1"}) == [f"{name}: unknown variable; did you mean {meant}?"]


def test_every_problem_gets_its_own_line(yaml_file):
    text = "server: {port: 99999, max_batch_size: 0, shutdown_timeout: .inf}"
    lines = yaml_problems(yaml_file(text))
    assert lines[0] == "server.port: must be less than or equal to 65535, got 99999 (from FILE)"
    assert [line.partition(":")[0] for line in lines] == [
        "server.port",
        "server.max_batch_size",
        "server.shutdown_timeout",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "server: {port: true}",
        "server: {port: 1.5}",
        "server: {port: {a: 1}}",
        "server: {port: -1}",
        "server: {host: ''}",
        "server: {mode: serving}",
        "server: {log_level: loud}",
        "server: {kv_cache_memory: 4G}",
        "server: {kv_bits: 2}",
        "server: {kv_bits: 16}",
        "server: {kv_bits: true}",
        "server: {kv_cache_memory: 0}",
        "server: {kv_cache_memory: -1}",
        "server: {kv_cache_memory: .nan}",
        "server: {max_body_bytes: auto}",
        "server: {shutdown_timeout: .nan}",
        "server: {cors_origins: ['example.org']}",
        "server: {cors_origins: ['https://example.org/']}",
        "server: {priority_ratios: {inference: 0.5}}",
        "server: {priority_ratios: {inference: -0.5}}",
        "server: {host: 'localhost:8000'}",
        "server: {host: 'http://localhost'}",
        "server: {allowed_hosts: [3]}",
        "server: {allowed_hosts: ['box.local:8000']}",
        "model: {lora_alpha: 0}",
        "model: {lora_target_modules: []}",
        "model: {max_model_len: 0}",
        "rl_training: {update_frequency: 0}",
        "rl_training: {algorithm: reinforce}",
        "rl_training: {group_timeout_s: 0}",
        "rl_training: {max_staleness: -1}",
        "rl_training: {training_time_share: 0}",
        "rl_training: {training_time_share: 1.1}",
        "rl_training: {micro_batch_tokens: 0}",
        "rl_training: {trajectory_log: ''}",
        "rl_training: {environment: ''}",
        "rl_training: {seed: -1}",
        "checkpointing: {keep_n_checkpoints: 0}",
        "checkpointing: {checkpoint_dir: ' '}",
        "adapters: {adapter_dir: 3}",
        "adapters: {adapter_dir: '~no-such-user-here/x'}",
        'adapters: {adapter_dir: "a\\0b"}',
        "adapters: {allowed_adapter_roots: [a, '']}",
        "adapters: {max_loras: 0}",
        "adapters: {max_cpu_loras: -1}",
        "adapters: {max_lora_rank: 0}",
        "adapters: {max_lora_rank: 513}",
    ],
)
def test_bad_value_is_one_line_that_names_its_key(yaml_file, text):
    section, key = text.replace("{", "").split(":")[:2]
    (line,) = yaml_problems(yaml_file(text))
    assert line.startswith(f"{section}.{key.strip()}")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("server: 3", "server: must hold `key: value` lines, not int (in FILE)"),
        ("server.port: 8", "server.port: write it nested"),
        ("- 3", "FILE: must hold `key: value` lines, not list (in FILE)"),
        ("server: {port: 1, port: 2}", "FILE: not valid yaml: line 1, column 19: port is there twice"),
        ("a: [", "FILE: not valid yaml: line 1, column 5: "),
        ("? [a]\n: 3", "FILE: not valid yaml: line 1, column 3: "),
        ("\x00", "FILE: not valid yaml: it must be UTF-8 text"),
        ("a: 2001-99-99", "FILE: not valid yaml: a number or a date in it is malformed"),
        ("a: 0x_", "FILE: not valid yaml: a number or a date in it is malformed"),
        ("[" * 2000, "FILE: not valid yaml: it is nested too deeply"),
    ],
)
def test_malformed_yaml_says_where(yaml_file, text, expected):
    (line,) = yaml_problems(yaml_file(text))
    assert line.startswith(expected)


def test_named_file_must_exist(tmp_path):
    assert problems(file=tmp_path / "none.yaml") == [
        f"{tmp_path}/none.yaml: the configuration file cannot be read: No such file or directory"
    ]


# ---- adapters ----------------------------------------------------------------------------------


def test_adapter_folders_are_taken_as_given_and_home_is_expanded(monkeypatch, yaml_file):
    monkeypatch.setenv("HOME", "/home/ada")
    environ = {"MLX_PARALLM_ADAPTERS__ALLOWED_ADAPTER_ROOTS": "~/loras, ../here,/mnt/x"}
    file = yaml_file("adapters: {adapter_dir: '~'}\ncheckpointing: {checkpoint_dir: a/../b}")
    config = resolve({}, environ, file).config
    assert config.adapters.adapter_dir == Path("/home/ada")
    assert config.adapters.allowed_adapter_roots == (Path("/home/ada/loras"), Path("../here"), Path("/mnt/x"))
    assert config.checkpointing.checkpoint_dir == Path("a/../b")


@pytest.mark.parametrize("name", ["math", "Math-2_b.1", "_", "x" * 64, "latest2", "checkpoint", "checkpoint-x"])
def test_plain_adapter_names_are_taken(name):
    settings = {"adapters.default_adapter": Setting(name, "-"), "adapters.serve": Setting(name, "-")}
    adapters = resolve(settings).config.adapters
    assert adapters.default_adapter == adapters.serve == name


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", ".hid", "a/b", "../a", "a\\b", "a b", "a\n", "a\0", "ü", "a@1", "x" * 65),
        *("base", "latest", "best", "checkpoint-0", "checkpoint-12"),
    ],
)
def test_default_adapter_is_a_plain_name_that_means_nothing_else(name):
    (line,) = problems({"adapters.default_adapter": Setting(name, "--default-adapter")})
    assert line.startswith("adapters.default_adapter: ")
    assert line.endswith("(from --default-adapter)")


@pytest.mark.parametrize("selector", ["math@2", "checkpoint-7", "latest", "best", "base", "v1.5@10"])
def test_what_is_served_may_be_a_version_or_a_checkpoint(selector):
    assert resolve({"adapters.serve": Setting(selector, "-")}).config.adapters.serve == selector


@pytest.mark.parametrize(
    "selector", ["", "math@", "@1", "math@latest", "math@1@2", "math@-1", "math@1\n", "a/b", "../x"]
)
def test_what_is_served_is_never_a_path(selector):
    (line,) = problems({"adapters.serve": Setting(selector, "--serve-adapter")})
    assert line.startswith("adapters.serve: must be a name, name@version, ")


# ---- the secret --------------------------------------------------------------------------------


def test_api_key_has_a_short_variable_and_never_shows():
    config = resolve({}, {"MLX_PARALLM_API_KEY": "s3cret"}).config
    assert config.server.api_key is not None
    assert config.server.api_key.get_secret_value() == "s3cret"
    assert "s3cret" not in f"{config!r} {config.model_dump()} {config.model_dump_json()}"


@pytest.mark.parametrize("key", ["s3cret with spaces", "s3crét", "s3cret\n"])
def test_unusable_api_key_is_refused_without_being_shown(key):
    (line,) = problems(environ={"MLX_PARALLM_API_KEY": key})
    assert line.startswith("server.api_key: must be visible ASCII")
    assert "s3cr" not in line


def test_malformed_yaml_does_not_quote_the_secret(yaml_file):
    assert "s3cret" not in "".join(yaml_problems(yaml_file("server: {api_key: s3cret: x}")))


def test_two_variables_for_one_key_are_refused():
    environ = {"MLX_PARALLM_API_KEY": "a", "MLX_PARALLM_SERVER__API_KEY": "b"}
    assert problems(environ=environ) == [
        "MLX_PARALLM_SERVER__API_KEY: MLX_PARALLM_API_KEY sets server.api_key too; keep one of them"
    ]


def test_a_size_of_files_without_their_folder_is_refused():
    assert problems({"server.prefix_cache_disk": Setting("20GB", "--prefix-cache-disk")}) == [
        "server.prefix_cache_disk: limits the files of server.prefix_cache_dir, which is not set; "
        "add --prefix-cache-dir (from --prefix-cache-disk)"
    ]
