"""What an operator reads when the server is ready."""

import io
import shlex
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from mlx_parallm.adapters.runs import Run
from mlx_parallm.app import banner
from mlx_parallm.app.banner import base_url, render, show
from mlx_parallm.blas import Blas
from mlx_parallm.config import ServerConfig, configure
from mlx_parallm.core.engine import ModelCard
from mlx_parallm.model.device import MemoryLimits

CARD = ModelCard(
    name="SmolLM2-135M-Instruct",
    context_length=8192,
    vocab_size=49152,
    quantization="none",
    dtype="float32",
    parameters=134_515_008,
    weight_bytes=538_060_032,
)

LIMITS = MemoryLimits(11 * 2**30, 2**29, None)


@dataclass(frozen=True)
class Served:
    """What the banner reads of `app.build.Served`."""

    live: tuple[str, ...] = ()
    card: ModelCard = CARD
    limits: MemoryLimits = LIMITS
    device: str = "CPU"
    run: Run | None = None
    others: tuple[str, ...] = ()

    @property
    def adapters(self) -> SimpleNamespace:
        cards = [(name, True) for name in self.live] + [("not-live", False)]
        return SimpleNamespace(
            cards=lambda: [SimpleNamespace(ref=SimpleNamespace(name=name), live=live) for name, live in cards]
        )

    @property
    def engine(self) -> SimpleNamespace:
        return SimpleNamespace(stats=lambda: SimpleNamespace(kv_bytes_budget=2 * 2**30))


@pytest.fixture(autouse=True)
def _fast_blas(monkeypatch):
    monkeypatch.setattr(banner, "BLAS", Blas("libopenblas.so.0", fast=True))


def text_of(served: Served = Served(), port: int = 8000, **settings: object) -> str:
    return render(served, configure(**settings), port)


def test_says_what_is_served_and_where():
    text = text_of()
    for fact in (
        "SmolLM2-135M-Instruct, 135M parameters",
        "float32, quantization none",
        "8,192 tokens",
        "weights 513.1 MiB, KV cache up to 2.0 GiB",
        "11.0 GiB in all, buffer cache up to 512.0 MiB, none wired",
        "CPU, BLAS libopenblas.so.0",
        "temperature 1, no filters, no penalties",
        "this machine only, no API key",
        "http://127.0.0.1:8000/v1\n",
        "dashboard   http://127.0.0.1:8000/dashboard\n",
        "http://127.0.0.1:8000/metrics",
        "http://127.0.0.1:8000/docs",
    ):
        assert fact in text
    assert "WARNING" not in text


def adapters_line(*live: str) -> str:
    lines = text_of(Served(live), adapters__max_loras=4).splitlines()
    (line,) = (line for line in lines if line.strip().startswith("adapters"))
    return line.strip().removeprefix("adapters").strip()


def test_says_which_adapters_there_are_and_how_many_fit():
    assert adapters_line() == "none (4 slots, rank up to 16)"
    assert adapters_line("math", "tone") == "math, tone (4 slots, rank up to 16)"
    many = [f"a{number}" for number in range(1, 11)]
    assert adapters_line(*many) == "a1, a2, a3, a4, a5, a6, a7, a8 and 2 more (4 slots, rank up to 16)"
    assert adapters_line(*many[:8]) == "a1, a2, a3, a4, a5, a6, a7, a8 (4 slots, rank up to 16)"


def curl(port: int = 8000, **settings: object) -> list[str]:
    (line,) = (line for line in text_of(port=port, **settings).splitlines() if line.strip().startswith("curl"))
    return shlex.split(line)


def test_curl_can_be_pasted():
    assert curl() == [
        "curl",
        "http://127.0.0.1:8000/v1/completions",
        "-d",
        '{"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}',
    ]
    assert "Authorization: Bearer $MLX_PARALLM_API_KEY" in curl(server__api_key="k")


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
    assert base_url(ServerConfig(host=host), 80) == url
    assert base_url(ServerConfig(host=host, ssl_certfile="c.pem"), 80) == url.replace("http", "https")
    assert curl(80, server__host=host)[1] == f"{url}/v1/completions"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "box.local"])
def test_warns_when_bound_beyond_loopback_without_a_key(host):
    assert f"WARNING: bound to {host} without an API key" in text_of(server__host=host)
    assert "WARNING" not in text_of(server__host=host, server__api_key="k")


def test_a_slow_blas_is_a_warning(monkeypatch):
    monkeypatch.setattr(banner, "BLAS", Blas("MLX's own", fast=False, problem="no fast BLAS found"))
    assert text_of().splitlines()[-1] == "WARNING: no fast BLAS found"


def test_among_lines_of_json_it_is_logged_with_its_warnings(caplog):
    caplog.set_level("INFO", "mlx_parallm.app.banner")
    stream = io.StringIO()
    show(Served(), configure(server__log_format="json", server__host="0.0.0.0"), 8000, stream)
    assert stream.getvalue() == ""
    ready, *warnings = caplog.records
    assert "is ready\n" in ready.getMessage()
    assert [record.levelname for record in warnings] == ["WARNING"] * len(warnings)
    assert any("0.0.0.0" in record.getMessage() or "key" in record.getMessage() for record in warnings)
