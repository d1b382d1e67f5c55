"""The arena's slots: never two users of a byte, neighbours are merged, a full arena waits."""

from hypothesis import given
from hypothesis import strategies as st

from dtorch.runtime.memory import ALIGNMENT, Arena, Slots


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 900)), max_size=60))
def test_slots_never_overlap_and_all_come_back(steps):
    slots, used = Slots(4096), []

    def give_one():
        slots.give(*used.pop(0))

    for take, length in steps:
        if take:
            offset = slots.take(length, give_one)
            end = offset + length
            assert end <= 4096 and offset % ALIGNMENT == 0
            assert all(end <= other or other + size <= offset for other, size in used)
            used.append((offset, length))
        elif used:
            slots.give(*used.pop(length % len(used)))
    while used:
        give_one()
    assert slots.free_bytes == 4096 and slots.take(4096, lambda: 1 / 0) == 0


def test_two_maps_of_an_arena_share_bytes():
    import os

    one = Arena(1 << 20)
    other = Arena(0, os.dup(one.fd))
    one.view(128, 4).fill_(7)
    assert other.view(128, 4).tolist() == [7, 7, 7, 7]
    for bad in ((-1, 4), (1 << 20, 1), (0, -1)):
        try:
            one.view(*bad)
        except ValueError:
            continue
        raise AssertionError(bad)
    other.close()
    one.close()
