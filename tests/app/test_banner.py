"""What an operator reads when the server is ready."""

import io
import shlex
from dataclasses import replace

import pytest

from mlx_parallm.app.banner import BannerInfo, base_url, render, show
from mlx_parallm.core import ModelCard

INFO = BannerInfo(
    model=ModelCard(
        name="SmolLM2-135M-Instruct",
        context_length=8192,
        vocab_size=49152,
        quantization="none",
        dtype="float32",
        parameters=134_515_008,
        weight_bytes=538_060_032,
    ),
    adapters=(),
    kv_bytes=2 * 2**30,
    mlx_bytes=11 * 2**30,
    mlx_cache_bytes=2**29,
    mlx_wired_bytes=None,
    device="CPU",
    blas="libopenblas.so.0",
    host="127.0.0.1",
    port=8000,
    authenticated=False,
)


def test_says_what_is_served_and_where():
    text = render(INFO)
    for fact in (
        "SmolLM2-135M-Instruct, 135M parameters",
        "float32, quantization none",
        "8,192 tokens",
        "weights 513.1 MiB, KV cache up to 2.0 GiB",
        "11.0 GiB in all, buffer cache up to 512.0 MiB, none wired",
        "CPU, BLAS libopenblas.so.0",
        "this machine only, no API key",
        "http://127.0.0.1:8000/v1\n",
        "http://127.0.0.1:8000/metrics",
        "http://127.0.0.1:8000/docs",
    ):
        assert fact in text
    assert "WARNING" not in text


def test_says_what_stays_in_memory():
    assert "up to 512.0 MiB, 10.0 GiB wired" in render(replace(INFO, mlx_wired_bytes=10 * 2**30))


def adapters_line(**fields: object) -> str:
    (line,) = (line for line in render(replace(INFO, **fields)).splitlines() if line.strip().startswith("adapters"))
    return line.strip().removeprefix("adapters").strip()


def test_says_which_adapters_there_are_and_how_many_fit():
    room = {"adapter_slots": 8, "adapter_rank": 16}
    assert adapters_line() == "none"
    assert adapters_line(**room) == "none (8 slots, rank up to 16)"
    assert adapters_line(adapters=("math", "tone"), **room) == "math, tone (8 slots, rank up to 16)"
    many = tuple(f"a{number}" for number in range(1, 11))
    assert adapters_line(adapters=many, **room) == "a1, a2, a3, a4, a5, a6, a7, a8 and 2 more (8 slots, rank up to 16)"
    assert adapters_line(adapters=many[:8]) == "a1, a2, a3, a4, a5, a6, a7, a8"


def curl(info: BannerInfo) -> list[str]:
    (line,) = (line for line in render(info).splitlines() if line.strip().startswith("curl"))
    return shlex.split(line)


def test_curl_can_be_pasted():
    assert curl(INFO) == [
        "curl",
        "http://127.0.0.1:8000/v1/completions",
        "-d",
        '{"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}',
    ]
    assert "Authorization: Bearer $MLX_PARALLM_API_KEY" in curl(replace(INFO, authenticated=True))


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("::1", "http://[::1]:80"),
        ("box.local", "http://box.local:80"),
    ],
)
def test_base_url_is_one_a_client_here_can_use(host, url):
    assert base_url(host, 80) == url
    assert curl(replace(INFO, host=host, port=80))[1] == f"{url}/v1/completions"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "box.local"])
def test_warns_when_bound_beyond_loopback_without_a_key(host):
    exposed = replace(INFO, host=host)
    assert f"WARNING: bound to {host} without an API key" in render(exposed)
    assert "WARNING" not in render(replace(exposed, authenticated=True))


def test_other_warnings_are_shown():
    assert render(replace(INFO, warnings=("no fast BLAS found",))).splitlines()[-1] == "WARNING: no fast BLAS found"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_styled_on_a_terminal_and_plain_elsewhere(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    exposed = replace(INFO, host="0.0.0.0", model=replace(INFO.model, name="[red]name"), adapters=("x" * 300,))
    plain, terminal = io.StringIO(), Terminal()
    show(exposed, plain)
    show(exposed, terminal)
    assert plain.getvalue() == render(exposed) + "\n"
    assert "\x1b[1;31mWARNING" in terminal.getvalue()
