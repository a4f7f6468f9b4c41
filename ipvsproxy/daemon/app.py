"""Connects the parts of the daemon into one process, which serves with a given configuration until a signal arrives."""

import asyncio
import contextlib
import dataclasses
import functools
import importlib.metadata
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from ipvsproxy.config.settings import Choices, Config
from ipvsproxy.daemon.base.log import log
from ipvsproxy.daemon.base.timing import until_readable
from ipvsproxy.daemon.events import Announcer, Recorder
from ipvsproxy.daemon.http import paths
from ipvsproxy.daemon.http.health import Status
from ipvsproxy.daemon.http.health_check_node_ports import HealthChecks
from ipvsproxy.daemon.http.paths import MetricsPaths
from ipvsproxy.daemon.loop import journal, leftover_removal
from ipvsproxy.daemon.loop.engine import Engine
from ipvsproxy.daemon.loop.leftover_removal import Leftovers
from ipvsproxy.daemon.loop.summary import SyncSummary, Watcher
from ipvsproxy.daemon.metrics.figures import Sampler, Sources
from ipvsproxy.daemon.metrics.metrics import Metrics
from ipvsproxy.daemon.metrics.traffic import Traffic
from ipvsproxy.daemon.process import lifecycle, requirements
from ipvsproxy.daemon.process.lifecycle import Signals
from ipvsproxy.daemon.process.reload import Reloader
from ipvsproxy.daemon.sources import source as sources
from ipvsproxy.daemon.sources.source import Source, Staleness
from ipvsproxy.daemon.ui.node_page import NodePage
from ipvsproxy.daemon.ui.pages import Pages
from ipvsproxy.kernel import host
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.iptables import iptables_tables
from ipvsproxy.kernel.iptables.iptables_driver import Program
from ipvsproxy.kernel.ipvs.rows import TrafficReader
from ipvsproxy.kernel.network import notify
from ipvsproxy.kernel.nftables.changes import NftChanges
from ipvsproxy.kernel.node_kernel import NodeKernel
from ipvsproxy.kernel.thread import KernelThread
from ipvsproxy.model.net import Family
from ipvsproxy.model.service import Event
from ipvsproxy.store.guard import Guard
from ipvsproxy.store.objects import Store

SCHEDULER_MISSING, API_SERVER_HIDDEN, HOST_PORTS_FIRST = "SchedulerMissing", "ApiServerHidden", "HostPortsFirst"
"""The reasons of the Kubernetes events that this module records."""


def run(config: Config, read_again: Callable[[], Config]) -> int:
    """Serve until a signal arrives; returns the exit status.

    ``read_again`` loads the configuration again, and raises ConfigError if the configuration has problems.
    """
    return lifecycle.run(config, functools.partial(_serve, config, read_again))


async def _serve(config: Config, read_again: Callable[[], Config], signals: Signals) -> int:
    metrics = Metrics()
    source = await sources.make(config, metrics.requested)
    with requirements.only_instance():
        late_rules = asyncio.Event()
        async with requirements.running_kernel(config.drivers, metrics.applied, late_rules.set, listen=True) as kernel:
            requirements.demand(host.missing_settings())
            programs = await requirements.demand_usable_node(kernel, config.translation.detect_local)
            rules = await kernel.call(lambda node: node.leftover_rules)
            tables = leftover_removal.of_nftables(await kernel.call(lambda node: node.leftover_tables))
            await asyncio.to_thread(leftover_removal.announce, tables)
            places = leftover_removal.of_iptables(rules, rules.places(programs)) | tables
            left = Leftovers(places, lambda: kernel.call(lambda node: node.remove_other_backend()))
            choices, why_not = await requirements.until_answered(lambda: _choices(kernel, config, programs))
            node = _Node(config, choices, kernel=kernel, programs=programs, source=source, metrics=metrics, leftovers=left)
            node.note_scheduler(choices.translation.scheduler, why_not)
            await node.serve(read_again, signals, late_rules)
    log.info("stopped", hint="the kernel stays as it is")
    return 0


