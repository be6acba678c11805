"""What the metrics say of engines."""

from prometheus_client import CollectorRegistry

from shell_router.engines.address import PairAddress
from shell_router.engines.metrics import EngineMetrics
from shell_router.engines.sglang import SglangPair
from shell_router.routing.dispatcher import EngineSlot
from shell_router.routing.holdout import Benefit, Compared, Comparison
from shell_router.routing.placement import EngineReport, PlacementRequest


async def test_what_is_known_of_engines_is_exported_and_what_is_not_is_absent() -> None:
    now_s = [0.0]
    pairs = [PairAddress("http://p", f"http://{host}", "p", 8998) for host in "ab"]
    pool = SglangPair(*pairs, clock=lambda: now_s[0])
    decodes = pool.fleet.dispatchers["decode"]
    decodes.report(0, EngineReport(0.25, 0, 0, 0, 0.5))
    decodes.tracked[0].failed_polls = 2
    assert isinstance(decodes.submit(PlacementRequest(600, max_output_tokens=100)), EngineSlot)
    decodes.waits.add(0.5)
    decodes.waits.add(6.0)
    now_s[0] = 1.5
    registry = CollectorRegistry()
    registry.register(
        EngineMetrics({"small": pool.fleet}, [lambda: {"small decode": 1}], lambda: now_s[0])
    )

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"shell_router_{name}", labels)

    at_a, at_b = ({"model": "small", "role": "decode", "url": f"http://{host}"} for host in "ab")
    assert value("engine_tokens", **at_a) == 100
    assert value("engine_kv_usage", **at_a) == 0.25
    assert value("engine_report_age_seconds", **at_a) == 1.5
    assert value("engine_reports_missed_total", **at_a) == 2
    assert value("engine_kv_usage", **at_b) is None
    role = {"model": "small", "role": "decode"}
    assert value("engine_choices_total", **role, policy="scored", why="tie") == 1
    assert value("queue_requests", **role) == 0
    assert (value("queue_wait_seconds_count", **role), value("queue_wait_seconds_sum", **role)) == (
        2,
        6.5,
    )
    buckets = [
        value("queue_wait_seconds_bucket", **role, le=le)
        for le in ("0.25", "0.5", "5.0", "10.0", "+Inf")
    ]
    assert buckets == [0, 1, 1, 2, 2]
    assert (
        value("engine_restarts_total", engine="small decode") == 1
        and value("retries_total", model="small") == 0
    )
    await pool.aclose()


def test_what_optimizations_save_is_exported_apart() -> None:
    worse, unknown = Benefit(-0.2, -0.3, -0.1), None
    seen = [
        Comparison(Compared("incremental_prefill", "tree", "a, b"), "off", worse),
        Comparison(Compared("incremental_prefill", "panel", "a"), "trial", unknown),
        Comparison(Compared("drafts", "tree", "a", "root"), "off", worse),
    ]
    registry = CollectorRegistry()
    registry.register(EngineMetrics({}, comparisons=lambda: seen))

    def value(name: str, topology: str, models: str) -> float | None:
        labels = {"topology": topology, "models": models}
        return registry.get_sample_value(f"shell_router_incremental_prefill_{name}", labels)

    assert (value("on", "tree", "a, b"), value("saved", "tree", "a, b")) == (0, -0.2)
    assert (value("on", "panel", "a"), value("saved", "panel", "a")) == (1, None)
    labels = {"topology": "tree", "models": "a", "role": "root"}
    assert registry.get_sample_value("shell_router_drafts_on", labels) == 0
