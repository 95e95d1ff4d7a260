"""How many bytes in flight a device needs, measured on devices that are made up."""

import threading
import time

import pytest

from headstart.inflight import measure_inflight_nbytes
from headstart.transfer import DEFAULT_INFLIGHT_NBYTES

ITEM = 4096


class Device:
    """Reads take 2 ms; from `readers` at once on, each more slows all of them down."""

    direct = True

    def __init__(self, readers, capacity_nbytes=1 << 20):
        self.readers, self.capacity_nbytes = readers, capacity_nbytes
        self.offsets = set()
        self._lock = threading.Lock()
        self._num_reading = 0

    def read(self, offset, buffers):
        with self._lock:
            self.offsets.add(offset)
            self._num_reading += 1
            seconds = 0.002 * max(1.0, self._num_reading / self.readers) ** 2.5
        time.sleep(seconds)
        with self._lock:
            self._num_reading -= 1
        return sum(map(len, buffers))


def measured(device, *, num_buffers=32, seconds=0.04):
    memory = memoryview(bytearray(num_buffers * ITEM))
    return measure_inflight_nbytes(device, memory, item_nbytes=ITEM, seconds=seconds)


def test_a_device_that_is_soon_busy_gets_few():
    assert measured(Device(readers=4)) <= 8 * ITEM


def test_a_device_that_takes_many_gets_many():
    assert measured(Device(readers=100)) >= 16 * ITEM


def test_reads_stay_within_the_device():
    device = Device(readers=4, capacity_nbytes=8 * ITEM)
    measured(device, seconds=0.01)
    assert all(offset % ITEM == 0 and 0 <= offset < 8 * ITEM for offset in device.offsets)
    assert len(device.offsets) > 1


def test_an_error_of_the_device_is_told():
    class Broken(Device):
        def read(self, offset, buffers):
            raise OSError(5, "Input/output error")

    with pytest.raises(OSError):
        measured(Broken(readers=4), seconds=0.01)


@pytest.mark.parametrize(("num_items", "num_buffers"), [(1, 32), (100, 3), (0, 0)])
def test_too_little_to_measure_with_gets_the_default(num_items, num_buffers):
    device = Device(readers=4, capacity_nbytes=num_items * ITEM)
    assert measured(device, num_buffers=num_buffers) == DEFAULT_INFLIGHT_NBYTES
    assert not device.offsets
