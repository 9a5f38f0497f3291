"""What all tests share."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis
import pytest

from fedstill import cli

# The same examples in every run: a failure in continuous integration is a failure at the desk.
hypothesis.settings.register_profile("fedstill", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("fedstill")


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """The command line in this process: its exit code, stdout and stderr."""

    def call(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            cli.main(words)
        captured = capsys.readouterr()
        assert isinstance(left.value.code, int)
        return left.value.code, captured.out, captured.err

    return call
