"""The schema of the JSON that the API server sends.

The tests of ``decode`` and ``parse`` show that each field is read by its name.
"""

import msgspec
import pytest

from ipvsproxy.translate.api import schema


@pytest.mark.parametrize(
    "shape",
    [schema.ServiceJson, schema.EndpointSliceJson, schema.NodeJson, schema.StatusJson, schema.AnyObject],
)
def test_a_null_field_counts_as_absent(shape: type[schema.Schema]) -> None:
    names = [field.encode_name for field in msgspec.structs.fields(shape)]
    assert msgspec.json.decode(msgspec.json.encode(dict.fromkeys(names)), type=shape) == shape()
