"""The questions to the kernel, on fake sockets that answer as kernels of several versions do, and on the real one."""

import errno
import os
import pathlib
from collections.abc import Callable

import pytest

from ipvsproxy.kernel import questions
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.iptables.driver import Refusal
from ipvsproxy.kernel.questions import Answer
from ipvsproxy.model import basic_features, features
from ipvsproxy.model.feature import Feature
from tests.support import fake_netlink
from tests.support.old_kernel import OLD_KERNELS, OldSocket

LISTING = 1 << 8 | 1
PROTOCOL, TYPE = 6 << 8 | 1, 6 << 8 | 13
NEWEST_REVISIONS = {"hash:ip": 6, "hash:ip,port": 7, "hash:ip,port,ip": 6, "hash:ip,port,net": 8, "bitmap:port": 3}
"""Those of Linux 6.12."""


def answer(data: bytes) -> list[fake_netlink.Answer]:
    """The answers of Linux 6.12 to each question. A listing without a filter has one flow, and goes on."""
    ((_, kind, _, sequence, payload),) = fake_netlink.split(data)
    if kind == LISTING:
        has_filter = len(payload) > 4
        return [fake_netlink.error(sequence, errno.EINVAL) if has_filter else fake_netlink.message(sequence, bytes(24))]
    told = b""
    if kind == PROTOCOL:
        told = fake_netlink.attribute(1, b"\7") + fake_netlink.attribute(10, b"\6")
    elif kind == TYPE:
        name = next(name for name in NEWEST_REVISIONS if fake_netlink.attribute(3, name.encode() + b"\0") in payload)
        told = fake_netlink.attribute(3, name.encode() + b"\0")
        told += fake_netlink.attribute(4, bytes([NEWEST_REVISIONS[name]])) + fake_netlink.attribute(10, b"\0")
    return [fake_netlink.message(sequence, bytes(4) + told, kind=kind)]


def young(_protocol: int) -> fake_netlink.FakeSocket:
    return fake_netlink.FakeSocket(answer)


def old(version: str) -> Callable[[int], OldSocket]:
    return lambda protocol: OldSocket(young(protocol), OLD_KERNELS[version])


def proc_of(tmp_path: pathlib.Path, release: str) -> pathlib.Path:
    (tmp_path / "sys/kernel").mkdir(parents=True)
    (tmp_path / "sys/kernel/osrelease").write_text(f"{release}\n")
    return tmp_path


@pytest.mark.parametrize(
    ("connect", "release", "lacking"),
    [
        (young, "6.12.0", []),
        (old("5.4"), "5.4.0-216-generic", [features.ARRIVAL_BEHIND_IPVS, features.FILTERED_CONNECTIONS, features.PROMPT_REUSE]),
        (
            old("4.18"),
            "4.18.0",
            [
                features.FILTERED_ROUTES,
                features.ARRIVAL_BEHIND_IPVS,
                features.FILTERED_CONNECTIONS,
                features.PROMPT_REUSE,
            ],
        ),
        (old("5.4"), "5.5.0", [features.FILTERED_CONNECTIONS, features.PROMPT_REUSE]),
    ],
)
def test_a_start_finds_out_which_fall_backs_it_needs(
    connect: Callable[[int], fake_netlink.FakeSocket], release: str, lacking: list[Feature], tmp_path: pathlib.Path
) -> None:
    answers = questions.ask(connect, proc_of(tmp_path, release))  # type: ignore[arg-type]  # a double
    assert questions.lacking(answers) == lacking
    assert answers[basic_features.TRACKED_FLOWS].has, "no kernel of these is without it"


def test_a_start_asks_by_two_messages_and_one_option(tmp_path: pathlib.Path) -> None:
    opened: list[fake_netlink.FakeSocket] = []

    def connect(protocol: int) -> fake_netlink.FakeSocket:
        opened.append(young(protocol))
        return opened[-1]

    questions.ask(connect, proc_of(tmp_path, "6.12.0"))  # type: ignore[arg-type]  # a double
    assert sum(len(one.sent) for one in opened) == 2
    assert [len(one.options) for one in opened if one.options] == [1]
    assert all(one.closed for one in opened)


