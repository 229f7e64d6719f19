"""Awaitables at the same time, all of them or none."""

import asyncio

import pytest

from genlm_backend.runtime.together import together


async def test_first_failure_is_raised_unwrapped_after_the_others_have_ended():
    ended = []

    async def fail():
        raise ZeroDivisionError("mine")

    async def wait():
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    async with asyncio.timeout(5):
        with pytest.raises(ZeroDivisionError, match="mine"):
            await together([wait(), fail(), wait()])
        assert ended == [True, True]


async def test_cancelling_together_cancels_all_awaitables():
    ended = []

    async def wait():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    task = asyncio.create_task(together([wait(), wait()]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [True, True]
