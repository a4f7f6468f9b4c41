"""The vocabulary of the log: each event by name, each key with its type. Prose goes into ``hint``.

Scripts generate docs/log.md from it. Besides these keys, events that count kernel objects have a key for each kind of them.
"""

from collections.abc import Mapping
from typing import NamedTuple


class Key(NamedTuple):
    """The meaning of a key. ``type`` is for readers of the page: a list is comma-separated in text."""

    type: str
    meaning: str


EVENTS: Mapping[str, str] = {
    "address_conflict": (
        "several Services have one address and port: one is `served`, the others are `waiting`; `why` has the reason of each"
    ),
    "addresses_unreadable": "the node's addresses could not be read; the last known ones count",
    "configuration_changed": "settings of the changed configuration file that have come into force",
    "configuration_notice": "a remark on the configuration, in prose",
    "configuration_refused": (
        "the changed configuration file has an error, with its line and field; the previous configuration stays in force"
    ),
    "configuration_unchanged": "the configuration file was read again and has not changed",
    "differs": "of a dry run: one kernel object that a run would change, as `desired` and as `observed`",
    "drift_found": "drift was found, and is being repaired: how many objects of each kind",
    "drift_returns": (
        "another program undoes the same repair again and again: `kind`, `name`, `times`. Identify it, or exclude the object"
    ),
    "dry_run_looked": (
        "of a dry run: differences between the kernel and the state that a run would program, by kind; `new` ones since "
        "the last reading"
    ),
    "dry_run_starting": "a dry run begins",
    "event_not_written": "the API server refused a Kubernetes event",
    "family_not_served": (
        "the host or the kernel certainly cannot hold rules of this family, in iptables or nftables as configured, or IPVS does "
        "not know it; nothing of it is removed"
    ),
    "first_list_not_believed": (
        "of a first list without objects: no object that it lacks is removed, or compared by a dry run, until a second "
        "list confirms it"
    ),
    "first_lists_missing": (
        "the first lists have been missing for 20 s. The API server is asked again; `/healthz` is 503 meanwhile. Logged "
        "again every five minutes"
    ),
    "first_services_programmed": (
        "`default/kubernetes` and `kube-system/kube-dns`, if they exist, are in force; all others follow"
    ),
    "health_check_port_closed": "a health-check node port is closed",
    "health_check_port_not_opened": "the address is taken or does not exist; opening it is tried again with growing pauses",
    "health_check_port_opened": "a health-check node port is open",
    "iptables_variant_chosen": "the variant of iptables that writes the rules, and why",
    "kernel_lacks": (
        "the kernel lacks `features`, all of which have a fall-back or concern one part; docs/compatibility.md says under "
        "Kernels what happens without each. Not logged on a kernel that has all"
    ),
    "kernel_readable": "all parts of the kernel can be read again",
    "kernel_setting_not_written": "of `--init-only`: a kernel setting that was refused, and why",
    "kernel_setting_written": "of `--init-only`: a kernel setting, its value now and `before`",
    "kernel_settings_not_writable": (
        "kernel settings cannot be written. Without `net.ipv4.ip_forward` and `net.ipv4.vs.conntrack` no Service works, "
        "and `/healthz` lists them"
    ),
    "kernel_slow": (
        "one query or change has kept the kernel thread busy for `after_s` seconds and still does: an answer was lost, "
        "or the node is overloaded. Changes wait meanwhile, and `/healthz` is 503 after two sync periods. The next line, "
        "about its failure, names the operation. Logged once a minute at most"
    ),
    "kernel_unreadable": (
        "part of the kernel could not be read. It counts as last observed, nothing of it is removed, and it is read "
        "again soon; everything else goes on. `/healthz` and `ipvsproxy_unreadable_parts` show it meanwhile"
    ),
    "leftover_rules_come_back": (
        "a kube-proxy in iptables or nftables mode runs on this node and writes the rules again: stop it. They are removed every "
        "ten minutes"
    ),
    "leftover_rules_gone": "the cause of `leftover_rules_come_back` or `leftover_rules_not_removed` has ended",
    "leftover_rules_not_removed": (
        "such rules exist, or may exist because they cannot be read, and why. Removing them is tried again with growing "
        "pauses; `ipvsproxy_leftover_rules` is 1 meanwhile"
    ),
    "leftover_rules_removed": (
        "rules of kube-proxy's iptables mode, a table of its nftables mode, or our own rules in the unused variant of iptables "
        "were removed: how many `jumps` and `chains`, and of which `rules`"
    ),
    "leftover_table_found": (
        "a start meets a table of kube-proxy's nftables mode, which decides about packets of Services until it is removed: once "
        "most virtual servers are in force (`leftover_rules_removed`)"
    ),
    "library_message": (
        "a library has logged a message, such as the Kubernetes client about an entry of the kubeconfig; the same text "
        "once in five minutes"
    ),
    "list_believed_again": "the cause of `list_not_believed` or `first_list_not_believed` has ended",
    "list_not_believed": (
        "the API server no longer lists most Services or endpoints; they are served until a second list confirms it"
    ),
    "listed": "the list of a kind of object is complete (`kind`, `objects`), or the directory was read",
    "load_balancers_turned_away": (
        "`/healthz` is 503 although everything is in force: there is no Node object of this name "
        "(`--hostname-override`), or it is about to be removed"
    ),
    "load_balancers_welcome": "the cause of `load_balancers_turned_away` has ended",
    "local_pods_unknown": (
        "`clusterCIDR` or `spec.podCIDRs` has no range of a served family: traffic of that family to cluster IPs is "
        "masqueraded as without local detection"
    ),
    "lock_held_by_other_process": "a process that is not ipvsproxy holds the lock against a second instance; the lock is ignored",
    "manifests_unreadable": "the directory of manifests cannot be read; its last known objects stay served",
    "memory_left_to_c_library": "the C library has no mallopt, so the process may keep more memory than it needs",
    "nftables_notifications_lost": (
        "the kernel sends no notifications of nftables, and why: changes of our table by others are found by polls"
    ),
    "no_configuration_file": "SIGHUP was received, but there is no configuration file to read again",
    "node_changed": "zone or addresses of the node have changed; every Service is translated again",
    "node_prepared": "of `--init-only`: the number of `settings`, and how many of them were `written` or `failed`",
    "oom_score_not_set": "the kernel refused the OOM score, and why",
    "operation": "at `-v=4`, each operation with its error; at `-v=2`, those that remove addresses or write rules",
    "operation_failed": "the kernel refused an operation: which, and why. It is tried again after 1 s, then with growing pauses",
    "other_backend_not_removed": (
        "what the other `--rules-backend` holds of ours could not be removed, and why. It is tried again with growing pauses; "
        "`ipvsproxy_other_backend_left` and `/healthz` show it meanwhile"
    ),
    "other_backend_removed": "sets, or the table of nftables, of the other `--rules-backend` were removed: ours are in force",
    "part_not_used": "part of an object is wrong and not used: which object, which field, and why. The rest is served",
    "received": "at `-v=4`: an object from the watch or a file",
    "reload_failed": (
        "a changed configuration file cannot be put in force at present: why, and which settings. The previous "
        "configuration stays in force; the change is tried again"
    ),
    "request_failed": "an HTTP request met an internal error; the client got status 500",
    "restart_needed": "changed settings that take effect only after a restart",
    "rule_changes_unseen": (
        "the kernel does not show whether rules of this family have changed, and why: polls do not see changed rules, audits do"
    ),
    "rules_backend_chosen": "what holds rules and sets, and why; not logged for iptables without a choice",
    "rules_left_in_other_variant": (
        "the unused variant of iptables holds rules of ours, which apply to packets, too. They are removed once the new "
        "ones are in force"
    ),
    "rules_move_waits": (
        "a reload names another `--rules-backend`, and rules cannot move yet, because an examination or removal of leftovers has "
        "not ended. The former configuration stays in force until then, and changes of Services are programmed. Or rules have "
        "moved, and a program of iptables hangs that shows where leftovers may be: another move waits. `hint` says which"
    ),
    "rules_moved": "a reload has made this `backend` hold rules and sets; what the other one holds goes once they are in force",
    "rules_not_writable_yet": (
        "rules of this family could not be written at the start; the family is served, and its rules follow"
    ),
    "scheduler_not_found": (
        "of a command: the kernel has no module of the configured scheduler; the command assumes `rr`, which `run` would use"
    ),
    "scheduler_not_used": "the kernel lacks the configured scheduler: which one is `used` instead, and the `reason`",
    "scope_without_mark": "no packet mark is left for a Service port with externalTrafficPolicy Local",
    "server_cannot_listen": "the address is taken; listening is tried again every 5 s",
    "server_listening": "an HTTP server listens",
    "serves": "of a dry run: where one of its servers listens, beside kube-proxy's",
    "set_enlarged": "a nearly full ipset was swapped for one with twice the `capacity`",
    "set_not_enlarged": "a nearly full ipset could not be swapped for a larger one, and why",
    "set_not_inherited": "an entry of the other backend's sets could not be copied, and why; see `sets_not_inherited`",
    "sets_inherited": (
        "a start has copied entries that only the other backend's sets had: they tell which virtual servers are ours"
    ),
    "sets_not_inherited": (
        "a start could not read what the other backend's sets hold: virtual servers of node ports and traffic scopes that no "
        "Service desires any more may stay"
    ),
    "settings_without_effect": "flags and fields that are accepted without effect",
    "start_step_failed": (
        "the start, or a reload to another `--rules-backend`, waits until the kernel answers; it changes nothing before"
    ),
    "start_step_waits": (
        "a step of the start, or of a reload to another `--rules-backend`, has taken `after_s` seconds and goes on: a program "
        "hangs, or the node is overloaded. Before the step ends, a start changes nothing and `/healthz` is not open; a reload "
        "leaves the former configuration in force, which serves changes of Services"
    ),
    "starting": "the process starts: node name, scheduler, served families, and what writes the rules",
    "stopped": "the process ends",
    "synced": (
        "changes are in force: number of translated Services, `operations` done and `failed`, `pending` kernel objects "
        "(not in their desired state), `draining` real servers, duration in seconds"
    ),
    "traffic_counters_old": "a scrape shows the traffic of the scrape before, because the kernel was busy",
    "traffic_counters_unreadable": "IPVS's counters could not be read for a scrape, and why",
    "page_counters_unreadable": "IPVS's counters could not be read for the page, and why; said once until they can",
    "translated": "at `-v=4`: what a Service needs on this node",
    "verbosity_changed": "the `-v` was changed over HTTP",
    "waiting_for_first_lists": "which kinds are missing; nothing is programmed before they are complete",
    "watch_failed": "a list or watch failed, with a hint on what to check",
    "watch_no_longer_stale": "the API server answers again",
    "watch_restarting": "a list or watch is restarted, as happens regularly",
    "watch_resumed": "a list or watch works again",
    "watch_stale": (
        "the API server has been silent for `--stale-watch-timeout` (15 min): the state that this node serves may be out of date"
    ),
}

