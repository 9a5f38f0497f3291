"""Options: each has the default that is written down, and nothing changes a configuration once it is made.

A default is a promise: who leaves an option out gets the figures of everybody else who did. To change one, or
to add an option, write ``python -m tests.test_options`` and read the difference of ``options.toml``.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomli_w

import fedstill
from fedstill.attacks.attack import ATTACKS
from fedstill.core.config_tables import as_table
from fedstill.core.toml import parse
from fedstill.data.config import DATA
from fedstill.data.split_base import SPLITS
from fedstill.node.node_file import NodeFile
from fedstill.privacy.config import MECHANISMS
from fedstill.protocol.method import METHODS
from fedstill.runs.config import RunConfig
from fedstill.tasks import TASKS

KEPT = Path(__file__).with_name("options.toml")
REGISTRIES = (METHODS, TASKS, DATA, SPLITS, MECHANISMS, ATTACKS)
CHANGING = {  # dataclasses that are state, outside of the methods' own
    "Audited", "Budget", "Call", "Heard", "Meter", "Traffic", "Watch", "World", "_Coming", "_Exchange",
}  # fmt: skip


def defaults() -> dict[str, Any]:
    """Every option with its default: of a run, of a node, and of all that is chosen by name."""
    found: dict[str, Any] = {
        "run": as_table(RunConfig(method=METHODS["fedavg"]())),
        "node": as_table(NodeFile(name="clinic")),
    }
    for registry in REGISTRIES:
        found |= {f"{registry.what} {name}": as_table(registry[name]()) for name in registry.own}
    return found


def classes() -> Iterator[type]:
    """All dataclasses of the package."""
    for module in pkgutil.walk_packages(fedstill.__path__, "fedstill."):
        if not module.name.endswith("__main__"):
            for each in vars(importlib.import_module(module.name)).values():
                if (
                    inspect.isclass(each)
                    and each.__module__ == module.name
                    and "__dataclass_params__" in vars(each)
                ):
                    yield each


def test_each_option_has_the_default_that_is_written_down() -> None:
    assert defaults() == parse(KEPT.read_text(encoding="utf-8"))


def test_no_configuration_changes_once_it_is_made() -> None:
    frozen = {each for each in classes() if vars(each)["__dataclass_params__"].frozen}
    changing = {each for each in classes() if each not in frozen and "methods" not in each.__module__}
    assert {each.__name__ for each in changing} == CHANGING
    assert all(each in frozen for registry in REGISTRIES for each in registry.values())


if __name__ == "__main__":
    KEPT.write_text(tomli_w.dumps(defaults()), encoding="utf-8")
