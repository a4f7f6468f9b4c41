"""The table of features is whole and in order."""

import pytest

from ipvsproxy.model import features
from ipvsproxy.model.features import Feature, Without


def test_every_feature_stands_once_under_its_name() -> None:
    declared = [one for one in vars(features).values() if isinstance(one, Feature)]
    assert sorted(declared) == sorted(features.FEATURES)
    assert len({one.name for one in features.FEATURES}) == len(features.FEATURES)


def test_young_features_come_first_by_age() -> None:
    young = list(features.young())
    assert list(features.FEATURES[: len(young)]) == young == sorted(young, key=lambda one: one.since)


@pytest.mark.parametrize("feature", features.FEATURES, ids=lambda one: one.name)
def test_every_feature_tells_its_source_and_what_happens_without_it(feature: Feature) -> None:
    assert all((feature.words, feature.use, feature.source, feature.asked, feature.sentence))
    assert feature.is_dated or not feature.is_young, "the version of what a kernel may be too old for must have been looked up"


def test_rows_go_from_the_oldest_kernel_to_the_newest() -> None:
    versions = [row.version for row in features.ROWS]
    assert versions == sorted(versions)
    assert versions[0] == features.OLDEST
    assert features.row_of((4, 4)) is None
    assert features.row_of((5, 13)) == features.ROWS[2]


def test_what_is_refused_on_an_old_kernel_concerns_one_choice_of_the_operator() -> None:
    refused = [one for one in features.young() if one.without is Without.REFUSED]
    assert [one.use for one in refused] == ["`--rules-backend=nftables`"]
