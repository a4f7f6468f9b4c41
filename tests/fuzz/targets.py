"""The fuzz targets, keyed by name. Each target is a function of bytes that raises an exception if a property does not hold."""

from collections.abc import Callable, Mapping

from tests.fuzz import api, configuration, kernel_answers, rules

TARGETS: Mapping[str, Callable[[bytes], None]] = {
    "decoder": api.decoder,
    "config": configuration.config,
    "netlink": kernel_answers.netlink_answers,
    "iptables_save": kernel_answers.iptables_save,
    "rules": rules.rules,
}
