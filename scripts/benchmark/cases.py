"""The benchmark cases: the measurements of each case, and the figures and targets computed from their results."""

import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from scripts.benchmark import figures
from scripts.benchmark import kube_proxy as kube_proxies
from scripts.benchmark.figures import Found, Row

Measurement = tuple[str, Mapping[str, Any]]
Pick = Callable[[Sequence[float]], float]
"""A function that selects one of several values."""
MAIN = (10_000, 10)
LARGEST = (100_000, 1)
CROWDED = (5_000, 50, 10)
"""A cluster with 5,000 Services of 50 pods each. All pods are on ten nodes. The node under test has 25,000 of these pods, more
than two hundred times the usual maximum of a node."""
OTHERS: Mapping[tuple[int, ...], int] = {(44_125, 2): 3, LARGEST: 1, (5_000, 50): 5, CROWDED: 3}
"""The number of measurements of each case. One start of the largest case with its replay takes seven minutes."""
SMALL = ((100, 10), (1_000, 10))
BALANCED = (10_000, 3, 0, 1)
"""10,000 load balancers with externalTrafficPolicy Local. Each has three endpoints."""
ANNOTATED = (10_000, 10, 0, 2)
"""The arguments of ``workload`` for 10,000 Services with ten endpoints each. The annotations of each Service choose a scheduler,
weights and slow start."""
DIRECT = (10_000, 3, 0, 4)
"""Load balancers with direct return."""
DIRECT_ON_TWO_NODES = (10_000, 2, 2, 4)
"""Load balancers with direct return. Each has one endpoint on the node under test, and one endpoint on the other node."""
NODE_CHANGES = 5
BINDINGS = ("addresses", "routes")
BINDING_TARGETS: Mapping[tuple[int, int], Mapping[str, tuple[float | None, float | None]]] = {
    SMALL[1]: {"addresses": (None, 3.0)},
    MAIN: {"addresses": (None, 2.0)},
    (44_125, 2): {},
    LARGEST: {"routes": (8.0, 2.5)},
}
"""For each size of a cluster and each binding, the targets for a start: the longest time in seconds, and the largest ratio of the
start's time to the time of its replay. None means that there is no target.

With local routes and 10,000 Services, the ratio is not meaningful, because the kernel takes only a tenth of the start's time.
"""
START_LIMIT_S = 600
"""The time limit of a start; a start that takes longer is stopped. If there are very many IPv6 addresses, the kernel takes
milliseconds to bind each of them."""
BACKENDS = ("iptables", "nftables")
BACKEND_RATIOS: Mapping[tuple[int, int], float | None] = {SMALL[1]: 2.5, MAIN: None, LARGEST: None}
"""With nftables, the largest allowed ratio of a start's time to the time of its replay, for each size of a cluster. None means no
limit. If a start of 1,000 Services ran other programs, these programs would take most of the start's time."""
ONE_MORE = ((10_000, 1), LARGEST)
"""Two sizes of a cluster. One more endpoint or Service must cost the same at both sizes."""
CHANGES = 500
FIGURES = ((100, 10), MAIN, LARGEST)
FIGURES_CHANGES, FIGURES_CHURN_S = 300, 20
CILIUM = (50_000, 1)
"""The size of Cilium's own benchmark of its load balancer, ``pkg/loadbalancer/benchmark``."""
FLOWS = 1_000_000
VIEWED, VIEWED_S = (10_000, 2), 120.0
WITHOUT_KERNEL = ("own", "flows")
"""The names of the measurements that send nothing to a kernel."""
_LAUNCH_FIGURES = (
    ("imported_s", "s for Python and all modules"),
    ("prepared_s", "s until the node is prepared"),
    ("listed_s", "s until the lists have come"),
    ("programmed_s", "s until everything is in force"),
    ("processor_s", "processor s until then"),
    ("started", "processes and threads started until then"),
    ("resident_mb", "resident MB then"),
)
"""Times since ``execve``."""
_PHASES = {
    "decode": ("decode", "store"),
    "translate": ("translate and desire", "view", "rules"),
    "diff": ("plan", "settle"),
    "encode": ("encode IPVS",),
    "kernel": ("kernel: ipvs", "kernel: addresses", "kernel: ipset and conntrack"),
    "processes": ("processes",),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A case: measurements on one boot of the kernel, and the rows computed from their results.

    ``--quick`` runs only ``quick`` cases.

    ``timeout_s`` limits the time of all measurements together.
    """

    name: str
    measurements: Sequence[Measurement]
    rows: Callable[[Sequence[Found]], Iterator[Row]]
    quick: bool = True
    timeout_s: int = 1500


class Side(NamedTuple):
    """A variant of a case: its flags, and upper limits for its starts.

    The limits apply to a start's time in seconds, to the ratio of this time to the replay's time, and to the number of started
    processes. None means no limit.
    """

    flags: Sequence[str]
    most_s: float | None = None
    most_ratio: float | None = None
    most_processes: int | None = None


def all_cases(*, quick: bool, kube_proxy: str = "") -> list[Case]:
    """Returns all cases; ``quick`` shortens some cases and omits other cases.

    ``kube_proxy`` is the command of a kube-proxy to measure beside ipvsproxy; an empty text means that no kube-proxy is measured.
    """
    repeats = 2 if quick else 3
    churn_s = 10 if quick else 60
    # The short churn has another name, because its figures cannot be compared with the figures of the long churn: memory and
    # backlog have less time to grow.
    churn = "churn of 10 s" if quick else "churn"
    cases = [
        _start(MAIN, repeats=repeats, target=3.0),
        *(_start(size, repeats=7, target=None, quick=False) for size in SMALL),  # a single start with few Services proves little
        *(_start(size, repeats=times, target=None, quick=False) for size, times in OTHERS.items()),
        *(_change(*size) for size in ((100, 10), MAIN)),
        _change(*LARGEST, quick=False),
        *(_figures(size, quick=size != LARGEST) for size in FIGURES),
        _figures_start(CILIUM),
        _figures_start_without_kernel(CILIUM, repeats),
        _steady(churn, functools.partial(figures.churn, churn), parts=["churn"], churn_s=churn_s),
        _steady("rolling", figures.rolling),
        _steady("idle", figures.idle),
        _steady("audit", figures.audit),
        _steady("scrape", figures.scrape),
        Case(
            name="restart",
            measurements=[("cold", {"pages": MAIN}), ("restart", {"pages": MAIN})] * repeats,
            rows=_restart,
        ),
        *(_one_more(size, quick=False) for size in ONE_MORE),
        _scopes(repeats),
        _direct_return(repeats),
        Case(
            name="direct-return without a kernel",
            measurements=[("own", {"what": "steady", "arguments": _NODES})],
            rows=_own_direct_return,
        ),
        _annotations(repeats),
        *(
            _binding(size, family, repeats=repeats if size[0] <= MAIN[0] else 1, quick=size in SMALL)
            for size in BINDING_TARGETS
            for family in ("IPv4", "IPv6")
        ),
        *(_backend(size, repeats=repeats if size[0] <= MAIN[0] else 1, quick=size in SMALL) for size in BACKEND_RATIOS),
        Case(name="own", measurements=[("own", {"what": "cold", "arguments": {"pages": MAIN}})] * repeats, rows=_own),
        _own_backends(repeats),
        Case(name="own change", measurements=[_own_steady("change")], rows=_own_change),
        Case(
            name=f"own {churn}", measurements=[_own_steady("churn", churn_s)], rows=functools.partial(_own_churn, f"own {churn}")
        ),
        Case(name="flows", measurements=[("flows", {"flows": FLOWS})], rows=_flows),
        *(_tools(*size, quick=size[0] == 1_000) for size in (*SMALL, MAIN)),  # noqa: PLR2004 - 10,000 Services take a minute
        *(_launch(*size, quick=size != MAIN) for size in (SMALL[-1], MAIN)),
        _viewer(),
        *(_beside(*size, kube_proxy) for size in SMALL if kube_proxy),
    ]
    return [case for case in cases if case.quick or not quick]


def related(rows: Sequence[Row]) -> Iterator[Row]:
    """Returns the rows that need the results of several cases."""
    values = {(row.case, row.figure): row.value for row in rows}
    middle = values.get((_change_name(*MAIN), "p50 ms"))
    for size in ((100, 10), LARGEST):
        p50 = values.get((_change_name(*size), "p50 ms"))
        if middle and p50:
            yield Row(_change_name(*size), "p50, relative to that of 10000x10", p50 / middle, 1.3)
    small, _ = ONE_MORE[0]
    for figure, growth in (("one endpoint, p50 ms", 1), ("one Service, p50 ms", 1), ("restart s", 10), ("audit s", 10)):
        less, more = (values.get((_one_more_name(size), figure)) for size in ONE_MORE)
        if less and more:
            per = ", each Service" if growth > 1 else ""
            name = f"{figure.partition(',')[0].removesuffix(' s')}{per}, relative to {small} Services"
            yield Row(_one_more_name(ONE_MORE[1]), name, more / less / growth, 1.3)


def _start_name(size: Sequence[int]) -> str:
    services, endpoints, *_ = size
    return f"start {services}x{endpoints}{' crowded' if size == CROWDED else ''}"


def _change_name(services: int, endpoints: int) -> str:
    return f"change {services}x{endpoints}"


def _start(size: tuple[int, ...], *, repeats: int, target: float | None, quick: bool = True) -> Case:
    name = _start_name(size)
    most_resident_mb = _most_resident_mb(size)
    most_relative = None if size == CROWDED else 1.2

    def rows(found: Sequence[Found]) -> Iterator[Row]:
        # Starts and replays take turns, because the machine's load changes from minute to minute. Only the first start records
        # the messages and reads clocks. The wall time of the first start is not used, because recording and clock readings make
        # this start slower.
        first, starts, replays = found[0], found[1::2], found[2::2]
        start, replay = _typical(starts), _typical(replays)
        least_start, least_replay = _typical(starts, min), _typical(replays, min)
        yield Row(name, "wall s, median", start["wall_s"])
        yield Row(name, "wall s, best", least_start["wall_s"])
        yield Row(name, "replay s, median", replay["wall_s"])
        yield Row(name, "replay s, best", least_replay["wall_s"])
        yield Row(name, "replay: addresses s", least_replay["addresses"])
        yield Row(name, "ratio to replay", _ratio(start, replay), target)
        yield Row(name, "ratio to replay, best", _ratio(least_start, least_replay))
        yield Row(name, "ratio without addresses", _without_addresses(start, replay))
        for phase, parts in _PHASES.items():
            spent = sum(first["phases"].get(part, {}).get("cpu_s", 0.0) for part in parts)
            yield Row(name, f"processor s: {phase}", spent)
        yield Row(name, "processor s: all", first["cpu_s"])
        yield Row(name, "failed operations", sum(start["failed"] for start in (first, *starts)), 0)
        yield Row(name, "failed or pending", sum(start["failed"] + start["pending"] for start in (first, *starts)), 0)
        yield from figures.counted(name, starts[0]["counts"])
        yield Row(name, "resident MB", max(start["resident_mb"] for start in starts), most_resident_mb)
        yield Row(name, "resident MB, peak", max(start["peak_mb"] for start in starts))
        if most_resident_mb:
            yield Row(name, "resident MB before the lists", first["imported_mb"])

    def rows_beside_main(found: Sequence[Found]) -> Iterator[Row]:
        # These measurements alternate, in one boot, with measurements of the main size, because the machine's speed changes by a
        # third within minutes. The speed of each phase of a start changes by a different factor.
        firsts, rounds = found[:2], [found[at : at + 4] for at in range(2, len(found), 4)]
        yield from rows([firsts[1], *(one for of_round in rounds for one in of_round[2:])])
        sides = list(zip(*rounds, strict=True))
        for figure, ratio, most in (("ratio", _ratio, most_relative), ("ratio without addresses", _without_addresses, None)):
            relative = f"{figure}, relative to that of 10000x10"
            yield Row(name, relative, _relative(ratio, sides, statistics.median), most)
            yield Row(name, f"{relative}, best", _relative(ratio, sides, min))

    if size not in OTHERS:
        measurements = [_recorded(size), *_pair(size) * repeats]
        return Case(name=name, measurements=measurements, rows=rows, quick=quick)
    measurements = [_recorded(MAIN), _recorded(size), *(*_pair(MAIN), *_pair(size)) * repeats]
    return Case(name=name, measurements=measurements, rows=rows_beside_main, quick=quick)


def _recorded(size: Sequence[int]) -> Measurement:
    return "cold", {"pages": size, "recording": _recording(size)}


def _pair(size: Sequence[int]) -> tuple[Measurement, Measurement]:
    """Returns two measurements: a start, and the replay of the messages that ``_recorded`` has recorded for this size."""
    return ("cold", {"pages": size, "times": False}), ("replay", {"recording": _recording(size)})


def _recording(size: Sequence[int | str]) -> str:
    return "-".join(["recording", *map(str, size)])


def _typical(found: Sequence[Found], pick: Pick = statistics.median) -> Found:
    """Combine repeated measurements into one: for each figure, ``pick`` chooses the value, by default the median.

    The function combines figures, not ratios, because the ratio of a start to a single slow replay would look good.
    """
    return {name: pick([one[name] for one in found]) for name in found[0].keys() & {"wall_s", "addresses"}}


def _relative(ratio: Callable[[Found, Found], float], sides: Sequence[Sequence[Found]], pick: Pick) -> float:
    """Divides the ratio of start to replay for one size by the same ratio for ``MAIN``.

    ``sides`` are, in this order: the starts of ``MAIN``, the replays of ``MAIN``, the starts of the size, and the replays of the
    size. ``pick`` combines the repeated measurements of each side.
    """
    main_start, main_replay, start, replay = (_typical(side, pick) for side in sides)
    return ratio(start, replay) / ratio(main_start, main_replay)


def _ratio(start: Found, replay: Found) -> float:
    return float(start["wall_s"] / replay["wall_s"])


def _most_resident_mb(size: tuple[int, ...]) -> float | None:
    return 250 if size in (MAIN, LARGEST) else None


def _without_addresses(start: Found, replay: Found) -> float:
    """The duration of the start divided by the duration of the replay, both without the time that the kernel needs for addresses.

    The kernel's time for addresses grows with the square of the number of addresses, and is the same for the start and the
    replay.
    """
    return float((start["wall_s"] - replay["addresses"]) / (replay["wall_s"] - replay["addresses"]))


def _change(services: int, endpoints: int, *, quick: bool = True) -> Case:
    name = _change_name(services, endpoints)
    rows = functools.partial(figures.change, name, _most_resident_mb((services, endpoints)))

    return _steady(name, rows, services=services, endpoints=endpoints, parts=["change"], quick=quick)


def _figures(size: tuple[int, int], *, quick: bool) -> Case:
    """Measures single changes, first connections of new Services, and churn.

    Then replays the messages that were recorded during these measurements.
    """
    services, endpoints = size
    name = f"figures {services}x{endpoints}"
    return _steady(
        name,
        functools.partial(figures.beside_kernel, name),
        services=services,
        endpoints=endpoints,
        parts=["change", "connection", "churn"],
        churn_s=FIGURES_CHURN_S,
        changes=FIGURES_CHANGES,
        recording=_recording((*size, "figures")),
        quick=quick,
    )


def _figures_start(size: tuple[int, int]) -> Case:
    """Measures starts, and a replay of their messages, first with local routes and then with addresses on the device."""
    sides = {way: Side([f"--ipvs-vip-binding={way}"]) for way in BINDINGS}
    case = _in_turn(f"figures start {size[0]}x{size[1]}", (*size, 0, 0), sides, repeats=1, quick=False)

    def rows(found: Sequence[Found]) -> Iterator[Row]:
        for row in case.rows(found):
            yield row
            if row.value and row.figure.startswith(("wall s", "replay s")):
                yield Row(case.name, f"Services per second: {row.figure}", size[0] / row.value)

    return dataclasses.replace(case, rows=rows)


def _figures_start_without_kernel(size: tuple[int, int], repeats: int) -> Case:
    name = f"figures start {size[0]}x{size[1]} without a kernel"

    def rows(found: Sequence[Found]) -> Iterator[Row]:
        yield Row(name, "wall s, median", _typical(found)["wall_s"])
        yield Row(name, "Services per second", size[0] / _typical(found)["wall_s"])
        yield Row(name, "Services per processor second, best", size[0] / min(float(one["cpu_s"]) for one in found))

    measurement = ("own", {"what": "cold", "arguments": {"pages": size, "times": False}})
    return Case(name=name, measurements=[measurement] * repeats, rows=rows, quick=False)


def _steady(
    name: str,
    rows: Callable[[Sequence[Found]], Iterator[Row]],
    *,
    services: int = MAIN[0],
    endpoints: int = MAIN[1],
    parts: Sequence[str] = (),
    churn_s: float = 0,
    changes: int = CHANGES,
    recording: str = "",
    quick: bool = True,
) -> Case:
    """A case that measures ``parts`` (default: the part named ``name``).

    If ``recording`` is given, the case also records and replays the messages.
    """
    arguments = {
        "pages": (services, endpoints),
        "services": services,
        "endpoints": endpoints,
        "parts": parts or [name],
        "churn_s": churn_s,
        "changes": changes,
    }
    recorded = {"recording": recording} if recording else {}
    measurements: list[Measurement] = [("steady", arguments | recorded)]
    if recorded:
        measurements.append(("replay", recorded))
    return Case(name=name, measurements=measurements, rows=rows, quick=quick)


def _restart(found: Sequence[Found]) -> Iterator[Row]:
    colds, restarts = found[0::2], found[1::2]
    yield Row("restart", "operations", max(one["operations"] for one in restarts), 0)
    # Every sent message counts, even if refused: a message for an existing object should not have been sent.
    yield Row("restart", "netlink messages that wrote", max(one["counts"].get("written", 0) for one in restarts), 0)
    yield Row("restart", "failed operations", sum(one["failed"] for one in restarts), 0)
    yield Row("restart", "wall s, median", statistics.median(one["wall_s"] for one in restarts))
    ratios = [one["wall_s"] / cold["wall_s"] for one, cold in zip(restarts, colds, strict=True)]
    yield Row("restart", "relative to a cold start", statistics.median(ratios), 1)
    yield from figures.counted("restart", restarts[0]["counts"])
    yield Row("restart", "resident MB", max(one["resident_mb"] for one in restarts), 250)


def _one_more_name(size: tuple[int, int]) -> str:
    return f"one more {size[0]}x{size[1]}"


def _one_more(size: tuple[int, int], *, quick: bool) -> Case:
    """Measures a change of one endpoint, the addition of one Service, a restart, and an audit.

    ``size`` is the number of Services, and the number of endpoints of each Service. Service addresses are made local by routes.
    """
    services, endpoints = size
    name, flags = _one_more_name(size), ["--ipvs-vip-binding=routes"]
    given = {"pages": size, "services": services, "endpoints": endpoints, "churn_s": 0, "changes": 100, "flags": flags}
    measurements: list[Measurement] = [
        ("cold", {"pages": size, "times": False, "flags": flags}),
        ("restart", {"pages": size, "flags": flags}),
        ("steady", {**given, "parts": ["change", "service", "audit"]}),
    ]

    def rows(found: Sequence[Found]) -> Iterator[Row]:
        _, again, steadily = found
        yield Row(name, "one endpoint, p50 ms", steadily["change"]["p50_ms"])
        yield Row(name, "one endpoint, netlink messages", steadily["change"]["messages"], 3)
        yield Row(name, "one Service, p50 ms", steadily["service"]["p50_ms"])
        yield Row(name, "one Service, netlink messages", steadily["service"]["messages"])
        yield Row(name, "restart s", again["wall_s"])
        yield Row(name, "restart: operations", again["operations"], 0)
        yield Row(name, "audit s", steadily["audit"]["wall_s"])
        yield Row(name, "audit: loop held ms, longest of all", steadily["audit"]["held_most_ms"])

    return Case(name=name, measurements=measurements, rows=rows, quick=quick, timeout_s=3000)


def _scopes(repeats: int) -> Case:
    """Measures load balancers: starts and single endpoint changes, alternately with one scope and with two scopes."""
    flags = [[f"--ipvs-traffic-scopes={name}"] for name in ("kube-proxy", "api")]
    services, endpoints, *_ = BALANCED
    starts = [("cold", {"pages": BALANCED, "times": False, "flags": one}) for one in flags]
    given = {"pages": BALANCED, "services": services, "endpoints": endpoints, "parts": ["change"], "churn_s": 0}
    changes = [("steady", {**given, "changes": CHANGES, "flags": one}) for one in flags]
    return Case(name="scopes", measurements=[*starts * repeats, *changes], rows=_scopes_rows, timeout_s=3000)


def _scopes_rows(found: Sequence[Found]) -> Iterator[Row]:
    colds, (plain, scoped) = found[:-2], found[-2:]
    sides = {"one scope": colds[0::2], "two scopes": colds[1::2]}
    for name, side in sides.items():
        yield Row("scopes", f"start s, median, {name}", _typical(side)["wall_s"])
        yield Row("scopes", f"operations at the start, {name}", side[0]["operations"])
        yield Row("scopes", f"resident MB, {name}", max(one["resident_mb"] for one in side))
    one, two = (_typical(side)["wall_s"] for side in sides.values())
    yield Row("scopes", "start, relative to one scope", two / one)
    yield Row("scopes", "failed or pending", sum(one["failed"] + one["pending"] for one in colds), 0)
    for name, one_change in (("one scope", plain["change"]), ("two scopes", scoped["change"])):
        yield Row("scopes", f"change p50 ms, {name}", one_change["p50_ms"])
        yield Row("scopes", f"change p99 ms, {name}", one_change["p99_ms"])
        yield Row("scopes", f"netlink messages of a change, {name}", one_change["messages"])
        yield Row("scopes", f"processes started by changes, {name}", one_change["processes"], 0)


_NODES = {
    "pages": DIRECT_ON_TWO_NODES,
    "services": DIRECT_ON_TWO_NODES[0],
    "endpoints": DIRECT_ON_TWO_NODES[1],
    "parts": ["nodes"],
    "churn_s": 0,
    "changes": NODE_CHANGES,
    "flags": ["--ipvs-direct-return=on"],
}


def _direct_return(repeats: int) -> Case:
    """Measures starts with load balancers, alternately with direct return off and on.

    Then measures changes of endpoints and of Nodes.

    With direct return off, the annotations of the Services and Nodes have no effect.
    """
    flags = [[f"--ipvs-direct-return={name}"] for name in ("off", "on")]
    services, endpoints, *_ = DIRECT
    starts = [("cold", {"pages": DIRECT, "times": False, "flags": one}) for one in flags]
    given = {"pages": DIRECT, "services": services, "endpoints": endpoints, "parts": ["change"], "churn_s": 0}
    changes = [("steady", {**given, "changes": CHANGES, "flags": one}) for one in flags]
    measurements: list[Measurement] = [*starts * repeats, *changes, ("steady", _NODES)]
    return Case(name="direct-return", measurements=measurements, rows=_direct_return_rows, timeout_s=3000)


def _direct_return_rows(found: Sequence[Found]) -> Iterator[Row]:
    name, names = "direct-return", ("off", "on")
    colds, changes, nodes = found[:-3], found[-3:-1], found[-1]
    sides = {"off": colds[0::2], "on": colds[1::2]}
    for which, side in sides.items():
        yield Row(name, f"start s, median, {which}", _typical(side)["wall_s"])
        yield Row(name, f"operations at the start, {which}", side[0]["operations"])
        yield Row(name, f"resident MB, {which}", max(one["resident_mb"] for one in side))
    off, on = (_typical(side)["wall_s"] for side in sides.values())
    yield Row(name, "start, relative to off", on / off)
    yield Row(name, "failed or pending", sum(one["failed"] + one["pending"] for one in colds), 0)
    for which, one in zip(names, changes, strict=True):
        yield Row(name, f"change p50 ms, {which}", one["change"]["p50_ms"])
        yield Row(name, f"change p99 ms, {which}", one["change"]["p99_ms"])
        yield Row(name, f"processor ms of a change, {which}", one["change"]["cpu_ms"])
        yield Row(name, f"netlink messages of a change, {which}", one["change"]["messages"])
        yield Row(name, f"processes started by changes, {which}", one["change"]["processes"], 0)
    yield from _of_nodes(name, nodes)


def _own_direct_return(found: Sequence[Found]) -> Iterator[Row]:
    return _of_nodes("direct-return without a kernel", found[0])


def _of_nodes(name: str, found: Found) -> Iterator[Row]:
    most_operations = {"with endpoints": 4 * DIRECT_ON_TWO_NODES[0] + 1, "without endpoints": 1}
    for which, one in found["nodes"].items():
        yield Row(name, f"Node {which} that comes or goes, s", one["wall_s"])
        yield Row(name, f"Node {which}, processor s", one["cpu_s"])
        yield Row(name, f"Node {which}, loop held ms", one["held_ms"])
        yield Row(name, f"Node {which}, operations", one["operations"], most_operations[which])


def _annotations(repeats: int) -> Case:
    """Measures three kinds of starts in turn.

    The kinds are: with the feature off, with the feature on but without annotations, and with annotations on each Service.
    """
    ignored, counted = ["--service-annotations=none"], ["--service-annotations=all"]
    sides = ((MAIN, ignored), (MAIN, counted), (ANNOTATED, counted))
    starts = [("cold", {"pages": pages, "times": False, "flags": flags}) for pages, flags in sides]
    return Case(name="annotations", measurements=starts * repeats, rows=_annotations_rows, quick=False)


def _annotations_rows(found: Sequence[Found]) -> Iterator[Row]:
    names = ("ignored, and none there", "counted, and none there", "three on each Service")
    sides = {name: found[place :: len(names)] for place, name in enumerate(names)}
    for name, side in sides.items():
        yield Row("annotations", f"start s, median, {name}", _typical(side)["wall_s"])
        yield Row("annotations", f"processor s, median, {name}", statistics.median(one["cpu_s"] for one in side))
        yield Row("annotations", f"resident MB, {name}", max(one["resident_mb"] for one in side))
    ignored, counted, chosen = (statistics.median(one["cpu_s"] for one in side) for side in sides.values())
    yield Row("annotations", "processor, counted and none there, relative to ignored", counted / ignored)
    yield Row("annotations", "processor, three on each Service, relative to ignored", chosen / ignored)
    yield Row("annotations", "failed or pending", sum(one["failed"] + one["pending"] for one in found), 0)


def _binding(size: tuple[int, int], family: str, *, repeats: int, quick: bool) -> Case:
    """Measures starts that bind addresses to the device, alternating with starts that use local routes.

    After each start, a replay sends the recorded messages of the start to the kernel again.
    """
    sides = {way: Side([f"--ipvs-vip-binding={way}"], *BINDING_TARGETS[size].get(way, ())) for way in BINDINGS}
    pages = (*size, 0, 3 if family == "IPv6" else 0)
    return _in_turn(f"binding {size[0]}x{size[1]} {family}", pages, sides, repeats=repeats, quick=quick)


def _backend(size: tuple[int, int], *, repeats: int, quick: bool) -> Case:
    """Measures starts, each followed by its replay. The starts use the two backends in turn.

    Service addresses are local routes, because the time in which the kernel adds addresses to a device would hide the cost of a
    backend.
    """
    sides = {
        backend: Side(
            _backend_flags(backend),
            most_ratio=BACKEND_RATIOS.get(size) if backend == "nftables" else None,
            most_processes=0 if backend == "nftables" else None,
        )
        for backend in BACKENDS
    }
    return _in_turn(f"backends {size[0]}x{size[1]}", (*size, 0, 0), sides, repeats=repeats, quick=quick)


def _backend_flags(backend: str) -> list[str]:
    return ["--ipvs-vip-binding=routes", f"--rules-backend={backend}"]


def _in_turn(name: str, pages: Sequence[int], sides: Mapping[str, Side], *, repeats: int, quick: bool) -> Case:
    """Measures starts and replays; the two variants in ``sides`` take turns.

    The variants alternate, because the machine's speed changes from minute to minute.

    If ``repeats`` is 1, the sides are measured in reverse order, because the first side of ``binding`` leaves the kernel busy
    with removed addresses.
    """
    firsts, rounds = dict[str, list[Measurement]](), dict[str, list[Measurement]]()
    for side, chosen in sides.items():
        recording = _recording((*pages, side))
        given = {"pages": pages, "flags": chosen.flags, "limit_s": START_LIMIT_S}
        firsts[side] = [("cold", {**given, "recording": recording})]
        rounds[side] = [("cold", {**given, "times": False}), ("replay", {"recording": recording})]
    if repeats > 1:
        steps = [*firsts.items(), *list(rounds.items()) * repeats]
    else:
        steps = [(side, measurements[side]) for side in reversed(list(sides)) for measurements in (firsts, rounds)]
    measured = [side for side, some in steps for _ in some]
    rows = functools.partial(_rows_in_turn, name, sides, measured)
    return Case(name=name, measurements=[one for _, some in steps for one in some], rows=rows, quick=quick, timeout_s=3000)


def _rows_in_turn(name: str, sides: Mapping[str, Side], measured: Sequence[str], found: Sequence[Found]) -> Iterator[Row]:
    """``measured`` tells, for each measurement in ``found``, which of the compared ``sides`` was measured.

    The first measurement of each side is a start. Each replay of the side repeats the messages of this first start.
    """
    walls = dict[str, float]()
    for side, given in sides.items():
        first, *rounds = (one for one, its_side in zip(found, measured, strict=True) if its_side == side)
        if any("stopped_s" in one for one in (first, *rounds)):
            yield Row(name, f"more than so many s, then stopped, {side}", START_LIMIT_S)
            continue
        starts, replays = rounds[0::2], rounds[1::2]
        start, replay = _typical(starts), _typical(replays)
        walls[side] = start["wall_s"]
        yield Row(name, f"wall s, median, {side}", start["wall_s"], given.most_s)
        yield Row(name, f"replay s, median, {side}", replay["wall_s"])
        yield Row(name, f"replay: addresses and routes s, {side}", replay["addresses"])
        yield Row(name, f"ratio to replay, {side}", _ratio(start, replay), given.most_ratio)
        yield Row(name, f"processor s, median, {side}", statistics.median(one["cpu_s"] for one in starts))
        yield Row(name, f"resident MB, {side}", max(one["resident_mb"] for one in starts))
        processes = max(one["counts"].get("processes", 0) for one in starts)
        yield Row(name, f"processes started, {side}", processes, given.most_processes)
        yield Row(name, f"failed or pending, {side}", sum(one["failed"] + one["pending"] for one in (first, *starts)), 0)
    if len(walls) == len(sides):
        before, after = walls
        yield Row(name, f"a start with {after}, relative to one with {before}", walls[after] / walls[before])


def _own_steady(part: str, churn_s: float = 0) -> Measurement:
    arguments = {
        "pages": MAIN,
        "services": MAIN[0],
        "endpoints": MAIN[1],
        "parts": [part],
        "churn_s": churn_s,
        "changes": CHANGES,
    }
    return "own", {"what": "steady", "arguments": arguments}


def _own(found: Sequence[Found]) -> Iterator[Row]:
    best = min(found, key=lambda one: float(one["cpu_s"]))
    for phase, parts in _PHASES.items():
        if phase not in ("kernel", "processes"):
            yield Row("own", f"processor s: {phase}", sum(best["phases"].get(part, {}).get("cpu_s", 0.0) for part in parts))
    yield Row("own", "processor s: all", best["cpu_s"])
    yield Row("own", "page faults", best["page_faults"])


def _own_backends(repeats: int) -> Case:
    """Measures how much processor time ipvsproxy itself needs for a start with each backend.

    The starts alternate between the backends, and run with a simulated kernel that does nothing.

    Nevertheless, the kernel of this machine must have nf_tables.
    """
    sides = {name: {"pages": MAIN, "times": False, "flags": _backend_flags(name)} for name in BACKENDS}

    def rows(found: Sequence[Found]) -> Iterator[Row]:
        spent = [min(float(one["cpu_s"]) for one in found[at :: len(sides)]) for at in range(len(sides))]
        for name, processor_s in zip(sides, spent, strict=True):
            yield Row("backends without a kernel", f"processor s, best, {name}", processor_s)
        yield Row("backends without a kernel", "processor of nftables, relative to iptables", spent[1] / spent[0])
        yield Row("backends without a kernel", "failed or pending", sum(one["failed"] + one["pending"] for one in found), 0)

    measurements: list[Measurement] = [("own", {"what": "cold", "arguments": given}) for given in sides.values()]
    return Case(name="backends without a kernel", measurements=measurements * repeats, rows=rows)


def _own_change(found: Sequence[Found]) -> Iterator[Row]:
    yield Row("own change", "processor ms", found[0]["change"]["cpu_ms"], 2)
    yield Row("own change", "p50 ms", found[0]["change"]["p50_ms"], 2)
    yield Row("own change", "p99 ms", found[0]["change"]["p99_ms"], 10)
    yield Row("own change", "page faults", found[0]["change"]["page_faults"])


def _own_churn(name: str, found: Sequence[Found]) -> Iterator[Row]:
    yield Row(name, "processor %", found[0]["churn"]["cpu_percent"], 50)
    yield Row(name, "p99 ms", found[0]["churn"]["p99_ms"], 250)


def _flows(found: Sequence[Found]) -> Iterator[Row]:
    tenth, everything = found[0]["tenth"], found[0]["all"]
    each = [1e6 * one["wall_s"] / one["flows"] for one in (tenth, everything)]
    yield Row("flows", "flows listed", everything["flows"])
    yield Row("flows", "of them deleted", everything["removed"])
    yield Row("flows", "wall s", everything["wall_s"])
    yield Row("flows", "µs per flow", each[1])
    yield Row("flows", "µs per flow, relative to a tenth of the flows", each[1] / each[0], 1.3)
    yield Row("flows", "memory grown MB", everything["grown_mb"], 1)
    yield Row("flows", "memory grown MB, a tenth of the flows", tenth["grown_mb"], 1)


def _tools(services: int, endpoints: int, *, quick: bool) -> Case:
    name = f"tools {services}x{endpoints}"

    def rows(found: Sequence[Found]) -> Iterator[Row]:
        yield Row(name, "ipvsadm -R s", found[0]["ipvsadm_s"])
        yield Row(name, "ipset restore s", found[0]["ipset_s"])

    return Case(name=name, measurements=[("tools", {"services": services, "endpoints": endpoints})], rows=rows, quick=quick)


def _launch(services: int, endpoints: int, *, quick: bool) -> Case:
    name = f"beside, start {services}x{endpoints}"

    def rows(found: Sequence[Found]) -> Iterator[Row]:
        for key, figure in _LAUNCH_FIGURES:
            yield Row(name, figure, statistics.median(one[key] for one in found))

    size = {"services": services, "endpoints": endpoints}
    return Case(name=name, measurements=[("launch", size)] * 3, rows=rows, quick=quick)


def _viewer() -> Case:
    """Measures two minutes without a viewer of the page, and two minutes with a viewer, while all Services have traffic."""
    services, endpoints = VIEWED
    arguments = {"services": services, "endpoints": endpoints, "seconds": VIEWED_S}

    def rows(found: Sequence[Found]) -> Iterator[Row]:
        alone, watched = found[0]["alone"], found[0]["watched"]
        more = watched["processor_percent"] - alone["processor_percent"]
        yield Row("viewer", "processor %, nobody looks", alone["processor_percent"])
        yield Row("viewer", "processor %, one viewer", watched["processor_percent"])
        yield Row("viewer", "processor %, one viewer more than nobody", more, 2)
        yield Row(
            "viewer", "processor, one viewer, relative to nobody", watched["processor_percent"] / alone["processor_percent"]
        )
        yield Row("viewer", "resident MB, nobody looks", alone["resident_mb"])
        yield Row("viewer", "resident MB, one viewer", watched["resident_mb"])
        yield Row("viewer", "resident MB, one viewer more than nobody", watched["resident_mb"] - alone["resident_mb"], 10)
        yield Row("viewer", "Services without traffic among the busiest 50", 50 - found[0]["busy"], 0)

    return Case(name="viewer", measurements=[("viewer", arguments)], rows=rows, quick=False)


def _beside(services: int, endpoints: int, kube_proxy: str) -> Case:
    name = f"beside {services}x{endpoints}"
    size = {"services": services, "endpoints": endpoints}

    def rows(found: Sequence[Found]) -> Iterator[Row]:
        ours, theirs = found
        yield from (Row(name, figure, value) for figure, value in kube_proxies.compared(ours, theirs))

    measurements: list[Measurement] = [("beside", {"command": command, **size}) for command in ("", kube_proxy)]
    return Case(name=name, measurements=measurements, rows=rows, timeout_s=3600)  # kube-proxy's start alone took 314 s
