import asyncio

from rlhf_cluster.clock import SystemClock


def test_the_system_clock_measures_its_own_sleep():
    clock = SystemClock()
    before = clock.now()
    asyncio.run(clock.sleep(0.02))
    assert 0.02 <= clock.now() - before < 5
