"""The worked examples in the docstrings are true."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

from megarl import algorithms

MODULES = sorted(module.name for module in pkgutil.iter_modules(algorithms.__path__))


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    assert doctest.testmod(importlib.import_module(f"megarl.algorithms.{name}")).failed == 0
