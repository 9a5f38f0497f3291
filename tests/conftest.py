"""Fixtures and hooks of all tests."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from fedstill.cli import main as cli
from fedstill.report import figures
from tests.support.golden import Golden
from tests.support.my_lab import Lab, install

# The same examples in every run, so that failures in continuous integration are reproducible.
hypothesis.settings.register_profile("fedstill", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("fedstill")
# pytest --hypothesis-profile=thorough
hypothesis.settings.register_profile(
    "thorough", hypothesis.settings.get_profile("fedstill"), max_examples=200
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select the tests that run by default, and run tests that wait first: one worker runs them while the
    others compute."""
    is_named = any("::" in word for word in config.args) or config.option.keyword
    if not config.getoption("all_tests") and not is_named:
        by_function: dict[str, list[pytest.Item]] = {}
        for item in items:
            by_function.setdefault(item.nodeid.partition("[")[0], []).append(item)
        kept = {item for cases in by_function.values() for item in _default_cases(cases)}
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]
    items.sort(key=lambda item: item.get_closest_marker("waits") is None)


def pytest_collection_finish() -> None:
    """Exclude modules and collected tests, which live to the end, from the garbage collector's visits."""
    gc.freeze()


def _default_cases(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Return the cases of one test function that run by default: none, some or all of them.

    Those of ``sample(n)`` are n cases at equal distances, the first one among them.
    """
    if cases[0].get_closest_marker("slow"):
        return []
    sample = cases[0].get_closest_marker("sample")
    if sample is None or sample.args[0] >= len(cases):
        return cases
    return [cases[index * len(cases) // sample.args[0]] for index in range(sample.args[0])]


@pytest.fixture
def steady_adam(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adam with a large eps, for tests that compare networks trained in two ways.

    By default, Adam makes a full step for any gradient, however small. Where the true gradient is 0, it
    follows rounding noise, whose sign depends on the processor. An eps far above that noise (1e-8) and below
    real gradients (1e-2 and more) leaves such weights unchanged, so that tolerances can be small.
    """
    from torch.optim import Adam

    made = Adam.__init__

    def steady(self: Adam, params: Any, lr: float = 1e-3, **options: Any) -> None:
        made(self, params, lr, **{"eps": 1e-3, **options})

    monkeypatch.setattr(Adam, "__init__", steady)


@pytest.fixture(autouse=True)
def one_width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw a page's figures for one width instead of three, except in tests marked ``all_widths``.

    Drawing for all widths takes longer than the small runs of most tests.
    """
    if request.node.get_closest_marker("all_widths") is None:
        monkeypatch.setattr(figures, "WIDTHS", figures.WIDTHS[:1])


@pytest.fixture
def command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """Run the command line in this process without a terminal; return its exit code, stdout and stderr."""
    monkeypatch.delenv("COLUMNS", raising=False)  # pytest-xdist sets it

    def call(*words: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exit_info:
            cli.main([str(word) for word in words])
        captured = capsys.readouterr()
        assert isinstance(exit_info.value.code, int)
        return exit_info.value.code, captured.out, captured.err

    return call


@pytest.fixture
def golden(pytestconfig: pytest.Config) -> Golden:
    """Compare a text with a file of ``tests/golden``."""
    return Golden(pytestconfig.getoption("--update-golden"))


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder in which a lab's own package is installed."""
    return install(tmp_path_factory.mktemp("my_lab"))


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """A Ray cluster of this machine, to which this process is connected."""
    ray = pytest.importorskip("ray")
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    folder = tempfile.mkdtemp(prefix="ray-")  # a short path, as those of sockets are limited
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        _temp_dir=folder,
    )
    yield ray
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def lab(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """A lab's folder; each test file has its own."""
    return Lab(tmp_path_factory.mktemp("lab"), installed)
