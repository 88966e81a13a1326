"""GPU tests skip themselves where there is no GPU, and every run ends with the list of what was skipped and why."""

from __future__ import annotations

import os
from collections import defaultdict

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needs = {"gpu": 1, "multi_gpu": 2}
    marked = [(item, marker) for item in items for marker in needs if item.get_closest_marker(marker)]
    if not marked:
        return
    import torch  # takes seconds, so only where it decides something

    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item, marker in marked:
        if num_devices < needs[marker]:
            reason = f"needs {needs[marker]} CUDA devices, found {num_devices}" if num_devices else "no CUDA device"
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    tests_by_reason: dict[str, list[str]] = defaultdict(list)
    for report in terminalreporter.stats.get("skipped", []):
        # A skip carries (file, line, "Skipped: reason"); an expected failure carries a traceback and is not a skip.
        if isinstance(report.longrepr, tuple):
            tests_by_reason[report.longrepr[2].removeprefix("Skipped: ")].append(report.nodeid or report.longrepr[0])
    if not tests_by_reason:
        return
    terminalreporter.section("skipped tests")
    for reason, tests in sorted(tests_by_reason.items()):
        terminalreporter.write_line(f"{reason} ({len(tests)})")
        for test in sorted(os.path.relpath(test) if os.path.isabs(test) else test for test in tests):
            terminalreporter.write_line(f"    {test}")
