"""Metrics under the names that dashboards for vLLM query: each is exported twice, as `mlx_parallm_NAME` and as
`vllm:NAME` with vLLM's labels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.samples import Sample

from mlx_parallm.server.metrics_collectors import PREFIX

VLLM_PREFIX = "vllm:"
ENGINE = "0"
"""The label `engine`, the number of one of several engines. There is one here."""
WITHOUT_LABELS = frozenset({"lora_requests_info"})
"""Metrics to which vLLM adds neither `model_name` nor `engine`."""
SHARED = WITHOUT_LABELS | {
    "cache_config_info",
    "e2e_request_latency_seconds",
    "external_prefix_cache_hits",
    "external_prefix_cache_queries",
    "generation_tokens",
    "inter_token_latency_seconds",
    "kv_cache_usage_perc",
    "num_preemptions",
    "num_requests_running",
    "num_requests_waiting",
    "prefix_cache_hits",
    "prefix_cache_queries",
    "prompt_tokens",
    "request_decode_time_seconds",
    "request_generation_tokens",
    "request_inference_time_seconds",
    "request_max_num_generation_tokens",
    "request_prefill_time_seconds",
    "request_prompt_tokens",
    "request_queue_time_seconds",
    "request_success",
    "request_time_per_output_token_seconds",
    "spec_decode_num_accepted_tokens",
    "spec_decode_num_draft_tokens",
    "time_to_first_token_seconds",
}
"""The metrics that vLLM has too, by their names after the prefix. They have its label `model_name` under both names."""


class VLLMNamesRegistry(CollectorRegistry):
    """A registry that also exports the metrics of `SHARED` under vLLM's names."""

    def collect(self) -> Iterable[Metric]:
        for metric in super().collect():
            yield metric
            name = metric.name.removeprefix(PREFIX)
            if name in SHARED:
                yield _renamed(metric, name, {} if name in WITHOUT_LABELS else {"engine": ENGINE})


def _renamed(metric: Metric, name: str, labels: Mapping[str, str]) -> Metric:
    """The same samples under vLLM's name, with more labels."""
    renamed = Metric(VLLM_PREFIX + name, metric.documentation, metric.type)
    renamed.samples = [_renamed_sample(sample, labels) for sample in metric.samples]
    return renamed


def _renamed_sample(sample: Sample, labels: Mapping[str, str]) -> Sample:
    return sample._replace(name=VLLM_PREFIX + sample.name.removeprefix(PREFIX), labels={**labels, **sample.labels})
