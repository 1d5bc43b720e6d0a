"""Time limit for user code in this process."""

import threading

import pytest

from lightning_ptdp.base.time_limit import time_limit


def _endless():
    while True:
        try:
            while True:
                pass
        except Exception:
            pass


def test_endless_loop_is_interrupted_in_any_thread():
    with pytest.raises(TimeoutError, match=r"not finished after 0\.05 s"), time_limit(0.05):
        _endless()
    said = []

    def work():
        try:
            with time_limit(0.05):
                _endless()
        except TimeoutError as error:
            said.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert said == ["not finished after 0.05 s"]


def test_code_within_time_limit_is_not_interrupted():
    for _ in range(50):
        with time_limit(60):
            value = sum(range(100))
    assert value == 4950
    with pytest.raises(KeyError), time_limit(60):
        raise KeyError("its own error")