KEYS: Mapping[str, Key] = {
    "address": Key("text", "the address on which a server listens, with its port"),
    "addresses": Key("list", "addresses of the node"),
    "after_s": Key("seconds", "how long the operation has taken so far"),
    "applied": Key("list", "settings that have come into force"),
    "backend": Key("text", "`iptables` or `nftables`"),
    "before": Key("text", "the previous value"),
    "capacity": Key("number", "how many entries a set can hold"),
    "chains": Key("number", "chains that were removed"),
    "change": Key("text", "`put`, `deleted`, `listing`, `listed` or `rejected`"),
    "desired": Key("text", "the object as desired, or the setting as configured"),
    "differences": Key("number", "kernel objects that differ"),
    "directory": Key("text", "the directory of manifests"),
    "draining": Key("number", "real servers that keep their connections and get no new ones"),
    "duration_s": Key("seconds", "how long the operation took"),
    "entries": Key("number", "entries of sets"),
    "errno": Key("number", "the kernel's error number"),
    "error": Key("text", "what failed, in the words of the program that refused"),
    "events": Key("number", "changes found in a directory"),
    "failed": Key("number", "operations that failed"),
    "families": Key("list", "`IPv4`, `IPv6`"),
    "family": Key("text", "`IPv4` or `IPv6`"),
    "features": Key("list", "features of the kernel, as in docs/compatibility.md"),
    "field": Key("text", "the field of an object or of the configuration"),
    "file": Key("text", "the configuration file"),
    "files": Key("number", "manifests that were read"),
    "held_by": Key("text", "the process that holds the lock"),
    "hint": Key("text", "explanation, or what to do: prose, which may change"),
    "iptables": Key("list", "what writes the rules: the variants of iptables in use (`nf_tables`, `legacy`), or `nftables`"),
    "jumps": Key("number", "jumps that were removed"),
    "key": Key("text", "a virtual server: protocol, address and port"),
    "kind": Key("text", "kind of API object or of kernel object"),
    "known": Key("number", "objects that are known"),
    "library": Key("text", "the library that logged the message"),
    "lock": Key("text", "the name of a lock"),
    "message": Key("text", "the library's message"),
    "missing": Key("list or number", "kinds that are not listed yet; number of objects that a list lacks"),
    "name": Key("text", "an object, as `namespace/name`; a server; a key in the kernel"),
    "new": Key("number", "differences that the previous reading did not have"),
    "node": Key("text", "the name of the Node"),
    "notice": Key("text", "prose about the configuration"),
    "object": Key("text", "a kernel object"),
    "objects": Key("number", "objects of a list"),
    "observed": Key("text", "the object as observed in the kernel"),
    "operation": Key("text", "the operation on the kernel"),
    "operations": Key("number", "operations that were done"),
    "path": Key("text", "of a kernel setting below /proc/sys, or of an HTTP request"),
    "pending": Key("number", "kernel objects that are not in their desired state"),
    "reason": Key("text", "why, in a word or a sentence"),
    "retry_in_s": Key("seconds", "time until the next try"),
    "rules": Key("text", "variant of iptables, or `nftables`, and family"),
    "scheduler": Key("text", "the IPVS scheduler in use"),
    "served": Key("text", "the Service that has the address and port"),
    "server": Key("text", "an API server, or one of our HTTP servers"),
    "port": Key("number", "a port of a Service, by its number at the cluster IP"),
    "protocol": Key("text", "`TCP`, `UDP` or `SCTP`"),
    "service": Key("text", "a Service, as `namespace/name`"),
    "services": Key("number", "Services that were translated"),
    "set": Key("text", "the name of a set, in ipset or nftables"),
    "settings": Key("list or number", "settings of the configuration, or of the kernel"),
    "silent_for_s": Key("seconds", "time since the last contact"),
    "skipped": Key("list", "parts of a Service that are not used"),
    "step": Key(
        "text",
        "a step of the start: `load_modules`, `choose_iptables_variant` or `open_kernel_sockets`; the first two also of a reload",
    ),
    "times": Key("number", "how many times"),
    "untold": Key("number", "lines that the rate limit left out before this one"),
    "used": Key("text", "what is used instead"),
    "value": Key("text", "the new value"),
    "variant": Key("text", "`nf_tables` or `legacy`"),
    "verbosity": Key("number", "the `-v` in force"),
    "virtual_servers": Key("list", "virtual servers, with the number of their real servers"),
    "waiting": Key("list", "Services that wait"),
    "wants": Key("text", "`nothing`: the Service needs nothing on this node"),
    "where": Key("text", "the file or source of an object"),
    "why": Key("list", "the reason of each Service that waits"),
    "written": Key("number", "settings that were written"),
    "zone": Key("text", "the zone of the node"),
}

COUNTING = ("drift_found", "dry_run_looked")
"""The events that have a key for each kind of kernel object that they count."""
