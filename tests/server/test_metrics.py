"""`/metrics`: the adapters' figures, and how device time was shared."""

import pytest

from mlx_parallm.adapters.cards import AdapterStats
from mlx_parallm.core.device import DeviceSchedule
from mlx_parallm.engine.figures import EngineStats, Histogram

URL = "/v1/completions"
MODEL = 'model_name="tiny/byte-model"'
GAPS = """\
# HELP mlx_parallm_decode_gap_seconds Time between two decode steps, while rows wait for the second.
# TYPE mlx_parallm_decode_gap_seconds histogram
mlx_parallm_decode_gap_seconds_bucket{le="0.5"} 2.0
mlx_parallm_decode_gap_seconds_bucket{le="1.0"} 2.0
mlx_parallm_decode_gap_seconds_bucket{le="2.0"} 3.0
mlx_parallm_decode_gap_seconds_bucket{le="+Inf"} 4.0
mlx_parallm_decode_gap_seconds_count 4.0
mlx_parallm_decode_gap_seconds_sum 6.25
"""


async def exposition(client):
    return (await client.get("/metrics")).text


@pytest.fixture
def math(adapters):
    return adapters.publish("math")


async def test_the_banks_state(client, adapters):
    adapters.state = AdapterStats(
        slots=8,
        slots_used=3,
        slots_pinned=2,
        bank_bytes=4096,
        running=("code", "math"),
        waiting=("math",),
        swaps_total=5,
        staged_total=6,
        evicted_total=7,
        checkpoint_saves_total=9,
        flip_s_last=0.25,
        flip_s_max=0.5,
        stage_s_last=1.5,
    )
    text = await exposition(client)
    for kind, name, value in (
        ("counter", "lora_swaps_total", 5),
        ("counter", "lora_staged_total", 6),
        ("counter", "lora_evicted_total", 7),
        ("counter", "checkpoint_saves_total", 9),
        ("gauge", "lora_slots", 8),
        ("gauge", "lora_slots_used", 3),
        ("gauge", "lora_slots_pinned", 2),
        ("gauge", "lora_bank_bytes", 4096),
        ("gauge", "lora_flip_seconds_last", 0.25),
        ("gauge", "lora_flip_seconds_max", 0.5),
        ("gauge", "lora_stage_seconds_last", 1.5),
    ):
        assert f"# TYPE mlx_parallm_{name} {kind}\nmlx_parallm_{name} {float(value)}\n" in text
    names = 'max_lora="8",running_lora_adapters="code,math",waiting_lora_adapters="math"'
    assert f"mlx_parallm_lora_requests_info{{{names}}} " in text


async def test_what_each_version_served(client, engine, adapters, metric, math):
    for body in ({"model": "math"}, {"model": "math", "n": 2}, {}):
        await client.post(URL, json={"prompt": "xyz", "max_tokens": 4, **body})
    engine.fail_before, engine.error = 2, RuntimeError("x")
    await client.post(URL, json={"prompt": "xyz", "model": "math"})
    text = await exposition(client)
    for line in (
        "# TYPE mlx_parallm_adapter_requests_total counter",
        f'mlx_parallm_adapter_requests_total{{adapter="math",{MODEL},version="1"}} 3.0',
        f'mlx_parallm_adapter_requests_total{{adapter="base",{MODEL},version="0"}} 1.0',
        f'mlx_parallm_adapter_prompt_tokens_total{{adapter="math",{MODEL},version="1"}} 6.0',
        f'mlx_parallm_adapter_prompt_tokens_total{{adapter="base",{MODEL},version="0"}} 3.0',
        f'mlx_parallm_adapter_generation_tokens_total{{adapter="math",{MODEL},version="1"}} 14.0',
        f'mlx_parallm_adapter_generation_tokens_total{{adapter="base",{MODEL},version="0"}} 4.0',
        "# TYPE mlx_parallm_adapter_request_latency_seconds summary",
        f'mlx_parallm_adapter_request_latency_seconds_count{{adapter="math",{MODEL},version="1"}} 2.0',
        f'mlx_parallm_adapter_request_latency_seconds_count{{adapter="base",{MODEL},version="0"}} 1.0',
    ):
        assert f"{line}\n" in text, line
    seconds = 'mlx_parallm_adapter_request_latency_seconds_sum{adapter="math",version="1"}'
    assert await metric(client, seconds) == pytest.approx(0.8)