@dataclasses.dataclass(eq=False)
class _Node(Watcher):
    """The parts of a serving process and the connections between them."""

    config: Config
    choices: Choices
    kernel: KernelThread[NodeKernel]
    programs: Mapping[Family, Program]
    source: Source
    metrics: Metrics
    leftovers: Leftovers

    def __post_init__(self) -> None:
        self._node_trouble = ""
        guard = Guard(self.config.guard_percent, all_nodes=self.config.takes_direct_return)
        self._store = Store(started_s=time.time(), guard=guard, here=self.config.node_name)
        prepare = functools.partial(_inherit_sets, self.kernel, tuple(self.programs))
        self._engine = Engine(choices=self.choices, store=self._store, kernel=self.kernel, watcher=self, prepare=prepare)
        self._staleness = Staleness(lambda: self.source.statuses, limit_s=self.config.servers.stale_watch_s)
        self._status = Status(
            families=self.programs,
            sync_period_s=self.config.engine.audit_interval_s,
            stale=self._staleness.stale,
            stale_turns_away=self.config.servers.stale_watch_unhealthy,
            missing=lambda: self._store.missing,
            unreadable=lambda: (*self._engine.unreadable, *filter(None, [self.source.problem])),
            leftovers=lambda: self.leftovers.reasons,
            source_problem=lambda: self.source.problem,
        )
        self._recorder = Recorder(node_name=self.config.node_name, post=self.source.post, on_outcome=self.metrics.announced)
        self._announcer = Announcer(self._recorder, self._store, self._status)
        self._health_checks = HealthChecks(
            is_healthy=lambda: self._status.is_healthy and not self._status.is_turned_away, on_failure=self._announcer.port_failed
        )
        self._audited = asyncio.Event()
        self._pages: Pages

    async def serve(self, read_again: Callable[[], Config], signals: Signals, late_rules: asyncio.Event) -> None:
        """Serve until a signal arrives.

        ``late_rules`` is set when an iptables program ends after the event loop has stopped waiting for that program.
        """
        config, kernel, engine = self.config, self.kernel, self._engine
        reloader = Reloader(config, read_again, self._reconfigure, self.metrics.configured)
        signals.install(reloader.ask)
        self._pages = self._show(kernel.standing_in(await kernel.call(lambda node: node.ipvs.traffic)))
        self._announcer.start()
        lifecycle.set_oom_score(config.oom_score_adj)
        for warning in config.warnings(self.programs):
            log.warning("configuration_notice", notice=warning)
        families, variants = [family.label for family in self.programs], {program.variant for program in self.programs.values()}
        version, scheduler = importlib.metadata.version("ipvsproxy"), engine.translation.scheduler
        about = {"version": version, "node": config.node_name, "scheduler": scheduler, "families": families}
        log.info("starting", **about, iptables=sorted(variants))
        work = (
            # Notifications about interfaces and rules are enabled before the first reading, so that no change is missed.
            follow_interfaces(engine, await kernel.call(lambda node: node.ports), config.drivers.route_protocol),
            follow_rules(engine, await kernel.call(lambda node: node.rules_changes)),
            self.source.run(self._deliver),
            engine.run(),
            _pass_on_late_rules(late_rules, engine),
            self.leftovers.run(),
            self._find_host_ports(),
            self._staleness.run(),
            self._recorder.run(),
            sources.wait_for_lists(self._store, self.source, silent=sources.log_silence, heal=self._give_up_api_servers),
            reloader.run(),
            self._pages.run(),
            lifecycle.watch_descriptors(),
        )
        health = paths.health_server(lambda: self.config, self._status, self.metrics.health_answered)
        metrics = MetricsPaths(lambda: self.config, self.metrics.expose, self._pages.answer)
        servers = (*paths.servers(config.servers, health, metrics.answer), self._health_checks.run())
        await lifecycle.until_stopped(signals.stopping, self._status, work, servers)

    # The event loop calls the following methods, as ``Watcher`` describes.

    def queued(self, now: float) -> None:
        """Called when a change waits for the next sync."""
        self._status.queued(now)
        self.metrics.queued()

    def syncing(self, now: float) -> None:
        """Called when a sync begins."""
        self._status.syncing(now)

    def synced(self, summary: SyncSummary) -> None:
        """Called when a sync has ended."""
        self._status.synced(summary)
        self.metrics.synced(summary)
        self._announcer.synced(summary)
        addresses = summary.view.health_check_addresses
        self._health_checks.put(summary.health_checks, {family: addresses[family] for family in self._status.families})
        self.leftovers.synced(summary)
        if summary.is_audit:
            self._audited.set()
        listen = self.config.servers
        if listen.metrics and listen.ui:
            self._pages.synced(summary)

    async def _give_up_api_servers(self) -> None:
        """Unbind API-server addresses that an earlier process, or a kube-proxy, has bound to this node for Services.

        While this node has the address of an API server, this node cannot reach the API server at that address.
        """
        servers, allowed = self._store.api_servers, self._engine.translation.allowed_addresses
        try:
            done = await self.kernel.call(lambda node: requirements.give_up(node, api_servers=servers, allowed=allowed))
        except KernelError as error:
            log.warning("api_server_address_kept", error=str(error), hint="addresses are unbound only when all sets can be read")
            return
        if done:
            message = f"the API server did not answer, and this node held its address for a Service: {'; '.join(done)}"
            self._status.note(API_SERVER_HIDDEN, message)
            log.error("api_server_address_given_up", done=done, hint="no Service gets the address of an API server")

    def note_scheduler(self, name: str, why_not: str) -> None:
        """Log the scheduler that replaces the configured scheduler, and record an event about the replacement.

        ``why_not`` is the reason for the replacement, and is empty if the configured scheduler is used.
        """
        self._status.note(SCHEDULER_MISSING, f"{why_not}; {name} is used instead" if why_not else "")
        if why_not:
            log.error("scheduler_not_used", reason=why_not, used=name)

    async def _find_host_ports(self) -> None:
        """Log the hostPort rules that come before the rules of ipvsproxy, and record an event about these rules.

        The hostPort rules are read at the start and after each audit.
        """
        variants = {family: program.variant for family, program in self.programs.items()}
        told: tuple[str, ...] = ()
        while True:
            with contextlib.suppress(KernelError):  # a failed reading is repeated after the next audit
                found = await asyncio.to_thread(iptables_tables.host_ports_before_services, variants)
                rules = ", ".join(found)
                message = f"hostPort rules ({rules}) take their ports from all Services: {iptables_tables.HOST_PORTS_REMEDY}"
                self._status.note(HOST_PORTS_FIRST, message if found else "")
                if found and found != told:
                    log.warning("host_ports_before_services", rules=rules, hint=message)
                elif told and not found:
                    log.info("host_ports_no_longer_before_services")
                told = found
            await self._audited.wait()
            self._audited.clear()

    async def _reconfigure(self, new: Config) -> None:
        """Apply a configuration completely or not at all. For this reason, only the first step (``_choices``) may fail."""
        choices, why_not = await _choices(self.kernel, new, self.programs)
        chosen = {one.path for one in choices.settings.sysctls}
        left = [one.path for one in self._engine.choices.settings.sysctls if one.path not in chosen]
        if left:
            log.warning(
                "kernel_settings_left", settings=left, hint="these settings keep their values, because earlier values are unknown"
            )
        self.config = new
        self._engine.reconfigure(choices)
        lifecycle.set_up_log(new)
        lifecycle.set_oom_score(new.oom_score_adj)
        self._status.sync_period_s = new.engine.audit_interval_s
        self.note_scheduler(choices.translation.scheduler, why_not)

    def _show(self, counters: KernelThread[TrafficReader]) -> Pages:
        """Connect the metrics to the sources of their values; returns the web pages of this node."""
        config = self.config
        figures = Sources(
            survey=self._engine.survey,
            store=self._store,
            status=self._status,
            watches=lambda: self.source.statuses,
            leftovers=lambda: self.leftovers.present,
            other_backend=lambda: self.leftovers.other_backend_resists,
            unopened_ports=lambda: self._health_checks.unopened,
        )
        sampler = Sampler(counters)
        servers = config.servers
        traffic = Traffic(sampler, figures, limit=servers.service_metrics_limit, of_endpoints=servers.endpoint_metrics)
        self.metrics.show(figures, traffic)
        source = "manifests" if config.source.manifests else "API server"
        page = NodePage(sources=figures, node_name=config.node_name, source=source, programs=self.programs)
        return Pages(page, sampler, lambda: self._engine.translation, self.source.targets)

    def _deliver(self, events: Sequence[Event]) -> None:
        journal.log_received(events)
        now = time.monotonic()
        was_complete = self._store.is_complete
        self._store.deliver(events, now)
        if self._store.is_complete and not was_complete:
            self._status.listed(now)
        for kind, doubt in self._store.doubts.items():
            self.source.list_again(kind, doubt.due_s)
        self._status.node = self._store.node(self.config.node_name)
        if self._store.is_complete:
            before, self._node_trouble = self._node_trouble, self._status.node_trouble
            journal.log_node(self.config.node_name, before, self._node_trouble)
        self._engine.changed(now)


