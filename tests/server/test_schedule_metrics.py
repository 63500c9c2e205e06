"""What a scrape says of how device time was shared."""

import pytest

from mlx_parallm.core import DeviceSchedule, Histogram
from mlx_parallm.server import NoTraining

GAPS = """\
# HELP mlx_parallm_decode_gap_seconds Between two decode steps while rows wait for the second.
# TYPE mlx_parallm_decode_gap_seconds histogram
mlx_parallm_decode_gap_seconds_bucket{le="0.5"} 2.0
mlx_parallm_decode_gap_seconds_bucket{le="1.0"} 2.0
mlx_parallm_decode_gap_seconds_bucket{le="2.0"} 3.0
mlx_parallm_decode_gap_seconds_bucket{le="+Inf"} 4.0
mlx_parallm_decode_gap_seconds_count 4.0
mlx_parallm_decode_gap_seconds_sum 6.25
"""


def filled(histogram, *values):
    for value in values:
        histogram = histogram.with_value(value)
    return histogram


async def exposition(client):
    return (await client.get("/metrics")).text


async def test_decode_gaps_as_prometheus_counts_them(client, engine):
    engine.state["decode_gaps"] = filled(Histogram.of(0.5, 1.0, 2.0), 0.25, 0.5, 1.5, 4.0)
    text = await exposition(client)
    assert GAPS in text
    assert "mlx_parallm_decode_gap_largest_seconds 4.0\n" in text


async def test_training_shares(client, engine, metric):
    engine.state["training_shares"] = filled(Histogram.of(0.1, 0.2), 0.0625, 0.125, 0.125)
    text = await exposition(client)
    assert "# TYPE mlx_parallm_training_share histogram\n" in text
    for bound, count in (("0.1", 1), ("0.2", 3), ("+Inf", 3)):
        assert await metric(client, f'mlx_parallm_training_share_bucket{{le="{bound}"}}') == count
    assert await metric(client, "mlx_parallm_training_share_count") == 3
    assert await metric(client, "mlx_parallm_training_share_sum") == 0.3125


async def test_the_schedule_and_the_last_window(client, engine):
    engine.state |= {"schedule": DeviceSchedule(0.5, 0.25), "training_share": 0.375}
    text = await exposition(client)
    for name, value in (
        ("training_share_now", 0.375),
        ("training_share_target", 0.5),
        ("decode_stall_budget_seconds", 0.25),
    ):
        assert f"# TYPE mlx_parallm_{name} gauge\nmlx_parallm_{name} {value}\n" in text


@pytest.mark.parametrize("training", [NoTraining()])
async def test_before_anything_happened_every_bucket_is_empty(client, metric):
    text = await exposition(client)
    for name in ("decode_gap_seconds", "training_share"):
        counts = [line for line in text.splitlines() if line.startswith(f"mlx_parallm_{name}_bucket")]
        assert len(counts) > 5
        assert all(line.endswith(" 0.0") for line in counts)
        assert await metric(client, f"mlx_parallm_{name}_count") == 0
        assert f"\nmlx_parallm_{name}_sum 0.0\n" in text
    assert "\nmlx_parallm_decode_gap_largest_seconds 0.0\n" in text


async def test_no_name_is_told_twice(client):
    names = [line.split()[2] for line in (await exposition(client)).splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names))
    samples = {f"{name}{end}" for name in names for end in ("_bucket", "_sum", "_count")}
    assert not samples & set(names)
