"""docs/compatibility.md and docs/metrics.md are current and complete."""

import itertools
import pathlib
import re
from collections.abc import Iterator, Sequence

import pytest

import ipvsproxy.kernel
from ipvsproxy.commands.doctor import OLDEST
from ipvsproxy.config import catalogue, validate
from ipvsproxy.config.option import Likeness
from ipvsproxy.daemon.http.paths import SHOWN_PATHS
from ipvsproxy.daemon.metrics.series import ALL
from ipvsproxy.model.kernel import Sysctl
from ipvsproxy.translate import translation_settings
from ipvsproxy.translate.translation_settings import ConntrackChoices
from tests.support import golden_fixtures, reference_pages
from tests.test_monitoring import our_page

PROCESS = ("process_", "python_")
DOCS = pathlib.Path(__file__).parents[1] / "docs"
COMPATIBILITY = (DOCS / "compatibility.md").read_text()


@pytest.mark.parametrize("name", reference_pages.PAGES)
async def test_each_page_in_docs_has_the_tables_that_the_script_generates(name: str) -> None:
    generated = reference_pages.PAGES[name](await our_page())
    assert (DOCS / f"{name}.md").read_text() == generated, f"run scripts/compatibility {name}"


def test_the_compatibility_page_documents_every_flag_and_every_endpoint_and_every_status() -> None:
    text = COMPATIBILITY
    flags = [option.flag for options in catalogue.OPTIONS.values() for option in options if option.flag]
    assert [flag for flag in flags if f"-{flag}` |" not in text] == []
    assert [path for path in SHOWN_PATHS if f" | `{path}` | " not in text] == []
    assert [status for status in Likeness if f"\n- **{status}**: " not in text] == []


def test_the_compatibility_page_names_an_existing_test_for_each_change_in_kubernetes() -> None:
    section = COMPATIBILITY.partition("\n## Kubernetes ")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")][2:]
    names = [re.findall(r"`(tests/[^`]+)`", row[3]) for row in rows]
    untested = [row[1] for row, found in zip(rows, names, strict=True) if not found]
    # The deprecation of the IPVS mode needs no test, because ipvsproxy does not react to the deprecation.
    assert [one.partition(",")[0] for one in untested] == ["the IPVS mode is deprecated"]
    for name in itertools.chain(*names):
        path, _, test = name.partition("::")
        assert f"def {test}(" in (DOCS.parent / path).read_text() if test else (DOCS.parent / path).exists(), name


def test_the_metrics_page_has_every_recorded_series_of_kube_proxy() -> None:
    recorded = golden_fixtures.recording("default", "P0")["metrics"]
    text = (DOCS / "metrics.md").read_text()
    assert [name for name in {series.partition("{")[0] for series in recorded} if f"`{name}`" not in text] == []


async def test_metrics_are_served_with_the_declared_names_types_and_labels() -> None:
    declared = {one.name: one for one in reference_pages.declared()}
    shown = {one.name: one for one in reference_pages.series(await our_page()) if not one.name.startswith(PROCESS)}
    late = {one.name for one in ALL if one.is_late}
    assert shown.keys() == declared.keys() - late
    for name, one in shown.items():
        assert one == declared[name]._replace(labels=one.labels)
        assert one.labels in (declared[name].labels, ()), "a metric without series has no labels"
        assert one.meaning


# The following tests check the section "Kernels" of docs/compatibility.md. It must name every kernel feature that the drivers
# use, and its tables must agree with each other.

