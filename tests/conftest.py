"""Fixtures and hooks of all tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from fedstill.cli import main as cli
from tests.support.golden import Golden
from tests.support.my_lab import Lab, install

# The same examples in every run: a failure in continuous integration is a failure at the desk.
hypothesis.settings.register_profile("fedstill", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("fedstill")
# pytest --hypothesis-profile=thorough
hypothesis.settings.register_profile(
    "thorough", hypothesis.settings.get_profile("fedstill"), max_examples=200
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that wait come first: they are one worker's, and the others compute meanwhile."""
    items.sort(key=lambda item: item.get_closest_marker("waits") is None)


@pytest.fixture
def steady_adam(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adam whose steps follow the gradients, for tests that compare networks which were trained two ways.

    The usual one makes a whole step of any gradient, however small: also of the rounding noise that is left
    where the true gradient is 0, whose sign is another on each processor. With an eps far above that noise
    (1e-8) and below gradients (1e-2 and more) such a weight stays where it is, and tolerances stay narrow.
    """
    from torch.optim import Adam

    made = Adam.__init__

    def steady(self: Adam, params: Any, lr: float = 1e-3, **options: Any) -> None:
        made(self, params, lr, **{"eps": 1e-3, **options})

    monkeypatch.setattr(Adam, "__init__", steady)


@pytest.fixture
def command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """The command line in this process, in a pipe: its exit code, stdout and stderr."""
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


@pytest.fixture(scope="module")
def lab(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """A lab's folder; each file of tests has its own."""
    return Lab(tmp_path_factory.mktemp("lab"), installed)
