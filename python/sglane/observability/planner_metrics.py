"""The planner's state at the time of a scrape as metric families. Totals are monotonic counters; gauges are what they are now."""
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

#: name -> (key of the state, text).
GAUGES = {
    "num_running_reqs": ("num_running_reqs", "Requests that run"),
    "num_queue_reqs": ("num_waiting_reqs", "Requests that wait"),
    "num_waiting_uncached_tokens": ("num_waiting_uncached_tokens", "Prompt tokens of the requests that wait"),
    "num_used_tokens": ("num_used_tokens", "KV tokens (whole pages) that are neither free nor evictable"),
    "max_total_num_tokens": ("max_total_num_tokens", "KV tokens that the pool holds, over all lanes"),
    "token_usage": ("token_usage", "num_used_tokens / max_total_num_tokens"),
    "full_token_usage": ("token_usage", "As token_usage"),
    "new_token_ratio": ("new_token_ratio", "Share of the output limits that admission keeps in reserve"),
    "gen_throughput": ("last_gen_throughput", "Output tokens per second over the last 2 seconds; 0 when idle"),
    "num_retracted_reqs": ("num_retracted_reqs", "Requests that wait after they had to give their pages back"),
    "num_paused_reqs": ("num_paused_reqs", "Requests that a pause holds"),
    "max_running_requests": ("effective_max_running_requests_per_dp", "Requests that may run at once"),
}
#: name -> (key of the totals, text).
COUNTERS = {
    "num_retractions_total": ("num_retractions", "Requests that had to give their pages back and were computed again"),
    "stalls_total": ("num_stalls", "Decode rows that were planned and for which the executors had no place; they are planned again"),
    "prefill_computed_tokens_total": ("num_prompt_tokens", "Tokens fed by prefill steps, those after a retraction included"),
    "prefill_cached_tokens_total": ("num_cached_tokens", "Tokens taken from the prefix cache at admission, those after a retraction included"),
}
#: Modes of realtime_tokens_total -> key of the totals.
TOKEN_MODES = {"prefill_compute": "num_prompt_tokens", "prefill_cache": "num_cached_tokens", "decode": "num_output_tokens"}
#: Classes of pages in one lane; they add up to `total`.
LANE_CLASSES = {
    "total": "Pages of a lane", "free": "Pages nobody uses", "cached": "Pages of the prefix cache (leased ones included)",
    "held": "Private pages of requests", "tickets": "Pages that become free when the steps under way have ended",
}
#: name -> (key of the state's lanes, text); one sample per lane.
LANE_GAUGES = {"cp_lane_homes": ("homes", "Running requests that grow in a lane")}
LANE_COUNTERS = {
    "cp_lane_computed_tokens_total": ("computed_tokens", "Tokens that a lane was given to compute"),
    "cp_lane_prefix_wait_seconds_total": ("prefix_wait_seconds", "Time that attention in a lane waited for prefix pages of all lanes"),
    "cp_lane_evicted_pages_total": ("evicted_pages", "Pages of a lane that left the prefix cache to make room"),
    "cp_lane_home_moves_total": ("home_moves", "Requests that went on growing in a lane because the one before had no page"),
}


#: Classes of pages of one lane in the host tier; zeros without one.
HOST_CLASSES = {
    "total": "Host pages of a lane", "free": "Host pages nobody uses", "cached": "Host pages of the prefix cache",
    "held": "Host copies of private pages of requests", "tickets": "Host pages of copies that have not ended",
}
#: name -> (key of the state's sessions, text).
SESSION_GAUGES = {
    "num_open_sessions": ("num_open", "Sessions that are open"),
    "num_leased_sessions": ("num_leased", "Sessions whose prefix is kept by a lease"),
    "session_leased_tokens": ("leased_tokens", "Tokens kept by leases of sessions; a prefix of several sessions counts for each"),
}
#: Prefix of the names -> (kind of ticket, what it does).
COPIES = {"hicache_backup": ("backup", "copied to the host tier"), "load_back": ("load", "copied from the host tier back to the device")}
#: name -> (key of the state's speculation, text); one sample per source of the cached part of a request's prompt.
SPEC_COUNTERS = {
    "spec_verify_calls_total": ("num_verify_steps", "Decode steps of requests of a server that speculates, those without a draft included"),
    "spec_draft_tokens_total": ("num_drafts", "Drafts that were verified"),
    "spec_accepted_tokens_total": ("num_accepted", "Drafts that were accepted"),
}
#: What the host tier drops are records of all planes: there is one pool.
HOST_POOL = "kv"


