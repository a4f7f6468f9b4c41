"""The declarations of kinds of kernel objects."""

import typing

from ipvsproxy.model import sets
from ipvsproxy.model.kind import KINDS, DriverName, KernelKind
from ipvsproxy.model.plan import Item


def test_every_class_of_kernel_objects_has_a_kind_and_every_driver_has_at_least_one_kind() -> None:
    assert KINDS.keys() == set(typing.get_args(Item))
    assert {declared.driver for declared in KINDS.values()} == set(DriverName)


def test_a_kind_derives_its_singular_and_plural_from_its_name_by_default() -> None:
    made = KernelKind("device", DriverName.ADDRESSES)
    assert (made.one, made.several) == ("device", "devices")
    given = KINDS[sets.SetEntries]
    assert (given.name, given.one, given.several) == ("set_entry", "set entry", "set entries")
