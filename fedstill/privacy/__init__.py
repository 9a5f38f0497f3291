"""Mechanisms, accounting and budgets: pure functions, no files; and what a mechanism of one's own imports.

``config`` is the base of all mechanisms; ``dpsgd``, ``pate`` and ``noisy_outputs`` are one each.
``release_rules`` say what is done to a tensor that leaves, and its price: ``clipping``, ``noise``,
``pate_teachers`` and their votes. ``events`` are prices; ``accounting`` composes them to an epsilon, by
``privacy_loss`` and ``renyi``; ``budget`` says whether one more fits, ``budget_text`` what is left.
``statement`` says all of this in words, ``epsilon_lower_bounds`` what an attack proves.

May import protocol and what lies below. A newcomer writes a mechanism as docs/own-mechanism.md says.
"""

from fedstill.core.errors import ArgumentError
from fedstill.privacy.config import COUNTED, DPTrainingConfig, PrivacyConfig, Release
from fedstill.privacy.events import Event, PrivacyCost
from fedstill.privacy.noise import NoiseSampler, add_noise
from fedstill.privacy.release_rules import Exact, Rule
from fedstill.protocol.queries import Query
from fedstill.tasks import Task

__all__ = [
    "COUNTED",
    "ArgumentError",
    "NoiseSampler",
    "Event",
    "Exact",
    "PrivacyCost",
    "PrivacyConfig",
    "Query",
    "Release",
    "Rule",
    "DPTrainingConfig",
    "Task",
    "add_noise",
]
