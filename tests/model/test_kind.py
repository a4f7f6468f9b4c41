"""The declarations of kinds of kernel objects."""

import typing

import pytest

from ipvsproxy.model import kind, sets
from ipvsproxy.model.kind import DriverName, Kind, Stage
from ipvsproxy.model.plan import KINDS, Item, Verb


@pytest.mark.parametrize("described", typing.get_args(Item))
def test_every_class_of_kernel_objects_has_a_stage_for_each_of_its_verbs(described: type) -> None:
    declared = KINDS[described]
    assert declared is kind.of(described)
    assert declared.stages
    assert set(declared.stages) <= {verb.value for verb in Verb}


def test_every_driver_and_every_stage_belongs_to_a_kind() -> None:
    assert {declared.driver for declared in KINDS.values()} == set(DriverName)
    by_set = {Stage.SOURCE_RANGES, Stage.FIREWALL_ENTRIES, Stage.FIREWALL_REMOVALS, Stage.MARKS, Stage.MARK_REMOVALS}
    assert {stage for declared in KINDS.values() for stage in declared.stages.values()} == set(Stage) - by_set


def test_words_for_people_default_to_the_name() -> None:
    made = Kind("device", DriverName.ADDRESSES, add=Stage.DEVICE)
    assert (made.one, made.several) == ("device", "devices")
    given = kind.of(sets.SetEntries)
    assert (given.name, given.one, given.several) == ("set_entry", "set entry", "set entries")


def test_a_class_without_a_declaration_has_no_kind() -> None:
    with pytest.raises(KeyError):
        kind.of(sets.SetEntry)
