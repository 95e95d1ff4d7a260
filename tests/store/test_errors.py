"""Media that fail and callers that crowd: no error and no wrong byte reaches anybody."""

import errno
import random
import threading
import time
from contextlib import contextmanager

import pytest

from headstart.keys import keys_from_hashes
from headstart.testing import BLOCK_NBYTES, kit_namespace
from headstart.testing.ledger import payload
from headstart.types import Outcome

DONE, FULL, ORPHAN = Outcome.DONE, Outcome.FULL, Outcome.ORPHAN
SOON = 10.0
SLOT = 4096 + BLOCK_NBYTES
NAMESPACE = kit_namespace()


def chain(path, namespace=NAMESPACE):
    return keys_from_hashes(namespace, [content.encode() for content in path])


def blocks_of(run):
    return [payload(run.namespace, key, 0, run.block_nbytes) for key in run]


# ------------------------------------------------------------------------------------------- errors


@contextmanager
def failing(world, error):
    """Every read and write of the file tier fails."""
    volume = world.file.volume

    class Broken:
        capacity_nbytes, direct = volume.capacity_nbytes, volume.direct
        close = staticmethod(volume.close)

        def read(self, offset, buffers):
            raise error

        write = read

    world.file.volume = Broken()
    yield
    world.file.volume = volume


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EIO, "Input/output error"),
        OSError(errno.ENOSPC, "No space left"),
        RuntimeError(),
    ],
    ids=["EIO", "ENOSPC", "a bug"],
)
def test_no_error_of_a_medium_reaches_the_caller(make, error):
    world = make(memory_blocks=8)
    world.put("abcd")
    world.forget_memory()
    with failing(world, error):
        assert world.get("abcd") == 0
        world.put("wxyz")
        assert world.get("wxyz") == 4
        for number in range(20):
            world.put([f"r{number}"])
        world.store.flush(SOON)
        world.get("abcd")
        world.store.lookup(chain("abcd"))
        world.store.discard(chain("wx"))
        if isinstance(error, OSError):
            assert not world.store.verify()[1].good
            assert world.store.stats().tiers["file0"].num_failed > 0
    world.settled()
    assert world.get("abcd") == 4, "it was only unreachable"


def test_the_second_tier_serves_when_the_first_fails(make):
    world = make(num_files=2)
    world.put("abcd")
    world.forget_memory()
    broken = failing(world, OSError(errno.EIO, "Input/output error"))
    with broken, world.store.load(chain("abcd")) as lease:
        world.check(lease)
        assert lease.by_tier == {"memory": 0, "file0": 0, "file1": 4}


# ------------------------------------------------------------------------------------------ threads


def test_many_callers_at_once(make):
    """Loads, stores and discards of common prefixes; every byte that comes out is checked."""
    world = make(memory_blocks=24, file_blocks=48)
    stop = time.monotonic() + 2.0
    failures = []

    def call(seed):
        choose = random.Random(seed)
        try:
            while time.monotonic() < stop:
                path = [f"t{choose.randrange(3)}", *choose.choices("ab", k=choose.randint(0, 5))]
                what = choose.random()
                if what < 0.5:
                    world.get(path, timeout_s=choose.choice([None, 0.0005, 0.01]))
                elif what < 0.9:
                    run = chain(path)
                    world.store.store(run, blocks_of(run))
                elif what < 0.95:
                    world.store.discard(chain(path).run(len(path) - 1, len(path)))
                elif what < 0.98:
                    world.store.flush(0.01)
                else:
                    world.store.lookup(chain(path))
        except BaseException as error:  # noqa: BLE001 - shown by the test
            failures.append(error)

    callers = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(20 + SOON)
    assert not any(caller.is_alive() for caller in callers), "a caller hangs"
    assert failures == []
    world.settled()
    assert world.file.stats().num_dropped == 0
    assert all(report.good for report in world.store.verify())
