"""`mlx_parallm keys` and `mlx_parallm usage`."""

import json
import os
import stat

import pytest

from mlx_parallm.cli.main import main
from mlx_parallm.server.access import KeyRing


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "folder" / "keys.json"
    monkeypatch.setenv("MLX_PARALLM_SERVER__KEYS_FILE", str(path))
    return path


def test_a_key_is_made_shown_once_listed_and_removed(file, capsys):
    assert main(["keys", "add", "laptop", "--requests-per-minute", "30"]) == 0
    secret, _, hint = capsys.readouterr().out.partition("\n")
    assert f"--keys-file {file}" in hint
    assert stat.S_IMODE(os.stat(file).st_mode) == 0o600
    assert KeyRing(file=file).find(secret.encode()).requests_per_minute == 30
    assert main(["keys", "add", "robot", "--role", "train", "--own-prefix-cache", "--json"]) == 0
    assert KeyRing(file=file).find(json.loads(capsys.readouterr().out)["key"].encode()).own_prefix_cache
    assert main(["keys", "add", "acme", "--adapters", "acme*,base"]) == 0
    acme = KeyRing(file=file).find(capsys.readouterr().out.partition("\n")[0].encode())
    assert acme.adapters == ("acme*", "base")
    assert [acme.sees(name) for name in ("acme-1", "base", "globex", "ACME")] == [True, True, False, False]
    assert main(["keys", "list"]) == 0
    listed = capsys.readouterr().out
    rows = [(line.split()[0], line.split()[1], line.split()[-1]) for line in listed.splitlines()[1:]]
    assert rows == [("laptop", "inference", "all"), ("robot", "train", "all"), ("acme", "inference", "acme*,base")]
    assert main(["keys", "list", "--json"]) == 0
    assert "sha256" not in capsys.readouterr().out
    assert main(["keys", "remove", "laptop"]) == 0
    assert KeyRing(file=file).find(secret.encode()) is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["add", "laptop"], "has a key of that name"),
        (["add", "a b"], "name: String should match"),
        (["add", "x", "--max-concurrent", "0"], "max_concurrent: Input should be greater"),
        (["add", "api-key"], "reserved"),
        (["add", "x", "--role", "admin", "--adapters", "a*"], "adapters: Value error, an admin key may do everything"),
        (["add", "x", "--adapters", "a b"], "adapters: String should match"),
        (["add", "x", "--role", "root"], "invalid choice"),
        (["remove", "other"], "has no key of that name; there are laptop"),
        (["list", "--keys-file", "/nowhere/keys.json"], "cannot be read: No such file"),
    ],
)
def test_what_cannot_be_done_says_why(file, capsys, arguments, said):
    assert main(["keys", "add", "laptop"]) == 0
    before = file.read_bytes()
    assert main(["keys", *arguments]) == 2
    assert said in capsys.readouterr().err
    assert file.read_bytes() == before


def test_usage_is_a_table(server, capsys):
    figures = {"requests": 2, "running": 0, "refused": 1, "prompt_tokens": 10, "cached_tokens": 4}
    used = {"key": "laptop", "role": "inference", "completion_tokens": 6, **figures}
    server.answers["/v1/usage"] = json.dumps({"object": "list", "since": 0, "data": [used]}).encode()
    assert main(["usage", "--url", server.url, "--api-key", "k"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "key     role       requests  running  refused  prompt tokens  of them cached  answer tokens",
        "laptop  inference  2         0        1        10             4               6",
    ]
