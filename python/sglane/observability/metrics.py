"""Everything behind /metrics: one registry in the front's process."""
from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from sglane.observability.planner_metrics import PlannerCollector
from sglane.observability.request_metrics import RequestMetrics

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4


class Metrics:
    """One server's metrics. `requests` is a sink of the request tracker."""

    def __init__(self, model_name: str):
        disable_created_metrics()  # no `_created` samples
        self._registry = CollectorRegistry()
        labels = {"model_name": model_name, "engine_type": "unified"}
        self.requests = RequestMetrics(self._registry, labels)
        self._planner = PlannerCollector({**labels, "tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"})
        self._registry.register(self._planner)
        names = ["endpoint", "method"]
        self._received = Counter("sglang:http_requests_total", "HTTP requests received", names, registry=self._registry)
        self._answered = Counter("sglang:http_responses_total", "HTTP responses begun", [*names, "status_code"], registry=self._registry)
        self._active = Gauge("sglang:http_requests_active", "HTTP requests that are not answered completely", names, registry=self._registry)

    def http_received(self, endpoint: str, method: str) -> None:
        self._received.labels(endpoint, method).inc()
        self._active.labels(endpoint, method).inc()

    def http_answered(self, endpoint: str, method: str, status: int) -> None:
        self._answered.labels(endpoint, method, str(status)).inc()

    def http_done(self, endpoint: str, method: str) -> None:
        self._active.labels(endpoint, method).dec()

    def as_text(self, planner_state: Mapping[str, Any] | None) -> bytes:
        """The text format of Prometheus. planner_state None: the planner's families are left out."""
        self._planner.show(planner_state)
        return generate_latest(self._registry)
