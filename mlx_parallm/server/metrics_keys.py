"""Prometheus metrics of the keys, read on each scrape. There are at most as many series of each as there are keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mlx_parallm.server.access.accounts import Account, Accounts
from mlx_parallm.server.metrics_collectors import PREFIX

KEY_COUNTERS: Mapping[str, tuple[str, Callable[[Account], int]]] = {
    "key_requests": ("Requests for answers that began, by key.", lambda account: account.requests),
    "key_requests_refused": ("Requests that a limit of their key refused.", lambda account: account.refused),
    "key_prompt_tokens": ("Tokens of prompts, by key.", lambda account: account.prompt_tokens),
    "key_generation_tokens": ("Tokens generated, by key.", lambda account: account.completion_tokens),
}


class KeyCollector(Collector):
    """The usage of each key. Used on the event loop's thread only."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts

    def collect(self) -> Iterator[Metric]:
        accounts = self._accounts.all()
        running = GaugeMetricFamily(PREFIX + "key_requests_running", "Requests under way, by key.", labels=["key"])
        for account in accounts:
            running.add_metric([account.key.name], account.running)
        yield running
        for name, (about, read) in KEY_COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, about, labels=["key"])
            for account in accounts:
                counter.add_metric([account.key.name], read(account))
            yield counter
