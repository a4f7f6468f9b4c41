"""The vocabulary of the log: each event by name, each key with its type. Prose goes into ``hint``.

docs/log.md is written from it. Besides these keys, events that count kernel objects have a key for each kind of them.
"""

from collections.abc import Mapping
from typing import NamedTuple


class Key(NamedTuple):
    """What stands behind a key. ``type`` is for people: a list is comma-separated in text."""

    type: str
    meaning: str


EVENTS: Mapping[str, str] = {
    "address_conflict": "one has it, the others wait; `why` has the reason for each of these",
    "addresses_unreadable": "addresses of the node could not be read; those that are known count on",
    "configuration_changed": "settings of the changed configuration file that are in force now",
    "configuration_notice": "something in the configuration that deserves a look, in words",
    "configuration_refused": "an error in the changed configuration file, with its line and field; the one before stays in force",
    "configuration_unchanged": "the configuration file was read again and says the same",
    "differs": "of a dry run: one kernel object that a run would change, as it is `wanted` and as it was `found`",
    "drift_found": "drift was found, and is being repaired: how many objects of each kind",
    "drift_returns": "somebody undoes the same thing again and again: `kind`, `name`, `times`. Find out who, or exclude it",
    "dry_run_looked": (
        "of a dry run: differences by kind between the kernel and what a run would program; `new` ones since the last look"
    ),
    "dry_run_starting": "a dry run begins",
    "event_not_written": "the API server did not take a Kubernetes event",
    "family_not_served": (
        "the kernel or the host says for certain that it has no tables of iptables for this family; nothing of it is removed"
    ),
    "first_list_not_believed": "of a dry run: an empty first list is compared with nothing until a second one confirms it",
    "first_lists_missing": (
        "nothing has come of them for 20 s; the API server is waited for, and asked again; `/healthz` is 503 meanwhile. "
        "Said again every five minutes"
    ),
    "first_services_programmed": (
        "`default/kubernetes` and `kube-system/kube-dns`, where they exist, are in force; now come all others"
    ),
    "health_check_port_closed": "a health-check node port is not listened on any more",
    "health_check_port_not_opened": "the address is taken or not there; it is tried again with growing pauses",
    "health_check_port_opened": "a health-check node port is listened on",
    "iptables_variant_chosen": "which variant of iptables the rules are written with, and why",
    "kernel_readable": "all parts can be read again",
    "kernel_setting_not_written": "of `--init-only`: a kernel setting that was refused, and why",
    "kernel_setting_written": "of `--init-only`: a kernel setting, its value now and `before`",
    "kernel_settings_not_writable": (
        "kernel settings cannot be written; without `net.ipv4.ip_forward` and `net.ipv4.vs.conntrack` no Service works, and "
        "`/healthz` shows them"
    ),
    "kernel_slow": (
        "one question or change has kept the kernel's thread for `after_s` seconds and still does: an answer was lost, or the "
        "node is overloaded. Changes wait meanwhile, and `/healthz` is 503 after two sync periods. The line that follows, "
        "about its failure, names the step. Logged once a minute at most"
    ),
    "kernel_unreadable": (
        "that part counts as it was last observed, nothing of it is removed, and it is read again soon; everything else "
        "goes on. `/healthz` and `ipvsproxy_unreadable_parts` show it for as long as it lasts"
    ),
    "leftover_rules_come_back": (
        "a kube-proxy of iptables mode runs beside us and writes them again: stop it. They are removed every ten minutes"
    ),
    "leftover_rules_gone": "what one of the two lines before was about has ended",
    "leftover_rules_not_removed": (
        "such rules are there, or may be because they cannot be read: why. It is tried again with growing pauses; "
        "`ipvsproxy_leftover_rules` is 1 meanwhile"
    ),
    "leftover_rules_removed": (
        "rules of kube-proxy's iptables mode, or of ours in the variant of iptables that is not used, are gone: how "
        "many `jumps` and `chains`, and of which `rules`"
    ),
    "library_message": (
        "what a library that is used logs by itself, such as the Kubernetes client about an entry of the kubeconfig; "
        "the same text once in five minutes"
    ),
    "list_believed_again": "what `list_not_believed` or `first_list_not_believed` was about has ended",
    "list_not_believed": (
        "the API server no longer lists most Services or endpoints; they are served until a second list confirms it"
    ),
    "listed": "a kind of object is complete (`kind`, `objects`), or the directory was read",
    "load_balancers_turned_away": (
        "`/healthz` is 503 although all is in force: there is no Node object of this name (`--hostname-override`), or "
        "it is about to be removed"
    ),
    "load_balancers_welcome": "what `load_balancers_turned_away` was about has ended",
    "local_pods_unknown": (
        "`clusterCIDR` or `spec.podCIDRs` has no range of a family that is served: its traffic to cluster IPs is "
        "masqueraded as without local detection"
    ),
    "lock_held_by_other_process": ("a process that is no ipvsproxy has the name that keeps a second one away; it is passed by"),
    "manifests_unreadable": "the directory of manifests cannot be read; what is known from it stays served",
    "memory_left_to_c_library": "the C library has no mallopt, so the process may keep more memory than it needs",
    "no_configuration_file": "SIGHUP came, and there is no file to read again",
    "node_changed": "zone or addresses of the node changed; every Service is looked at again",
    "node_prepared": "of `--init-only`: how many settings there are, and how many were written or `failed`",
    "oom_score_not_set": "the kernel refused the OOM score, and why",
    "operation": "at `-v=4` each operation with its error; at `-v=2` those that remove addresses or write rules",
    "operation_failed": "the kernel refused something: what, and why. It is tried again after 1 s, then with growing pauses",
    "part_not_used": "a part of an object that is wrong: which, which field, why. The rest of it is served",
    "received": "at `-v=4`: what came from the watch or a file",
    "reload_failed": (
        "a changed configuration file cannot be put in force now: why, and which settings. The one before stays in "
        "force; it is tried again"
    ),
    "request_failed": "an HTTP request met an error of ours; the client got status 500",
    "restart_needed": "changed settings that count only after a restart",
    "rules_left_in_other_variant": (
        "rules of ours stand in the variant of iptables that is not used now: packets meet them, too. They are removed "
        "once ours are in force"
    ),
    "rules_not_writable_yet": "rules of this family could not be written when the process started; it is served, and they follow",
    "scheduler_not_found": (
        "of a command: the kernel has no module of the configured scheduler, so `rr` is expected, which `run` then uses"
    ),
    "scheduler_not_used": "the kernel has not got the configured scheduler: which one is `used`, and the `reason`",
    "server_cannot_listen": "the address is taken; tried again every 5 s",
    "server_listening": "an HTTP server has its address",
    "serves": "of a dry run: where one of its servers listens, beside kube-proxy's",
    "set_enlarged": "a set was nearly full; it is swapped for one with twice the `capacity`",
    "set_not_enlarged": "a nearly full set could not be swapped for a larger one, and why",
    "settings_without_effect": "flags and fields that are accepted and mean nothing here",
    "start_step_failed": "the start waits until the kernel answers; nothing is changed before",
    "start_step_waits": (
        "a step of the start has taken `after_s` seconds and still goes on: a program hangs, or the node is overloaded. Nothing "
        "is changed before it ends, and nothing listens for `/healthz`"
    ),
    "starting": "node name, scheduler, families that are served, iptables variant",
    "stopped": "the process ends",
    "synced": (
        "changes are in force: how many Services were looked at, `operations` done and `failed`, what is `pending` "
        "(wanted and not in force), connections' `draining` endpoints, duration in seconds"
    ),
    "traffic_counters_old": "a scrape shows the traffic of the scrape before, because the kernel was busy",
    "traffic_counters_unreadable": "IPVS's counters could not be read for a scrape, and why",
    "translated": "at `-v=4`: what a Service needs on this node",
    "verbosity_changed": "the `-v` that was put over HTTP",
    "waiting_for_first_lists": "which kinds are missing; nothing is programmed before that",
    "watch_failed": "a list or watch does not work, with what to check",
    "watch_no_longer_stale": "the API server is heard of again",
    "watch_restarting": "a list or watch is started again, as is part of its life",
    "watch_resumed": "it works again",
    "watch_stale": (
        "the API server has been silent for `--stale-watch-timeout` (15 min): what this node serves may be out of date"
    ),
}

