"""The table of features is whole and in order, and names all that the drivers use."""

import pathlib
import re

import pytest

import ipvsproxy.kernel
from ipvsproxy.model import basic_features, features
from ipvsproxy.model.feature import OLDEST, Feature, Without
from ipvsproxy.translate.node import sysctls
from ipvsproxy.translate.node.sysctls import ConntrackChoices

PARTS = {part for feature in features.FEATURES for part in feature.parts}
ATTRIBUTE = re.compile(r'"((?:IPVS_(?:SVC|DEST)|IPSET|CTA|RTA|IFLA|IFA|CTRL)_[A-Z0-9_]+)"')
"""The names of attributes by which pyroute2 encodes them. ``CTRL_ATTR`` is generic netlink's own."""
UNUSED = {"IPVS_CMD_ATTR_UNSPEC", "IPVS_CMD_ATTR_DAEMON"}
"""Attributes that only keep the places of others."""
NUMBER = re.compile(r"\b((?:IPVS_CMD|NFTA|NFT_MSG|NFNLGRP)_[A-Z0-9_]*[A-Z0-9])\b")
"""The names of numbers: commands of IPVS, and what is encoded here for nf_tables."""


def test_every_feature_stands_once_under_its_name() -> None:
    declared = [one for module in (features, basic_features) for one in vars(module).values() if isinstance(one, Feature)]
    assert sorted(declared) == sorted(features.FEATURES)
    assert len({one.name for one in features.FEATURES}) == len(features.FEATURES)


def test_young_features_go_by_age_and_no_other_one_is_younger_than_the_oldest_kernel() -> None:
    assert list(features.YOUNG) == sorted(features.YOUNG, key=lambda one: one.since)
    assert all(one.is_young for one in features.YOUNG)
    assert not any(one.is_young for one in basic_features.BASIC)


@pytest.mark.parametrize("feature", features.FEATURES, ids=lambda one: one.name)
def test_every_feature_tells_its_source_and_what_happens_without_it(feature: Feature) -> None:
    assert all((feature.words, feature.parts, feature.use, feature.source, feature.asked, feature.sentence))
    assert feature.is_dated or not feature.is_young, "the version of what a kernel may be too old for must have been looked up"


def test_every_attribute_that_a_driver_names_stands_in_the_table() -> None:
    (folder,) = ipvsproxy.kernel.__path__
    named = {
        name
        for file in pathlib.Path(folder).rglob("*.py")
        for one in (ATTRIBUTE, NUMBER)
        for name in one.findall(file.read_text())
    }
    assert named >= {"IPVS_SVC_ATTR_AF", "IPSET_ATTR_ADT", "CTA_FILTER", "RTA_DST", "IFA_LOCAL", "IPVS_CMD_NEW_DEST"}
    assert named >= {"NFTA_SET_KEY_LEN", "NFT_MSG_NEWRULE", "NFNLGRP_NFTABLES"}
    assert sorted(named - PARTS - UNUSED) == []


def test_every_setting_that_is_written_stands_in_the_table() -> None:
    choices = ConntrackChoices(
        max_per_core=1,
        tcp_established_timeout_s=1,
        tcp_close_wait_timeout_s=1,
        tcp_be_liberal=True,
        udp_timeout_s=1,
        udp_stream_timeout_s=1,
    )
    written = (*sysctls.ipvs_sysctls((5, 4), strict_arp=True), *sysctls.conntrack_sysctls(choices, 4))
    paths = {one.path if one.path.startswith("/") else one.path.replace("/", ".") for one in written}
    assert len(paths) == 14
    assert sorted(paths - PARTS) == []


def test_rows_go_from_the_oldest_kernel_to_the_newest() -> None:
    versions = [row.version for row in features.ROWS]
    assert versions == sorted(versions)
    assert versions[0] == OLDEST
    assert features.row_of((4, 4)) is None
    assert features.row_of((5, 13)) == features.ROWS[2]


def test_what_is_refused_on_an_old_kernel_concerns_one_choice_of_the_operator() -> None:
    refused = [one for one in features.YOUNG if one.without is Without.REFUSED]
    assert [one.use for one in refused] == ["`--rules-backend=nftables`"]
