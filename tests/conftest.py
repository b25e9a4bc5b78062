"""One thread, fixed seeds, no network: what every test runs under."""

from __future__ import annotations

import os
import random
import signal
import socket
from collections.abc import Iterator
from ipaddress import ip_address

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)

# A background job of a script starts with SIGINT ignored, nohup with SIGHUP, and what the tests
# start would inherit that.
for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
    if signal.getsignal(number) is signal.SIG_IGN:
        interrupts = number is signal.SIGINT
        signal.signal(number, signal.default_int_handler if interrupts else signal.SIG_DFL)

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _loopback_only() -> Iterator[None]:
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: object) -> None:
        if self.family != socket.AF_UNIX and not _is_loopback(str(address[0])):
            raise PermissionError(f"a test tried to reach {address[0]}")
        connect(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", guarded)
        yield


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