KEYS: Mapping[str, Key] = {
    "address": Key("text", "where something listens, with its port"),
    "addresses": Key("list", "addresses of the node"),
    "after_s": Key("seconds", "how long something has taken by now"),
    "applied": Key("list", "settings that are in force now"),
    "before": Key("text", "the value before"),
    "capacity": Key("number", "how many entries a set takes"),
    "chains": Key("number", "chains that were removed"),
    "change": Key("text", "`put`, `deleted`, `listing`, `listed` or `rejected`"),
    "differences": Key("number", "kernel objects that differ"),
    "directory": Key("text", "the directory of manifests"),
    "draining": Key("number", "real servers that keep their connections and get no new ones"),
    "duration_s": Key("seconds", "how long it took"),
    "entries": Key("number", "entries of sets"),
    "errno": Key("number", "the kernel's error number"),
    "error": Key("text", "what failed, in the words of who refused"),
    "events": Key("number", "changes that a directory made"),
    "failed": Key("number", "operations that failed"),
    "families": Key("list", "`IPv4`, `IPv6`"),
    "family": Key("text", "`IPv4` or `IPv6`"),
    "field": Key("text", "the field of an object or of the configuration"),
    "file": Key("text", "the configuration file"),
    "files": Key("number", "manifests that were read"),
    "found": Key("text", "as it was found in the kernel"),
    "held_by": Key("text", "who has it"),
    "hint": Key("text", "what it means, or what to do: prose for people, which may change"),
    "iptables": Key("list", "variants in use: `nf_tables`, `legacy`"),
    "jumps": Key("number", "jumps that were removed"),
    "key": Key("text", "a virtual server: protocol, address and port"),
    "kind": Key("text", "kind of API object or of kernel object"),
    "known": Key("number", "objects that are known"),
    "library": Key("text", "who says it"),
    "lock": Key("text", "the name of a lock"),
    "message": Key("text", "what a library says"),
    "missing": Key("list or number", "kinds that are not listed yet; objects that a list lacks"),
    "name": Key("text", "an object, as `namespace/name`; a server; a key in the kernel"),
    "new": Key("number", "those that were not there at the look before"),
    "node": Key("text", "the name of the Node"),
    "notice": Key("text", "prose about the configuration"),
    "object": Key("text", "a kernel object"),
    "objects": Key("number", "objects of a list"),
    "operation": Key("text", "what was to be done in the kernel"),
    "operations": Key("number", "operations that were done"),
    "path": Key("text", "of a kernel setting below /proc/sys, or of an HTTP request"),
    "pending": Key("number", "kernel objects that differ from what is desired"),
    "reason": Key("text", "why, in a word or a sentence"),
    "retry_in_s": Key("seconds", "when it is tried again"),
    "rules": Key("text", "variant of iptables and family"),
    "scheduler": Key("text", "the IPVS scheduler in use"),
    "served": Key("text", "the Service that has it"),
    "server": Key("text", "an API server, or one of our HTTP servers"),
    "service": Key("text", "a Service, as `namespace/name`"),
    "services": Key("number", "Services that were looked at"),
    "set": Key("text", "the name of an ipset"),
    "settings": Key("list or number", "settings of the configuration, or of the kernel"),
    "silent_for_s": Key("seconds", "for how long nothing was heard"),
    "skipped": Key("list", "parts of a Service that are not used"),
    "step": Key("text", "a step of the start: `load_modules`, `choose_iptables_variant` or `open_kernel_sockets`"),
    "times": Key("number", "how often"),
    "untold": Key("number", "lines that were left out before this one"),
    "used": Key("text", "what is used instead"),
    "value": Key("text", "the value now"),
    "variant": Key("text", "`nf_tables` or `legacy`"),
    "verbosity": Key("number", "the `-v` in force"),
    "virtual_servers": Key("list", "virtual servers, with the number of their real servers"),
    "waiting": Key("list", "Services that wait"),
    "wanted": Key("text", "as it is desired or configured"),
    "wants": Key("text", "`nothing`: the Service needs nothing on this node"),
    "where": Key("text", "file, or source, that an object came from"),
    "why": Key("list", "the reason of each that waits"),
    "written": Key("number", "settings that were written"),
    "zone": Key("text", "the zone of the node"),
}

COUNTING = ("drift_found", "dry_run_looked")
"""The events that have a key for each kind of kernel object that they count."""
