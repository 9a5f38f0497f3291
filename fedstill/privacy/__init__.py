"""Privacy mechanisms, accounting and budgets, as pure functions without file access.

``config`` holds the base class of all mechanisms. ``dpsgd``, ``pate`` and ``noisy_outputs`` hold one
mechanism each. ``release_rules`` bound and noise a tensor before its release and state its privacy cost,
with the help of ``clipping`` and ``noise``. ``events`` represent privacy costs, ``accounting`` composes
them to an epsilon, and ``budget`` checks whether one more cost fits. ``statement`` describes a node's
guarantee in words, and ``epsilon_lower_bounds`` computes the epsilon that an attack proves.

This package may import protocol and the packages below it. A custom mechanism is a subclass of
:class:`PrivacyConfig` (docs/custom-mechanism.md); this module exports all names that it needs.
"""

from fedstill.core.errors import ArgumentError
from fedstill.privacy.config import COUNTED, DeclaredRelease, DPTrainingConfig, PrivacyConfig
from fedstill.privacy.events import Event, PrivacyCost
from fedstill.privacy.noise import NoiseSampler, add_noise
from fedstill.privacy.release_rules import Exact, ReleaseRule
from fedstill.protocol.queries import Query
from fedstill.tasks import Task

__all__ = [
    "COUNTED",
    "ArgumentError",
    "DPTrainingConfig",
    "DeclaredRelease",
    "Event",
    "Exact",
    "NoiseSampler",
    "PrivacyConfig",
    "PrivacyCost",
    "Query",
    "ReleaseRule",
    "Task",
    "add_noise",
]