class PlannerCollector(Collector):
    """Shows the state it was given last; nothing before the first, and nothing while the planner does not answer."""

    def __init__(self, labels: dict[str, str]):
        self._labels = labels
        self._state: Mapping[str, Any] | None = None

    def show(self, state: Mapping[str, Any] | None) -> None:
        """state: the planner's answer to GetState; None: there is none."""
        self._state = state

    def describe(self) -> list[Metric]:
        return []  # the registry need not ask for a state to learn the names

    def collect(self) -> Iterator[Metric]:
        if self._state is None:
            return
        state, names, values = self._state, list(self._labels), list(self._labels.values())
        kv_ledger, totals = state["kv_ledger"], state["totals"]
        lanes, page_size = kv_ledger["device"], kv_ledger["page_size"]
        figures = {name: (text, state[key]) for name, (key, text) in GAUGES.items()}
        num_read = totals["num_prompt_tokens"] + totals["num_cached_tokens"]
        figures["cache_hit_rate"] = ("Cached share of all tokens that prefill has asked for since the start",
                                     totals["num_cached_tokens"] / num_read if num_read else 0.0)
        num_free, num_used = sum(lanes["free"]) * page_size, state["num_used_tokens"]
        figures["kv_available_tokens"] = ("KV tokens in free pages", num_free)
        figures["kv_used_tokens"] = ("As num_used_tokens", num_used)
        num_evictable = state["max_total_num_tokens"] - num_free - num_used
        figures["kv_evictable_tokens"] = ("KV tokens in cached pages that nobody leases", num_evictable)
        figures["utilization"] = ("Share of the request slots in use", state["num_running_reqs"] / state["effective_max_running_requests_per_dp"])
        for name, (text, value) in figures.items():
            gauge = GaugeMetricFamily(f"sglang:{name}", text, labels=names)
            gauge.add_metric(values, value)
            yield gauge
        for name, (key, text) in COUNTERS.items():
            counter = CounterMetricFamily(f"sglang:{name}", text, labels=names)
            counter.add_metric(values, totals[key])
            yield counter
        yield from self._lane_pages("", LANE_CLASSES, lanes, names, values)
        yield from self._lane_pages("host_", HOST_CLASSES, kv_ledger["host"], names, values)
        yield from self._host_tier(state["host_cache"], kv_ledger, names, values)
        if state.get("speculation") is not None:
            yield from self._speculation(state["speculation"], names, values)
        for name, (key, text) in SESSION_GAUGES.items():
            gauge = GaugeMetricFamily(f"sglang:{name}", text, labels=names)
            gauge.add_metric(values, state["sessions"][key])
            yield gauge
        yield from self._lane_figures(state["lanes"], names, values)
        yield self._fallbacks(kv_ledger["fallbacks"], names, values)
        tokens = CounterMetricFamily("sglang:realtime_tokens_total", "Tokens as they are computed, taken from the cache, sampled",
                                     labels=[*names, "mode"])
        for mode, key in TOKEN_MODES.items():
            tokens.add_metric([*values, mode], totals[key])
        yield tokens
        evicted = CounterMetricFamily("sglang:evicted_tokens_total", "KV tokens (whole pages) that left the prefix cache to make room", labels=names)
        evicted.add_metric(values, state["evictions"]["num_tokens"])
        yield evicted
        yield self._times("eviction_duration_seconds", "Time of one eviction", state["evictions"]["times"], names, values)
        yield self._times("queue_time_seconds", "Arrival at the planner to admission", state["queue_times"], names, values)

    def _lane_figures(self, lanes: Mapping[str, Any], names: list[str], values: list[str]) -> Iterator[Metric]:
        """lanes: see Scheduler.lanes."""
        for kind, table in ((GaugeMetricFamily, LANE_GAUGES), (CounterMetricFamily, LANE_COUNTERS)):
            for name, (key, text) in table.items():
                family = kind(f"sglang:{name}", text, labels=[*names, "cp_lane"])
                for lane, figure in enumerate(lanes[key]):
                    family.add_metric([*values, str(lane)], figure)
                yield family
        busiest = CounterMetricFamily("sglang:cp_busiest_lane_tokens_total", "Tokens of the busiest lane of each step, over all steps", labels=names)
        busiest.add_metric(values, lanes["busiest_lane_tokens"])
        yield busiest
        waits = CounterMetricFamily("sglang:cp_lane_page_waits_total", "Times that a request did not get its pages in the step in which it asked",
                                    labels=[*names, "cp_lane", "reason"])
        for lane, reason, count in lanes["page_waits"]["counts"]:
            waits.add_metric([*values, lane, reason], count)
        yield waits
        yield self._times("page_wait_seconds", "First refusal of pages until they were there, or the request gone", lanes["page_waits"]["times"],
                          names, values)

    def _host_tier(self, host: Mapping[str, Any], kv_ledger: Mapping[str, Any], names: list[str], values: list[str]) -> Iterator[Metric]:
        """host: see HostWork.report. Tokens are those of whole pages."""
        pages, page_size = kv_ledger["host"], kv_ledger["page_size"]
        num_total = sum(pages["total"]) * page_size
        used = num_total - sum(pages["free"]) * page_size
        for name, text, value in (("hicache_host_total_tokens", "Tokens that the host tier holds, over all lanes", num_total),
                                  ("hicache_host_used_tokens", "Tokens of host pages that are not free", used),
                                  ("hicache_open_tickets", "Copies to or from the host tier that have not ended", host["open_tickets"])):
            gauge = GaugeMetricFamily(f"sglang:{name}", text, labels=names)
            gauge.add_metric(values, value)
            yield gauge
        for prefix, (kind, text) in COPIES.items():
            ticket = host["tickets"][kind]
            for unit in ("tokens", "bytes"):
                counter = CounterMetricFamily(f"sglang:{prefix}_{unit}_total", f"{unit.capitalize()} {text}", labels=names)
                counter.add_metric(values, ticket[unit])
                yield counter
            yield self._times(f"{prefix}_duration_seconds", f"One rank's part of pages that are {text}", ticket["times"], names, values)
        duplicates = CounterMetricFamily("sglang:hicache_duplicate_pages_total", "Pages copied to the host tier that had a copy then", labels=names)
        duplicates.add_metric(values, host["backup_duplicates"])
        yield duplicates
        dropped = CounterMetricFamily("sglang:hicache_dropped_tokens_total", "Tokens that the host tier had no room for, gave up, or evicted",
                                      labels=[*names, "reason", "pool"])
        for reason, num_tokens in host["dropped_tokens"].items():
            dropped.add_metric([*values, reason, HOST_POOL], num_tokens)
        yield dropped

    def _speculation(self, spec: Mapping[str, Any], names: list[str], values: list[str]) -> Iterator[Metric]:
        """Means are those since the start, 0 before the first step."""
        num_steps, num_drafts = spec["num_verify_steps"], spec["num_drafts"]
        for name, text, value in (("spec_num_steps", "Drafts per step at most", spec["max_drafts"]),
                                  ("spec_accept_length", "Tokens per verify step", spec["num_tokens"] / num_steps if num_steps else 0.0),
                                  ("spec_accept_rate", "Accepted share of the drafts", spec["num_accepted"] / num_drafts if num_drafts else 0.0)):
            gauge = GaugeMetricFamily(f"sglang:{name}", text, labels=names)
            gauge.add_metric(values, value)
            yield gauge
        for name, (key, text) in SPEC_COUNTERS.items():
            counter = CounterMetricFamily(f"sglang:{name}", text, labels=[*names, "cache_source"])
            for source, counts in spec["by_source"].items():
                counter.add_metric([*values, source], counts[key])
            yield counter

    def _lane_pages(self, tier: str, classes: Mapping[str, str], lanes: Mapping[str, list[int]], names: list[str],
                    values: list[str]) -> Iterator[Metric]:
        """tier: what the names have in front of the class."""
        for kind, text in classes.items():
            gauge = GaugeMetricFamily(f"sglang:cp_lane_{tier}{kind}_pages", text, labels=[*names, "cp_lane"])
            for lane, num_pages in enumerate(lanes[kind]):
                gauge.add_metric([*values, str(lane)], num_pages)
            yield gauge

    def _fallbacks(self, counts: Mapping[str, int], names: list[str], values: list[str]) -> Metric:
        counter = CounterMetricFamily("sglang:fallbacks_total", "Times that a declared slower path was taken", labels=[*names, "fallback"])
        for name, count in counts.items():
            counter.add_metric([*values, name], count)
        return counter

    def _times(self, name: str, text: str, times: Mapping[str, Any], names: list[str], values: list[str]) -> Metric:
        """times: see TimeHistogram."""
        family = HistogramMetricFamily(f"sglang:{name}", text, labels=names)
        bounds = [*(repr(float(bound)) for bound in times["bounds_s"]), "+Inf"]
        family.add_metric(values, list(zip(bounds, accumulate(times["counts"]))), times["sum_s"])
        return family