async def _choices(kernel: KernelThread[NodeKernel], config: Config, programs: Mapping[Family, Program]) -> tuple[Choices, str]:
    """Return the settings of the event loop, and the reason why another scheduler replaces the configured scheduler.

    The reason is empty if the settings have the configured scheduler.

    Raises:
        CannotStartError: the configured settings cannot be used on this host.
        KernelError: the kernel could not answer at the moment.
    """
    scheduler, why_not = await kernel.call(lambda node: requirements.usable_scheduler(node, config.translation.scheduler))
    chosen = requirements.choices(config, programs, scheduler)
    if not config.takes_direct_return and not await kernel.call(requirements.end_direct_return):
        chosen = chosen._replace(translation=dataclasses.replace(chosen.translation, guards_tunnels=True))
    return chosen, why_not


async def _inherit_sets(kernel: KernelThread[NodeKernel], families: Collection[Family]) -> None:
    """Adopt the set entries that an earlier process left in the other backend.

    The entries show which virtual servers belong to ipvsproxy.
    """
    try:
        count = await kernel.call(lambda node: node.inherit_sets(families))
    except KernelError as error:
        hint = "virtual servers of node ports and traffic scopes that no Service desires any more may stay"
        log.warning("sets_not_inherited", error=str(error), hint=hint)
    else:
        if count:
            log.info("sets_inherited", entries=count, hint="these entries show which virtual servers belong to ipvsproxy")