KERNELS, YOUNG, BASIC = (
    [line.strip("| ").split(" | ") for line in lines.splitlines()[2:]]
    for lines in re.findall(r"((?:^\|.*\n)+)", COMPATIBILITY.partition("\n## Kernels\n")[2], re.MULTILINE)
)
"""The rows of three tables: the kernels, the features that some of these kernels lack, and the features that all of them have."""
ATTRIBUTE = re.compile(r'"((?:IPVS_(?:SVC|DEST)|IPSET|CTA|RTA|IFLA|IFA|CTRL)_[A-Z0-9_]+)"')
"""Matches the names that pyroute2 gives to netlink attributes, in quotation marks. Names with ``CTRL_ATTR`` are attributes of
generic netlink itself."""
NUMBER = re.compile(r"\b((?:IPVS_CMD|NFTA|NFT_MSG|NFNLGRP)_[A-Z0-9_]*[A-Z0-9])\b")
"""The names of numbers that the drivers encode: commands of IPVS, and attributes, messages and groups of nf_tables."""


def parts(row: Sequence[str]) -> Iterator[str]:
    """The names in the third cell of a row of the table of kernel features.

    A name that begins with an underscore is abbreviated: it lacks its beginning, which is the beginning of the preceding name.
    """
    beginning = ""
    for name in re.findall(r"`([^`]+)`", row[2]):
        whole = beginning + name if name.startswith("_") else name
        found = re.fullmatch(r"(\w+_ATTR|IPVS_CMD|NFT_MSG|NFTA_[A-Z]+)(_\w+)", whole)
        beginning = found[1] if found else ""
        yield whole


PARTS = {part for row in (*YOUNG, *BASIC) for part in parts(row)}


def version(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.match(r"[\d.]+", text)[0].split(".")))  # type: ignore[index]


def test_each_kernel_feature_in_the_table_has_a_source_and_the_consequence_of_its_absence() -> None:
    assert len(YOUNG) == 10
    for row in (*YOUNG, *BASIC):
        assert len([cell for cell in row if cell.strip()]) == 8, row[0]
        assert row[7].startswith(("fall-back: ", "refused: ")), row[0]


def test_the_table_of_kernels_agrees_with_the_kernel_version_of_each_feature() -> None:
    versions = [version(kernel) for kernel, *_ in KERNELS]
    assert versions == sorted(versions)
    assert versions[0] == OLDEST
    for kernel, *cells in KERNELS:
        has = ["yes" if version(row[4]) <= version(kernel) else row[7].partition(":")[0] for row in YOUNG]
        assert cells == has, kernel
    assert all(version(row[4]) <= OLDEST for row in BASIC)


def test_every_netlink_attribute_that_a_driver_uses_is_in_the_table_of_kernel_features() -> None:
    (folder,) = ipvsproxy.kernel.__path__
    named = {
        name
        for file in pathlib.Path(folder).rglob("*.py")
        for one in (ATTRIBUTE, NUMBER)
        for name in one.findall(file.read_text())
    }
    assert named >= {"IPVS_SVC_ATTR_AF", "IPSET_ATTR_ADT", "CTA_FILTER", "RTA_DST", "IFA_LOCAL", "IPVS_CMD_NEW_DEST"}
    assert named >= {"NFTA_SET_KEY_LEN", "NFT_MSG_NEWRULE", "NFNLGRP_NFTABLES"}
    assert sorted(named - PARTS) == []


def test_every_kernel_setting_that_ipvsproxy_writes_is_in_the_table_of_kernel_features() -> None:
    choices = ConntrackChoices(
        max_per_core=1,
        tcp_established_timeout_s=1,
        tcp_close_wait_timeout_s=1,
        tcp_be_liberal=True,
        udp_timeout_s=1,
        udp_stream_timeout_s=1,
    )
    written = (*translation_settings.ipvs_sysctls((5, 4), strict_arp=True), *translation_settings.conntrack_sysctls(choices, 4))
    chosen = tuple(Sysctl(f"net/ipv4/vs/{name}", "0") for name in validate.IPVS_SYSCTLS)
    paths = {one.path if one.path.startswith("/") else one.path.replace("/", ".") for one in (*written, *chosen)}
    assert len(paths) == 18
    assert sorted(paths - PARTS) == []
