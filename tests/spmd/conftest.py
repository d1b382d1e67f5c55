"""Tests of this folder start real worker processes: one set for each test process, ended with it."""

import sys

import pytest

import dtorch


def pytest_collection_modifyitems(items):
    if sys.platform != "linux":
        for item in items:
            if "spmd" in str(item.path):
                item.add_marker(pytest.mark.skip(reason="workers run on Linux"))


@pytest.fixture(scope="module")
def workers():
    """Meshes made while the module's tests run are real processes; workers start when a mesh needs them."""
    dtorch.init(workers="process")
    yield
    dtorch.shutdown()


@pytest.fixture
def fresh_workers():
    """Two workers of the test's own, which it may harm."""
    dtorch.shutdown()
    dtorch.init(workers="process", devices=2)
    yield
    dtorch.shutdown()
