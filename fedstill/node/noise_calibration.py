"""Noise levels of a mechanism: as configured, or calibrated to the budgets."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from fedstill.core.errors import ArgumentError
from fedstill.privacy.accounting import calibrate_noise
from fedstill.privacy.config import Accountant, NoiseOptions, PrivacyConfig, SumsConfig
from fedstill.privacy.events import CostBreakdown, PrivacyCost, total_cost

NoiseLevels = Mapping[str, float]  # noise level by option; 0 is none
RunCosts = Callable[[NoiseLevels], CostBreakdown]  # maximum costs of the whole run
DEFAULT_SUMS_NOISE = 4.0  # without a budget; epsilon 0.93 at delta 1e-5


def placeholder_noise(config: PrivacyConfig) -> NoiseLevels:
    """Return the configured noise levels, and 1 for those to be calibrated."""
    return {
        part: 1.0 if table.noise is None else table.noise
        for part, table in config.noise_option_tables.items()
    }


def uncalibrated_noise(options: NoiseOptions) -> float:
    """Return the noise level of an option table without a budget: as given, else none, except for sums."""
    if options.noise is None:
        return DEFAULT_SUMS_NOISE if isinstance(options, SumsConfig) else 0.0
    return options.noise


def calibrate_noise_levels(config: PrivacyConfig, run_costs: RunCosts) -> NoiseLevels:
    """Return the configured noise levels; where none is given, the smallest that keep the run within its
    budgets (:func:`uncalibrated_noise` without one).

    If several levels are not given, each gets its share of epsilon. All together cost less than the sum of
    their separate costs, so all of them are then lowered by one factor.

    Raises:
        ArgumentError: no noise level is enough.
    """
    parts, costs = config.noise_option_tables, run_costs(placeholder_noise(config))
    configured = {part: uncalibrated_noise(table) for part, table in parts.items()}
    uncalibrated = [part for part, table in parts.items() if table.noise is None and costs.get(part)]
    # The run must stay within both budgets.
    limits = {(config.epsilon, config.delta), config.total_budget}
    budgets = [
        (epsilon, d) for epsilon, d in sorted(limits) if math.isfinite(epsilon) and d <= min(limits)[1]
    ]
    if not config.protects or not budgets or not uncalibrated or total_cost(costs) is None:
        return configured

    def required_factor(
        levels: NoiseLevels,
        relative: NoiseLevels,
        max_epsilon: float,
        delta: float,
        accountant: Accountant,
        only: str = "",
    ) -> float:
        """Return the factor of the relative levels at which a run (or one option's part of it) costs
        ``max_epsilon``.
        """

        def spent(factor: float) -> PrivacyCost:
            costs_ = run_costs({**levels, **{part: factor * level for part, level in relative.items()}})
            return (costs_[only] if only else total_cost(costs_)) or PrivacyCost()

        try:
            return calibrate_noise(spent, max_epsilon, delta, accountant)
        except ArgumentError as error:
            run, over_all = config.epsilon, config.total_budget[0]
            name = "epsilon" if run <= over_all else "total_epsilon"
            raise ArgumentError(f"privacy.{name}", min(run, over_all), error.expected) from error

    (max_epsilon, delta), shares = budgets[0], {part: parts[part].share for part in uncalibrated}
    separate = {
        part: required_factor(
            configured, {part: 1.0}, max_epsilon * share / sum(shares.values()), delta, "rdp", part
        )
        for part, share in (shares if len(uncalibrated) > 1 else {}).items()
    }
    relative = separate or dict.fromkeys(uncalibrated, 1.0)
    levels = {**configured, **relative}
    factor = max(required_factor(levels, relative, *budget, config.accountant) for budget in budgets)
    return configured | {part: factor * level for part, level in relative.items()}
