"""The chaos suite itself: the same seed gives the same history, a short one passes, and a broken kernel is told.

``scripts/chaos`` runs long ones; their figures are in ``docs/reliability.md``.
"""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos import kernel_state
from tests.chaos.world import Key, World

ROOT = Path(__file__).parents[2]


def test_a_seed_gives_the_same_history_again_and_another_one_another() -> None:
    def live(seed: int) -> list[object]:
        world = World(random.Random(seed))
        return [world.change() for _ in range(50)]

    assert live(1) == live(1)
    assert live(1) != live(2)


def test_what_is_put_and_deleted_adds_up_to_the_world() -> None:
    world = World(random.Random(3))
    objects = dict(world.objects)
    for _ in range(200):
        _, put, gone = world.change()
        objects |= {Key(item["kind"], item["metadata"]["name"]): item for item in put}
        for key in gone:
            del objects[key]
    assert objects == world.objects


def test_only_a_wanted_server_of_tcp_may_still_have_a_draining_real_server() -> None:
    servers = ["TCP 10.96.0.1:80", "UDP 10.96.0.1:53"]
    assert kernel_state.is_draining("TCP 10.96.0.1:80 -> 10.244.0.1:8080", {"weight": 0}, servers)
    assert not kernel_state.is_draining("TCP 10.96.0.1:80 -> 10.244.0.1:8080", {"weight": 1}, servers)
    assert not kernel_state.is_draining("TCP 10.96.0.2:80 -> 10.244.0.1:8080", {"weight": 0}, servers)
    assert not kernel_state.is_draining("UDP 10.96.0.1:53 -> 10.244.0.1:8053", {"weight": 0}, servers)


@pytest.mark.kernel
def test_a_short_history_passes() -> None:
    command = [sys.executable, "-m", "scripts.chaos_node", "--seed=7", "--histories=1", "--steps=4"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "violations                          0" in done.stdout