async def follow_interfaces(engine: Engine, own_ports: Collection[int], route_protocol: int) -> None:
    """Make the event loop read the kernel when another program changes addresses, interfaces or ipvsproxy's local routes.

    ``own_ports`` are the netlink port ids of the sockets with which this process changes addresses and routes. The caller may add
    more ports while this function runs. ``route_protocol`` is the protocol number of ipvsproxy's local routes.

    Raises:
        KernelError: the kernel does not send notifications, or has ceased to send notifications.
    """
    with contextlib.closing(notify.ChangeListener(own_ports=own_ports, route_protocol=route_protocol)) as listener:
        while True:
            await until_readable(listener.fileno())
            for change in listener.read():
                (engine.kernel_changed if change is notify.Change.OURS else engine.interfaces_changed)()


async def follow_rules(engine: Engine, changes: NftChanges | None) -> None:
    """Make the event loop read rules and sets when another program changes the nftables table of ipvsproxy.

    Ends when the notification socket is lost. ``changes`` is None if the backend has no notifications; this function then ends at
    once.
    """
    if changes is None:
        return
    while (watched := changes.fileno()) is not None:
        await until_readable(watched)
        if changes.read():
            engine.rules_changed()
    log.warning("nftables_notifications_lost", error=changes.reason, hint="polls compare the generation of nf_tables instead")


async def _pass_on_late_rules(late_rules: asyncio.Event, engine: Engine) -> None:
    while True:
        await late_rules.wait()
        late_rules.clear()
        engine.rules_ended()
