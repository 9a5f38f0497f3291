"""FedGO's weights compared with the optimal weights, on data with known densities."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributions import Normal

from fedstill.federation.responses import Responses
from fedstill.methods._discriminators import Discriminators
from fedstill.methods._importance_weights import importance_weights
from fedstill.methods.fediod import FedIOD
from fedstill.protocol.local_config import LocalConfig
from tests.support import small_world
from tests.support.small_world import made, make_nodes

SIZES = (30, 10, 20)
OWN = [Normal(-1.0, 0.5), Normal(0.5, 1.0), Normal(2.0, 0.7)]  # distributions of the nodes' data
MADE = Normal(0.0, 2.0)  # distribution of generated data
X = torch.linspace(-2.5, 3.5, 13)


def best(critic: Any) -> torch.Tensor:
    """Return the output of the optimal critic, which is high for generated data."""
    return MADE.log_prob(X) - critic.log_prob(X)


def learned(own: Normal) -> torch.Tensor:
    """Return the output of a trained critic; the log ratio of Gaussians is quadratic."""

    def quadratic_features(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.ones_like(x), x, x**2], 1)

    real, fake = own.sample((20000,)), MADE.sample((20000,))
    weights, critics = torch.zeros(3, requires_grad=True), Discriminators(loss="bce")
    optimizer = torch.optim.LBFGS([weights], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        total = (
            critics.real_loss(quadratic_features(real) @ weights).mean()
            + critics.fake_loss(quadratic_features(fake) @ weights).mean()
        )
        total.backward()
        return total

    optimizer.step(loss)  # type: ignore[arg-type]
    return (quadratic_features(X) @ weights).detach()


@pytest.mark.parametrize(("critic", "near"), [(best, 1e-5), (learned, 0.03)])
def test_odds_weights_are_posterior_probabilities(critic: Any, near: float) -> None:
    """FedGO: with critics at their optimum, n_k p_k(x) / sum_j n_j p_j(x)."""
    torch.manual_seed(0)
    config = FedIOD(importance="odds", ensemble="probs")
    nodes = make_nodes([made("mlp:4", index) for index in range(3)], sizes=SIZES)
    server = small_world.world(config, nodes, made("mlp:4", "student"), local=LocalConfig()).server
    server.state.histogram.fetch(server)
    d = torch.stack([critic(own) for own in OWN]).view(3, -1, 1, 1).expand(-1, -1, 2, 2)
    responses = Responses(-1, server.federation.nodes, {"critic": d})
    weights = importance_weights(config.importance, server.task, server.state.histogram, responses)
    dense = torch.stack([n * own.log_prob(X).exp() for n, own in zip(SIZES, OWN, strict=True)])
    expected = (dense / dense.sum(0)).unsqueeze(2).expand(-1, -1, 3)
    torch.testing.assert_close(weights, expected, rtol=0, atol=near)
