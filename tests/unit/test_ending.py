"""Exit codes: 0 done, 1 failed with the first cause, 2 refused, 130/143 stopped by a signal."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import pytest

from rlhf_cluster.config_io import ConfigError
from rlhf_cluster.data.jsonl import DataError
from rlhf_cluster.diagnosis.preflight import PreflightError
from rlhf_cluster.ending import Signals, guard, hold_signals, run_async


def _raise(error: BaseException) -> Any:
    def action() -> None:
        raise error

    return action


@pytest.mark.parametrize(
    "error", [ConfigError("bad key"), DataError("x.jsonl", "0 rows", fix="Add one."), PreflightError("no folder")]
)
def test_what_is_refused_before_the_start_exits_2_with_one_message(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    assert guard(_raise(error)) == 2
    assert capsys.readouterr().out == f"error: {error}\n"


def test_a_failure_exits_1_and_names_the_first_cause(capsys: pytest.CaptureFixture[str]) -> None:
    group = ExceptionGroup(
        "tasks", [ExceptionGroup("inner", [RuntimeError("learner rank 1 died")]), ValueError("late")]
    )
    assert guard(_raise(group)) == 1
    assert "RuntimeError: learner rank 1 died" in capsys.readouterr().out


def test_success_exits_0() -> None:
    assert guard(lambda: None) == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_lets_the_run_finish_its_step_and_sets_the_exit_code(number: int, code: int) -> None:
    finished = []

    async def body(signals: Signals) -> None:
        stop = asyncio.Event()
        signals.on_first = stop.set
        asyncio.get_running_loop().call_later(0.01, os.kill, os.getpid(), number)
        await stop.wait()
        finished.append("saved")

    assert guard(lambda: run_async(body)) == code
    assert finished == ["saved"]


def test_a_signal_before_training_cancels_what_is_starting_and_still_cleans_up() -> None:
    cleaned = []

    async def body(signals: Signals) -> None:
        asyncio.get_running_loop().call_later(0.01, os.kill, os.getpid(), signal.SIGTERM)
        try:
            await asyncio.sleep(30)
        finally:
            cleaned.append("closed")

    assert guard(lambda: run_async(body)) == 143
    assert cleaned == ["closed"]


def test_the_echo_of_a_signal_is_no_second_one() -> None:
    """make and timeout pass Ctrl-C on to a child that the terminal told already."""
    finished = []

    async def body(signals: Signals) -> None:
        stop = asyncio.Event()
        signals.on_first = stop.set
        loop = asyncio.get_running_loop()
        loop.call_later(0.01, os.kill, os.getpid(), signal.SIGINT)
        loop.call_later(0.03, os.kill, os.getpid(), signal.SIGINT)
        await stop.wait()
        await asyncio.sleep(0.1)
        finished.append("saved")

    assert guard(lambda: run_async(body)) == 130
    assert finished == ["saved"]


def test_a_later_signal_ends_a_run_that_does_not_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_cluster.ending._SAME_SIGNAL_S", 0.02)

    async def body(signals: Signals) -> None:
        signals.on_first = lambda: None
        loop = asyncio.get_running_loop()
        loop.call_later(0.01, os.kill, os.getpid(), signal.SIGINT)
        loop.call_later(0.1, os.kill, os.getpid(), signal.SIGINT)
        await asyncio.sleep(30)

    assert guard(lambda: run_async(body)) == 130


def test_a_signal_outside_the_event_loop_ends_the_command_through_libraries_that_tolerate_failures() -> None:
    cleaned = []

    def action() -> None:
        try:
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(5)
            except Exception:
                cleaned.append("swallowed")
        finally:
            cleaned.append("closed")

    before = signal.getsignal(signal.SIGTERM)
    assert guard(action) == 143
    assert cleaned == ["closed"]
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_held_signals_wait_and_are_told_first_one_first(number: signal.Signals) -> None:
    with hold_signals() as held:
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
    assert held == [number, signal.SIGTERM]


def test_a_run_that_outlasts_its_grace_period_is_ended_where_it_stands(caplog: pytest.LogCaptureFixture) -> None:
    seen = []

    async def body(signals: Signals) -> None:
        signals.on_first = lambda: None
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            await asyncio.sleep(30)
        finally:
            seen.append(signals.expired)

    assert guard(lambda: run_async(body, grace_s=0.05)) == 143
    assert seen == [True]
    assert "0.05 s after SIGTERM the run has not ended" in caplog.text
