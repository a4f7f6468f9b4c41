"""Checks that the soak test reports growth but not fluctuation, and that its cluster never becomes empty."""

import os
import random
import socket
from pathlib import Path

from tests.chaos import soak, usage
from tests.chaos.usage import Usage
from tests.chaos.world import Key, Object, key_of

CALM = Usage(resident_mb=100, descriptors=17, sockets=13, listening=4, threads=5, tasks=14, processor_s=1)


def test_a_descriptor_that_is_opened_and_closed_again_does_not_count_as_growth() -> None:
    busy = CALM._replace(descriptors=18, sockets=14)
    assert soak.growth([CALM, CALM, busy] * 9) == []


def test_resources_whose_usage_grows_are_reported() -> None:
    leaking = [
        CALM._replace(resident_mb=100 + number, descriptors=17 + number // 4, tasks=14 + number // 4) for number in range(30)
    ]
    assert [line.split(" grew ")[0] for line in soak.growth(leaking)] == ["resident memory", "descriptors", "tasks"]


def test_growth_in_the_first_third_of_the_samples_does_not_count() -> None:
    assert soak.growth([CALM._replace(resident_mb=60), *[CALM] * 5]) == []


def test_too_few_samples_do_not_prove_that_usage_stays_constant() -> None:
    assert soak.growth([CALM, CALM]) == ["there are too few samples to tell"]


def test_the_usage_of_a_process_has_its_descriptors_and_memory_and_tasks(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks"
    tasks.write_text("3")
    before = usage.read(os.getpid(), tasks)
    with tasks.open():
        after = usage.read(os.getpid(), tasks)
    assert after.descriptors == before.descriptors + 1
    assert 5 < before.resident_mb < 5000
    assert (before.tasks, usage.read(os.getpid(), tmp_path / "none").tasks) == (3, -1)


def test_listening_sockets_are_counted_separately_because_their_number_depends_on_the_services(tmp_path: Path) -> None:
    before = usage.read(os.getpid(), tmp_path / "none")
    with socket.create_server(("127.0.0.1", 0)) as server:
        after = usage.read(os.getpid(), tmp_path / "none")
        assert usage.listening_ports(os.getpid()) >= {server.getsockname()[1]}
    assert (after.listening, after.sockets, after.descriptors) == (before.listening + 1, before.sockets, before.descriptors)
    assert soak.growth([CALM] * 6 + [CALM._replace(listening=9)] * 3) == []


def test_churn_keeps_most_services_and_each_remaining_service_has_an_endpoint_slice() -> None:
    churn = soak.Churn(random.Random(1), services=40, endpoints=10)
    objects: dict[Key, Object] = {key_of(item): item for item in churn.objects()}
    assert len(objects) == 80
    fewest = 80
    for _ in range(5000):
        put, gone = churn.change()
        objects |= {key_of(item): item for item in put}
        for key in gone:
            del objects[key]
        fewest = min(fewest, len(objects))
        assert len(put) + len(gone) > 0
    assert 40 < fewest < 80
    assert {key.name for key in objects if key.kind == "Service"} == {
        item["metadata"]["labels"]["kubernetes.io/service-name"] for key, item in objects.items() if key.kind != "Service"
    }