@pytest.mark.parametrize(("number", "is_there"), [(errno.EINVAL, False), (errno.EOPNOTSUPP, False), (errno.EPERM, None)])
def test_a_kernel_without_netlink_for_connections_is_told_from_one_that_did_not_say(
    number: int, *, is_there: bool | None, tmp_path: pathlib.Path
) -> None:
    def connect(_protocol: int) -> fake_netlink.FakeSocket:
        return fake_netlink.FakeSocket(lambda data: [fake_netlink.error(fake_netlink.sequences(data)[0], number)])

    answers = questions.ask(connect, proc_of(tmp_path, "6.1.0"))  # type: ignore[arg-type]  # a double
    assert (answers[basic_features.TRACKED_FLOWS].has, answers[features.FILTERED_CONNECTIONS].has) == (is_there, None)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP, errno.ERANGE])
def test_a_kernel_that_refuses_the_impossible_filter_has_filters(number: int, tmp_path: pathlib.Path) -> None:
    """Linux 5.10 answers EOPNOTSUPP (``ctnetlink_parse_filter``), 6.1 EINVAL, by its policy of masks."""

    def refusing(data: bytes) -> list[fake_netlink.Answer]:
        ((_, kind, _, sequence, _),) = fake_netlink.split(data)
        return [fake_netlink.error(sequence, number)] if kind == LISTING else answer(data)

    answers = questions.ask(lambda _: fake_netlink.FakeSocket(refusing), proc_of(tmp_path, "5.10.0"))  # type: ignore[arg-type, return-value]
    assert answers[features.FILTERED_CONNECTIONS].has


def test_a_lost_answer_and_a_version_that_cannot_be_read_prove_nothing(tmp_path: pathlib.Path) -> None:
    def connect(protocol: int) -> fake_netlink.FakeSocket:
        if not protocol:
            raise OSError(errno.EMFILE, "too many open files")
        return fake_netlink.FakeSocket(lambda _data: [])

    assert questions.lacking(questions.ask(connect, tmp_path)) == []  # type: ignore[arg-type]  # a double


@pytest.mark.parametrize("version", OLD_KERNELS)
def test_an_old_ipset_has_all_that_our_sets_need(version: str) -> None:
    answers = questions.of_ipset(old(version))
    assert {feature: answer.has for feature, answer in answers.items()} == {
        basic_features.SETS: True,
        basic_features.SETS_WITH_SCTP: True,
        basic_features.SETS_WITH_MARKS: True,
    }
    assert answers[basic_features.SETS_WITH_MARKS].remark == "revision 5 is the newest"


def test_an_ipset_that_does_not_answer_proves_nothing() -> None:
    answers = questions.of_ipset(lambda _protocol: fake_netlink.FakeSocket(lambda _data: []))
    assert answers.keys() == {basic_features.SETS}
    assert answers[basic_features.SETS].has is None


def test_a_refused_trial_of_nf_tables_tells_why() -> None:
    assert all(answer.has for answer in questions.of_nf_tables(None).values())
    refusal = Refusal("it has no chains of the type nat", is_certain=True)
    assert questions.of_nf_tables(refusal) == {features.NAT_IN_INET: Answer(has=False, remark=refusal.reason)}
    assert questions.of_nf_tables(refusal._replace(is_certain=False))[features.NAT_IN_INET].has is None


