"""The processes that pools of rewards and environments start."""

from __future__ import annotations

import contextlib
import os

import psutil

from megarl.rewards import pool


def processes() -> list[psutil.Process]:
    """Every process of this test's pools: found by what the pool puts into their environment. The test has set
    MEGARL_TEST to its process's number."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            environment = process.environ()
            is_ours = environment.get("MEGARL_TEST") == str(os.getpid()) and pool._MARK in environment
            if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
