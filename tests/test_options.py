"""Defaults and ranges of all options, pinned in ``options.toml``.

A changed default changes the metrics of users who do not set the option. After changing or
adding an option, run
``python -m tests.test_options`` and check the difference of ``options.toml``.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import tomli_w
from annotated_types import BaseMetadata, GroupedMetadata

import fedstill
from fedstill.attacks.attack import ATTACKS
from fedstill.core.config_tables import parse_toml, to_table
from fedstill.core.options import CheckedOptions
from fedstill.core.registry import Registrable
from fedstill.data.config import DATA
from fedstill.data.partitioners import SPLITS
from fedstill.federation.adversaries import ADVERSARIES
from fedstill.node.node_file import NodeFile
from fedstill.privacy.config import MECHANISMS
from fedstill.protocol.method import METHODS
from fedstill.runs.spec import RunSpec
from fedstill.tasks import TASKS

KEPT = Path(__file__).with_name("options.toml")
REGISTRIES = (METHODS, TASKS, DATA, SPLITS, MECHANISMS, ADVERSARIES, ATTACKS)
CHANGING = {  # mutable dataclasses, except for those of methods
    "AuditTotals", "Budget", "DifferentiableQueryState", "FedstillConfig", "DailyReleases", "LinkCosts",
    "ServerTranscript",
    "NodeTraffic", "GlobalRngWatch",
    "AuditedNode", "NodeProgress", "Exchange", "Release", "_OpenSum", "_Repeats",
}  # fmt: skip


def defaults() -> dict[str, Any]:
    """Return all options with their defaults: of runs, nodes, and registered components."""
    tables: dict[str, Any] = {
        "run": to_table(RunSpec(method=METHODS["fedavg"]())),
        "node": to_table(NodeFile(name="clinic")),
    }
    for registry in REGISTRIES:
        tables |= {f"{registry.what} {name}": to_table(registry[name]()) for name in registry.builtin}
    return tables


def classes() -> Iterator[type]:
    """Yield all dataclasses of the package."""
    for module in pkgutil.walk_packages(fedstill.__path__, "fedstill."):
        if not module.name.endswith("__main__"):
            for each in vars(importlib.import_module(module.name)).values():
                if (
                    inspect.isclass(each)
                    and each.__module__ == module.name
                    and "__dataclass_params__" in vars(each)
                ):
                    yield each


def bounds() -> dict[str, Any]:
    """Return the range of each numeric option, from its type."""
    by_class: dict[str, Any] = {}
    for each in sorted(classes(), key=lambda each: each.__qualname__):
        if issubclass(each, CheckedOptions | Registrable):
            hints = get_type_hints(each, include_extras=True)
            own = inspect.get_annotations(each)
            limits = {name: " ".join(sorted(set(_limits(hints[name])))) for name in own}
            by_class[each.__qualname__] = {name: result for name, result in limits.items() if result}
    return {f"bounds {name}": result for name, result in by_class.items() if result}


def _limits(hint: Any) -> Iterator[str]:
    if get_origin(hint) is Annotated:
        for limit in get_args(hint)[1:]:
            parts = limit if isinstance(limit, GroupedMetadata) else [limit]
            yield from (str(part) for part in parts if isinstance(part, BaseMetadata))
    for inner in get_args(hint):
        yield from _limits(inner)


def test_option_ranges_match_options_toml() -> None:
    written = parse_toml(KEPT.read_text(encoding="utf-8"))
    assert bounds() == {name: result for name, result in written.items() if name.startswith("bounds ")}


def test_option_defaults_match_options_toml() -> None:
    written = parse_toml(KEPT.read_text(encoding="utf-8"))
    assert defaults() == {name: result for name, result in written.items() if not name.startswith("bounds ")}


def test_configs_are_frozen() -> None:
    frozen = {each for each in classes() if vars(each)["__dataclass_params__"].frozen}
    changing = {each for each in classes() if each not in frozen and "methods" not in each.__module__}
    assert {each.__name__ for each in changing} == CHANGING
    assert all(each in frozen for registry in REGISTRIES for each in registry.values())


def test_method_options_are_keyword_only() -> None:
    """New options of base classes would shift positional arguments."""
    assert not [each for each in METHODS.values() if not all(field.kw_only for field in fields(each))]


if __name__ == "__main__":
    KEPT.write_text(tomli_w.dumps(defaults() | bounds()), encoding="utf-8")