def test_nf_tables_is_asked_beside_iptables_only_where_it_is_loaded(tmp_path: pathlib.Path) -> None:
    def fail() -> Refusal | None:
        raise KernelError(action="try rules", detail="the answer is incomplete")

    unasked = questions.of_unused_nf_tables(fail, tmp_path)
    assert unasked.keys() == questions.of_nf_tables(None).keys()
    assert set(unasked.values()) == {Answer(None, "give --rules-backend=nftables to ask, which loads nf_tables")}
    (tmp_path / "sys/module/nf_tables").mkdir(parents=True)
    assert set(questions.of_unused_nf_tables(fail, tmp_path).values()) == {Answer(None, "try rules: the answer is incomplete")}
    assert questions.of_unused_nf_tables(lambda: None, tmp_path) == questions.of_nf_tables(None)
    refusal = Refusal("it has no chains of the type nat", is_certain=True)
    assert questions.of_unused_nf_tables(lambda: refusal, tmp_path) == questions.of_nf_tables(refusal)


def test_features_that_are_modules_are_as_the_files_of_the_host_show(tmp_path: pathlib.Path) -> None:
    assert {answer.has for answer in questions.of_modules(tmp_path).values()} == {None}, "no file is visible"
    directory = tmp_path / "lib/modules" / os.uname().release
    directory.mkdir(parents=True)
    (directory / "modules.builtin").write_text("kernel/drivers/net/dummy.ko\n")
    names = ("ip_vs", "ip_vs_mh", "xt_set", "xt_ipvs", "nf_conntrack_ipv4")
    (directory / "modules.dep").write_text("".join(f"kernel/net/{name}.ko.xz:\n" for name in names))
    (directory / "modules.alias").write_text(f"alias {questions.FAMILY_ALIAS} ip_vs\n")
    assert questions.of_modules(tmp_path) == {
        basic_features.IPVS: Answer(has=True),
        features.SCHEDULER_TWOS: Answer(has=False, remark="ip_vs_twos is missing"),
        basic_features.SCHEDULER_MH: Answer(has=True),
        basic_features.DUMMY_DEVICE: Answer(has=True),
        basic_features.RULE_MATCHES: Answer(has=False, remark="xt_physdev is missing"),
        features.ONE_CONNECTION_MODULE: Answer(has=False),
        features.SELF_LOADING: Answer(has=True),
    }
    proc_of(tmp_path / "proc", "4.19.0")
    assert questions.of_modules(tmp_path)[features.ONE_CONNECTION_MODULE] == Answer(has=True)
    (tmp_path / "proc/thread-self/net").mkdir(parents=True)
    (tmp_path / "proc/thread-self/net/ip_vs").write_text("")
    (directory / "modules.dep").write_text("")
    assert questions.of_modules(tmp_path)[basic_features.IPVS] == Answer(has=True), "the kernel has it, whatever the files say"
    (directory / "modules.dep").write_text("kernel/net/ip_vs.ko:\n")
    (directory / "modules.alias").write_text("alias net-pf-16-proto-16-family-other other\n")
    assert questions.of_modules(tmp_path)[features.SELF_LOADING] == Answer(has=False)


def test_settings_are_only_looked_for_while_their_module_is_there(tmp_path: pathlib.Path) -> None:
    assert questions.of_settings(tmp_path) == {}
    for name in ("net/ipv4/vs/conntrack", "net/ipv4/vs/expire_nodest_conn", "net/netfilter/nf_conntrack_max"):
        (tmp_path / "proc/sys" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "proc/sys" / name).write_text("0\n")
    answers = questions.of_settings(tmp_path)
    assert {feature: answer.has for feature, answer in answers.items()} == {
        basic_features.IPVS_CONNECTION_TRACKING: True,
        basic_features.REUSE_MODE: False,
        basic_features.EXPIRY_SETTINGS: False,
        basic_features.HOST_SETTINGS: False,
    }
    assert answers[basic_features.EXPIRY_SETTINGS].remark == "net.ipv4.vs.expire_quiescent_template is missing"
    assert "/sys/module/nf_conntrack/parameters/hashsize" in answers[basic_features.HOST_SETTINGS].remark


@pytest.mark.usefixtures("fresh_namespace")
def test_the_real_kernel_answers() -> None:
    answers = {**questions.ask(), **questions.of_ipset()}
    assert None not in {answer.has for answer in answers.values()}
