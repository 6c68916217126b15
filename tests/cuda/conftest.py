"""What tests of GPUs need. They are skipped where there is none.

``pytest tests/cuda --device cpu`` runs those that are the same on a CPU, to try the tests themselves.
"""

from collections.abc import Iterator

import pytest
import torch
from gpu_models import free_unused_memory


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("cuda", "cpu"), default="cuda", help="where tests/cuda runs")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A run in which every test was skipped has tested nothing."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and not {"passed", "failed", "error", "xfailed"} & reporter.stats.keys():
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The device to test, without the rounding of TF32."""
    device = torch.device(request.config.getoption("--device", "cuda"))
    if device.type == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    yield device
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


@pytest.fixture
def gpu(device: torch.device) -> torch.device:
    """A GPU whose memory and streams are looked at."""
    if device.type != "cuda":
        pytest.skip("says nothing on a CPU")
    free_unused_memory()
    return torch.device("cuda", 0)


@pytest.fixture
def two_devices(device: torch.device) -> list[torch.device]:
    """Those of two ranks."""
    if device.type == "cpu":
        return [device] * 2
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    return [torch.device("cuda", index) for index in range(2)]
