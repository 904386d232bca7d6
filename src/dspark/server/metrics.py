"""What Prometheus reads. Names follow vLLM's, with `dspark_` before them; times are in seconds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from dspark.engine.request import Completion

if TYPE_CHECKING:
    from dspark.server.service import Service

_WAITS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOKEN_TIMES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_LENGTHS = (1, 1.25, 1.5, 1.75, 2, 2.5, 3, 4, 5, 6, 8, 12, 16)


class Metrics:
    """What is counted as requests end. What the engine counts by itself is read when Prometheus asks."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._http = Counter(
            "dspark_http_requests", "HTTP requests", ("path", "method", "status"), registry=self.registry
        )
        self._http_seconds = self._histogram("http_request_duration_seconds", "Until the answer was sent", _WAITS)
        self._finished = Counter(
            "dspark_request_success", "Answers that ended", ("finished_reason",), registry=self.registry
        )
        self._dropped = Counter(
            "dspark_request_aborted", "Requests dropped before their end", ("reason",), registry=self.registry
        )
        self._queue = self._histogram("request_queue_time_seconds", "Until the prompt began to run", _WAITS)
        self._first = self._histogram("time_to_first_token_seconds", "Until the first token", _WAITS)
        self._each = self._histogram("time_per_output_token_seconds", "Mean time between tokens", _TOKEN_TIMES)
        self._whole = self._histogram("e2e_request_latency_seconds", "Until the last token", _WAITS)
        self._length = self._histogram("spec_decode_accepted_length", "Tokens a round of an answer", _LENGTHS)
        self.mean_seconds = 1.0  # of the last answers, decaying

    def count_http(self, path: str, method: str, status: int, seconds: float) -> None:
        """An HTTP request is over."""
        self._http.labels(path, method, str(status)).inc()
        self._http_seconds.observe(seconds)

    def count_dropped(self, reason: str) -> None:
        """A request was dropped: its client went away, it took too long, or the server shut down or failed."""
        self._dropped.labels(reason).inc()

    def count_answer(self, completion: Completion) -> None:
        """An answer is finished."""
        figures = completion.figures
        self._finished.labels(completion.finish_reason).inc()
        self._whole.observe(figures.total_seconds)
        self.mean_seconds += 0.1 * (figures.total_seconds - self.mean_seconds)
        if figures.queue_seconds is not None:
            self._queue.observe(figures.queue_seconds)
        if figures.first_token_seconds is not None:
            self._first.observe(figures.first_token_seconds)
            if (following := len(completion.token_ids) - 1) > 0:
                self._each.observe((figures.total_seconds - figures.first_token_seconds) / following)
        if completion.tau is not None:
            self._length.observe(completion.tau)

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
        return Histogram(f"dspark_{name}", text, registry=self.registry, buckets=bounds)


class EngineCollector(Collector):
    """The engine's own figures."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        """Read them. Every one of them only grows or is a snapshot, so no lock is needed."""
        yield from self._speculation()
        yield from self._load()
        stats = self._service.engine.engine.stats
        yield _counter("engine_steps", "Decode rounds of a whole batch", stats.steps)
        yield _counter("prompt_tokens", "Prompt tokens run", stats.prompt_tokens)
        yield _counter("generation_tokens", "Tokens put out", stats.output_tokens)
        yield _counter("prefix_cache_queries", "Tokens looked up in the prefix cache", stats.looked_up_tokens)
        yield _counter("prefix_cache_hits", "Tokens found there", stats.cached_tokens)
        yield _counter("num_preemptions", "Requests that gave their cache blocks back", stats.preemptions)
        phases = CounterMetricFamily("dspark_phase_seconds", "Time by phase of a step", labels=("phase",))
        for phase, seconds in stats.seconds.copy().items():
            phases.add_metric((phase,), seconds)
        yield phases

    def _speculation(self) -> Iterator[Metric]:
        stats = self._service.engine.engine.stats
        yield _counter("spec_decode_num_drafts", "Speculative rounds, one a request and round", stats.rounds)
        yield _counter("spec_decode_num_proposed_tokens", "Drafts proposed", stats.proposed)
        yield _counter("spec_decode_num_draft_tokens", "Drafts verified", stats.drafted)
        yield _counter("spec_decode_num_accepted_tokens", "Drafts accepted and put out", stats.accepted)
        yield _counter("spec_decode_num_committed_tokens", "Tokens that these rounds put out", stats.committed)
        positions = CounterMetricFamily(
            "dspark_spec_decode_num_accepted_tokens_per_pos", "Drafts accepted, by position", labels=("position",)
        )
        for position, count in enumerate(list(stats.accepted_by_position)):
            positions.add_metric((str(position),), count)
        yield positions
        lengths = CounterMetricFamily(
            "dspark_spec_decode_cap_length_rounds", "Rounds by rows verified, anchor counted", labels=("length",)
        )
        for length, count in list(enumerate(stats.verify_lens))[1:]:
            lengths.add_metric((str(length),), count)
        yield lengths
        budget = self._service.rounds.last_budget
        yield _gauge("spec_decode_verify_budget", "Drafts verified in the last round of the batch", budget)

    def _load(self) -> Iterator[Metric]:
        load = self._service.engine.load
        yield _gauge("num_requests_running", "Answers that hold cache blocks", load.running)
        yield _gauge("num_requests_waiting", "Answers that wait for a place", load.waiting)
        yield _gauge("num_http_requests", "HTTP requests for answers under way", self._service.num_requests)
        yield _gauge("kv_cache_usage_perc", "Share of cache blocks in use", 1 - load.free_blocks / load.num_blocks)
        yield _gauge("kv_cache_blocks", "Cache blocks in all", load.num_blocks)
        yield _gauge("kv_cache_free_blocks", "Blocks that nobody holds", load.free_blocks)
        yield _gauge("kv_cache_cached_blocks", "Those of them that keep a prefix", load.cached_blocks)
        yield _gauge("engine_failed", "1 once the engine has failed", self._service.engine.failure is not None)
        yield _gauge("draining", "1 while the server shuts down", self._service.draining)


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"dspark_{name}", text, value=value)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"dspark_{name}", text, value=value)
