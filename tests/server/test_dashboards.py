"""vLLM's names in `/metrics`, and the queries of `dashboards/`, whose names and labels must be exported."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import promql_parser
import yaml
from prometheus_client.parser import text_string_to_metric_families
from server.fake_cluster import FakeCluster, app_of

DASHBOARDS = Path(__file__).parents[2] / "dashboards"
URL = "/v1/completions"
VARIABLES = {"$__rate_interval": "5m", "$model": ".*"}
"""What Grafana puts in the place of its variables."""


def queries() -> Iterator[str]:
    dashboard = json.loads((DASHBOARDS / "grafana.json").read_text())
    yield from (target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    rules = yaml.safe_load((DASHBOARDS / "alerts.yaml").read_text())
    yield from (rule["expr"] for group in rules["groups"] for rule in group["rules"])


def parsed(query: str) -> Any:
    for name, value in VARIABLES.items():
        query = query.replace(name, value)
    return promql_parser.parse(query)


def selectors(expression: Any) -> Iterator[tuple[str, set[str]]]:
    """The metrics of an expression, each with the labels that it needs: those it selects and those it is grouped by."""
    if isinstance(expression, promql_parser.VectorSelector):
        yield expression.name, {matcher.name for matcher in expression.matchers.matchers}
        return
    if isinstance(expression, promql_parser.MatrixSelector):
        yield from selectors(expression.vector_selector)
        return
    grouped = _grouped_by(expression)
    for part in _parts(expression):
        for name, labels in selectors(part):
            yield name, labels | grouped


def _grouped_by(expression: Any) -> set[str]:
    modifier = getattr(expression, "modifier", None) if isinstance(expression, promql_parser.AggregateExpr) else None
    return set(modifier.labels) if modifier else set()


def _parts(expression: Any) -> list[Any]:
    if isinstance(expression, promql_parser.BinaryExpr):
        return [expression.lhs, expression.rhs]
    if isinstance(expression, promql_parser.Call):
        return list(expression.args)
    inner = getattr(expression, "expr", None)
    return [] if inner is None else [inner]


async def exported(client, engine, adapters, training) -> dict[str, set[str]]:
    """The names of the samples that servers export, with their labels: one that trains, and a node of a cluster."""
    adapters.publish("math")
    engine.state["memory_bytes"] = {"rows": 1}
    await client.post(URL, json={"prompt": "x", "model": "math"})
    node = httpx.ASGITransport(app_of(engine, adapters, FakeCluster()))
    samples: dict[str, set[str]] = {}
    async with httpx.AsyncClient(transport=node, base_url="http://localhost:8000") as other:
        for each in (client, other):
            for family in text_string_to_metric_families((await each.get("/metrics")).text):
                name = family.name + ("_total" if family.type == "counter" else "")
                samples.setdefault(name, set())  # one without samples has no labels
                samples |= {sample.name: set(sample.labels) for sample in family.samples}
    return samples


async def test_every_query_asks_for_what_is_exported(client, engine, adapters, training):
    names = await exported(client, engine, adapters, training)
    missing = [
        (name, sorted(labels))
        for query in queries()
        for name, labels in selectors(parsed(query))
        if name not in names or (names[name] and not labels <= names[name])
    ]
    assert not missing
    asked = {name for query in queries() for name, _ in selectors(parsed(query))}
    assert len(asked) > 25, "a walk that finds nothing would pass too"


async def test_vllms_names_have_its_labels_and_our_values(client, engine):
    await client.post(URL, json={"prompt": "xyz", "max_tokens": 4, "n": 2})
    text = (await client.get("/metrics")).text
    labels = 'engine="0",model_name="tiny/byte-model"'
    for line in (
        "# TYPE vllm:num_requests_running gauge",
        f"vllm:num_requests_running{{{labels}}} 3.0",
        'mlx_parallm_num_requests_running{model_name="tiny/byte-model"} 3.0',
        f"vllm:kv_cache_usage_perc{{{labels}}} 0.25",
        "# TYPE vllm:request_success_total counter",
        'vllm:request_success_total{engine="0",finished_reason="length",model_name="tiny/byte-model"} 2.0',
        f"vllm:request_prompt_tokens_sum{{{labels}}} 3.0",
        f"vllm:request_generation_tokens_sum{{{labels}}} 8.0",
        f"vllm:request_max_num_generation_tokens_sum{{{labels}}} 4.0",
        f"vllm:request_time_per_output_token_seconds_count{{{labels}}} 2.0",
        f"vllm:e2e_request_latency_seconds_count{{{labels}}} 1.0",
        'vllm:time_to_first_token_seconds_bucket{engine="0",le="0.25",model_name="tiny/byte-model"} 1.0',
    ):
        assert f"{line}\n" in text, line
    running = re.search(r"^vllm:lora_requests_info\{(.*)\} ", text, re.MULTILINE)
    assert running is not None
    assert re.findall(r'(\w+)="', running[1]) == ["max_lora", "running_lora_adapters", "waiting_lora_adapters"]
