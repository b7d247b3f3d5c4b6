"""What goes on in the server, as Prometheus reads it at /metrics: counts, durations and sizes, nothing of any text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from otaro.precision import Precision

if TYPE_CHECKING:
    from otaro.serve.service import Service

SECONDS = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)


class Metrics:
    """A registry of its own for every server of a process."""

    def __init__(self, service: Service) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "otaro_http_requests", "Requests by route and status.", ["route", "status"], registry=self.registry
        )
        self._prompt = Counter("otaro_prompt_tokens", "Tokens of prompts.", registry=self.registry)
        self._tokens = Counter("otaro_generated_tokens", "Tokens made, by width.", ["width"], registry=self.registry)
        self._answers = Counter("otaro_answers", "Answers by why they ended.", ["reason"], registry=self.registry)
        self.first_token = Histogram(
            "otaro_first_token_seconds",
            "From a request to its first token, waiting included.",
            buckets=SECONDS,
            registry=self.registry,
        )
        self._seconds = Histogram(
            "otaro_answer_seconds", "From a request to its last token.", buckets=SECONDS, registry=self.registry
        )
        self.registry.register(_Now(service))

    def token(self, width: Precision) -> None:
        self._tokens.labels(str(width)).inc()

    def finished(self, prompt_tokens: int, seconds: float, reasons: Iterable[str]) -> None:
        self._prompt.inc(prompt_tokens)
        self._seconds.observe(seconds)
        for reason in reasons:
            self._answers.labels(reason).inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _Now(Collector):
    """How things stand when they are asked for."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        service = self._service
        for name, text, value in (
            ("otaro_waiting_requests", "Requests that wait for their turn.", service.queue.waiting),
            ("otaro_running_answers", "Answers that are being written.", service.queue.running),
            ("otaro_width_mantissa_bits", "The width that is served by default.", service.control.width.mantissa),
            ("otaro_resident_mantissa_bits", "The widest width in memory.", service.control.resident.mantissa),
        ):
            yield GaugeMetricFamily(name, text, value)
        memory = GaugeMetricFamily("otaro_memory_bytes", "Bytes of memory by what they hold.", labels=["part"])
        for part, size in service.engine.memory.items():
            if part != "full_cache":
                memory.add_metric([part], size)
        yield memory
