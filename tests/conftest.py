"""What every test runs under: no network, one torch thread, no DTORCH_* variables, repeatable properties in CI."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

# Before anything imports transformers or dtorch.
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
for variable in [name for name in os.environ if name.startswith("DTORCH_") and name != "DTORCH_ACCEPT"]:
    del os.environ[variable]
sys.path.insert(0, str(Path(__file__).parent))

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

torch.set_num_threads(1)

settings.register_profile("local", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("local"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked cuda where there is no device."""
    if not torch.cuda.is_available():
        for item in items:
            if "cuda" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_workers_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that started worker processes and failed must not leave them to the tests after it."""
    yield
    session = sys.modules.get("dtorch.runtime.session")
    if session is not None and "workers" not in request.fixturenames:
        session.SESSION.shutdown()