async def test_versions_that_are_gone_lose_their_series(client, adapters):
    """Their counts go too, though nobody scrapes meanwhile."""
    for _ in range(50):
        ref = adapters.publish("math")
        await client.post(URL, json={"prompt": "x", "model": "math"})
        await client.post(URL, json={"prompt": "x"})
        for old in [known for known in adapters.known if known != ref]:
            del adapters.known[old]
    text = await exposition(client)
    assert text.count("mlx_parallm_adapter_requests_total{") == 2
    assert f'mlx_parallm_adapter_requests_total{{adapter="math",{MODEL},version="50"}} 1.0\n' in text
    assert f'mlx_parallm_adapter_requests_total{{adapter="base",{MODEL},version="0"}} 50.0\n' in text


def filled(histogram, *values):
    for value in values:
        histogram = histogram.with_value(value)
    return histogram


SHARES = """\
# TYPE mlx_parallm_training_share histogram
mlx_parallm_training_share_bucket{le="0.1"} 1.0
mlx_parallm_training_share_bucket{le="0.2"} 3.0
mlx_parallm_training_share_bucket{le="+Inf"} 3.0
mlx_parallm_training_share_count 3.0
mlx_parallm_training_share_sum 0.3125
"""


def gauge(name, value, labels=""):
    """The lines of a gauge that has one sample."""
    return f"# TYPE mlx_parallm_{name} gauge\nmlx_parallm_{name}{labels} {value}\n"


@pytest.mark.parametrize(
    ("state", "shown"),
    [
        (
            {"decode_gaps": filled(Histogram.of(0.5, 1.0, 2.0), 0.25, 0.5, 1.5, 4.0)},
            [GAPS, gauge("decode_gap_largest_seconds", 4.0)],
        ),
        ({"training_shares": filled(Histogram.of(0.1, 0.2), 0.0625, 0.125, 0.125)}, [SHARES]),
        (
            {"schedule": DeviceSchedule(0.5, 0.25), "training_share": 0.375},
            [
                gauge("training_share_now", 0.375),
                gauge("training_share_target", 0.5),
                gauge("decode_stall_budget_seconds", 0.25),
            ],
        ),
        (
            {"kv_bytes_held": 10, "kv_bytes_budget": 40, "kv_bytes_cached": 20},
            [
                gauge("kv_cache_usage_perc", 0.25, f"{{{MODEL}}}"),
                gauge("kv_cache_bytes_held", 10.0, f"{{{MODEL}}}"),
                gauge("kv_cache_bytes_cached", 20.0, f"{{{MODEL}}}"),
            ],
        ),
        (
            {"memory_bytes": {"rows": 10, "adapters": 7}},
            ['mlx_parallm_memory_bytes{account="rows"} 10.0\n', 'mlx_parallm_memory_bytes{account="adapters"} 7.0\n'],
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
async def test_figures_of_the_engine(client, engine, state, shown):
    engine.state |= state
    text = await exposition(client)
    assert [lines for lines in shown if lines not in text] == []


async def test_every_base_model_has_series_of_its_own(client, engine, metric):
    one, other = (EngineStats(alive=True, ready=True, running=n, prompt_tokens_total=10 * n) for n in (1, 2))
    engine.state["bases"] = {"one": one, "other": other}
    for prefix, more in (("mlx_parallm_", ""), ("vllm:", 'engine="0",')):
        for n, name in enumerate(("one", "other"), 1):
            label = f'{{{more}model_name="{name}"}}'
            assert await metric(client, f"{prefix}num_requests_running{label}") == n
            assert await metric(client, f"{prefix}prompt_tokens_total{label}") == 10 * n
    assert (await client.get("/debug/state")).status_code == 200
