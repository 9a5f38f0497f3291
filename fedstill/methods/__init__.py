"""Methods by name: each one file with its config, what its nodes answer and what its server does."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from fedstill.core.errors import ArgumentError
from fedstill.methods.server import Method, Needs, Server, ServerSetting, refusal

__all__ = ["METHODS", "Method", "Needs", "Server", "ServerSetting", "method_of", "refusal"]

_FILES = (
    "standalone",
    "centralised",
    "public_only",
    "ensemble",
    "fediod",
    "asyndgan",
    "fedkd",
    "fedmd_cg",
    "fedavg",
    "fedprox",
    "fedavgm",
    "feddf",
    "fedmd",
    "fedgen",
    "fedper",
    "lg_fedavg",
    "fedcg",
    "fl_mrcm",
    "fedad",
)


def _method(file: str) -> Method:
    method: Method = importlib.import_module(f"fedstill.methods.{file}").METHOD
    return method


METHODS: Mapping[str, Method] = {method.name: method for method in map(_method, _FILES)}


def method_of(config: object) -> Method:
    """The method that a config object belongs to.

    Raises:
        ArgumentError: none.
    """
    for method in METHODS.values():
        if type(config) is method.config:
            return method
    allowed = ", ".join(method.config.__name__ for method in METHODS.values())
    raise ArgumentError("method", config, f"one of {allowed}")
