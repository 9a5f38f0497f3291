"""Results of runs and comparisons in Python: metrics, models, tables, and finished runs that are read."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fedstill
from fedstill.core.errors import RunFolderError
from fedstill.models import MLP
from fedstill.runs.simulation import Simulation
from fedstill.tasks.custom_loss import describe_loss
from tests.support.bright_rows import SHAPE, bright_rows, few
from tests.support.errors import raises_invalid

X, Y = bright_rows(60, 3)  # the test data of few()


def percent(outputs: torch.Tensor | None) -> float:
    """Return the accuracy of outputs on the test data, in percent."""
    assert outputs is not None
    return 100 * float((outputs.argmax(1) == Y).float().mean())


def test_measured_models_are_those_of_the_outcome() -> None:
    given = few()
    outcome = fedstill.distil(**given)
    assert outcome.student is given["student"]
    assert outcome.models == tuple(given["models"])
    assert percent(outcome.predictions) == pytest.approx(outcome.accuracy)
    assert outcome.metrics["accuracy"] == outcome.accuracy == outcome.result["accuracy"]
    with torch.no_grad():
        torch.testing.assert_close(outcome.student(X), outcome.predictions)
        own = [percent(model(X)) for model in outcome.models]
    assert own == pytest.approx(outcome.result["local"]["accuracy"]["per_node"])
    assert percent(outcome.ensemble(X)) == pytest.approx(outcome.result["ensemble"]["accuracy"])
    assert outcome.ensemble(X[:2]).shape == (2, 3)  # type: ignore[union-attr]


def test_ensemble_is_mean_of_logits_in_fedkd_with_equal_weights() -> None:
    method = fedstill.FedKD(ensemble="logits", weights="equal", student=fedstill.StudentTraining(epochs=1))
    outcome = fedstill.distil(**few(method=method, public=bright_rows(20, 9)[0]))
    with torch.no_grad():
        mean = torch.stack([model(X) for model in outcome.models]).mean(0)
    torch.testing.assert_close(outcome.ensemble(X), mean)


def test_history_has_a_row_for_each_step_and_metrics_where_evaluated() -> None:
    rows = fedstill.distil(**few()).history
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert ["accuracy" in row for row in rows] == [False, True] * 3
    assert all("loss.student" in row and "losses" not in row for row in rows)


def test_methods_without_global_model_have_neither_student_nor_ensemble() -> None:
    outcome = fedstill.distil(**few(method=fedstill.Standalone()))
    assert (outcome.student, outcome.predictions, outcome.ensemble(X)) == (None, None, None)
    assert outcome.accuracy == outcome.result["standalone"]["accuracy"]["mean"]


def test_other_tasks_name_their_metrics() -> None:
    rows = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    data = [(rows[:20], rows[:20].sum(1)), (rows[20:], rows[20:].sum(1))]
    models = [MLP((4,), 1, 4), MLP((4,), 1, 4)]
    local, method = fedstill.LocalConfig(epochs=1), fedstill.FedAvg(rounds=1)
    open_nodes = [fedstill.PolicyConfig(outputs_only=False)] * 2
    outcome = fedstill.distil(
        data, models, MLP((4,), 1, 4), data[0], 1,
        task="regression", method=method, local=local, policies=open_nodes,
    )  # fmt: skip
    assert "accuracy" not in outcome.metrics
    with pytest.raises(AttributeError, match=next(iter(outcome.metrics))):
        _ = outcome.accuracy


def test_heads_are_returned_on_their_backbone(tmp_path: Path) -> None:
    features = fedstill.Features("random-conv:8", normalize="example", cache=str(tmp_path))
    width = 128  # of random-conv:8
    heads: dict[str, Any] = {
        "models": [MLP((width,), 3, 4), MLP((width,), 3, 4)], "student": MLP((width,), 3, 4),
    }  # fmt: skip
    method = fedstill.FedKD(student=fedstill.StudentTraining(epochs=1))
    outcome = fedstill.distil(**few(**heads, method=method, public="gaussian", features=features))
    with torch.no_grad():
        assert outcome.student is not None
        torch.testing.assert_close(outcome.student(X), outcome.predictions)
        own = [percent(model(X)) for model in outcome.models]
    assert own == pytest.approx(outcome.result["local"]["accuracy"]["per_node"])
    assert percent(outcome.ensemble(X)) == pytest.approx(outcome.result["ensemble"]["accuracy"])


# --- finished runs are read -----------------------------------------------------------------------------


def test_finished_run_is_read_with_all_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = fedstill.distil(**few(out=tmp_path / "run"))
    files = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the run was repeated")

    monkeypatch.setattr(Simulation, "run", refuse)
    again = fedstill.distil(**few(out=tmp_path / "run"))
    assert again.student is not first.student
    assert again.accuracy == first.accuracy
    assert again.history == first.history
    torch.testing.assert_close(again.predictions, first.predictions, rtol=0, atol=0)
    torch.testing.assert_close(again.ensemble(X), first.ensemble(X), rtol=0, atol=0)
    for mine, other in zip(again.models, first.models, strict=True):
        torch.testing.assert_close(mine(X), other(X), rtol=0, atol=0)
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == files


def test_finished_run_is_not_read_without_its_state(tmp_path: Path) -> None:
    fedstill.distil(**few(out=tmp_path / "run"))
    (tmp_path / "run" / "state.safetensors").unlink()
    with pytest.raises(RunFolderError, match="without its models"):
        fedstill.distil(**few(out=tmp_path / "run"))


# --- notebooks ------------------------------------------------------------------------------------------


def test_html_has_the_models_and_the_costs() -> None:
    outcome = fedstill.distil(**few())
    page = outcome._repr_html_()
    assert page.count("<table>") == 1
    assert f"<td>{outcome.accuracy:.1f}</td>" in page
    assert "<li>privacy: " in page


def test_comparison_has_a_table_for_each_setting(tmp_path: Path) -> None:
    options = {
        "data.train_limit": 200,
        "nodes.local.epochs": 1,
        "fedkd.student.epochs": 1,
        "public.name": "held-out",
        "public.limit": 50,
    }
    compared = fedstill.compare_methods(["fedkd", "standalone"], options, out=tmp_path / "c")
    page = compared._repr_html_()
    assert page.count("<table>") == 1
    assert all(f"<th>{name}</th>" in page for name in ("FedKD", "Standalone"))
    assert "fedkd: accuracy" in repr(compared)


# --- a function as loss of local training ---------------------------------------------------------------


def mean_cross_entropy(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(z, y)


PLAIN = fedstill.LocalConfig(epochs=2, batch=16, smoothing=0.0)


@pytest.mark.parametrize("batching", ["stacked", "one-by-one"])
def test_local_loss_trains_as_the_equal_loss_of_the_task(batching: Any) -> None:
    engine = fedstill.EngineConfig(batching=batching)
    usual = fedstill.distil(**few(local=PLAIN, engine=engine, method=fedstill.Standalone()))
    own = fedstill.distil(
        **few(
            local=replace(PLAIN, smoothing=0.5),  # left to the function, which has none
            engine=engine, local_loss=mean_cross_entropy, method=fedstill.Standalone(),
        )
    )  # fmt: skip
    for mine, other in zip(own.models, usual.models, strict=True):
        torch.testing.assert_close(mine(X), other(X), rtol=1e-3, atol=1e-3)


def test_local_loss_decides_what_nodes_learn() -> None:
    def first_class_only(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(z, torch.zeros_like(y))

    given = few(local=replace(PLAIN, epochs=10), local_loss=first_class_only, method=fedstill.Standalone())
    outcome = fedstill.distil(**given)
    assert all(int(model(X).argmax(1).max()) == 0 for model in outcome.models)


def test_local_loss_must_be_a_scalar_function(tmp_path: Path) -> None:
    with raises_invalid("local_loss"):
        fedstill.distil(**few(local_loss="focal"))
    with raises_invalid("local_loss"):
        fedstill.distil(**few(local_loss=lambda z, y: F.cross_entropy(z, y, reduction="none")))


def test_run_with_another_local_loss_is_not_read(tmp_path: Path) -> None:
    fedstill.distil(**few(local_loss=lambda z, y: F.cross_entropy(z, y), out=tmp_path / "run"))
    fedstill.distil(**few(local_loss=lambda z, y: F.cross_entropy(z, y), out=tmp_path / "run"))
    with pytest.raises(RunFolderError, match="another local_loss"):
        fedstill.distil(**few(local_loss=lambda z, y: 2 * F.cross_entropy(z, y), out=tmp_path / "run"))


def test_described_loss_changes_with_everything_it_uses() -> None:
    def focal(gamma: float) -> Any:
        def loss(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            p = z.softmax(1).gather(1, y[:, None])
            return ((1 - p) ** gamma * -p.log()).mean()

        return loss

    losses = [
        focal(0.1), focal(5.0), partial(F.cross_entropy, label_smoothing=0.1), partial(F.cross_entropy),
        torch.nn.CrossEntropyLoss(), torch.nn.CrossEntropyLoss(label_smoothing=0.5),
        torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0])), mean_cross_entropy,
    ]  # fmt: skip
    assert len({describe_loss(loss) for loss in losses}) == len(losses)
    assert describe_loss(focal(0.1)) == describe_loss(focal(0.1))


def test_finished_run_is_not_read_for_other_frozen_weights(tmp_path: Path) -> None:
    def frozen(seed: int) -> dict[str, Any]:
        given = few(method=fedstill.FedKD(), public=bright_rows(20, 9)[0], out=tmp_path / "run")
        torch.manual_seed(seed)
        given["models"] = [MLP(SHAPE, 3, 8).requires_grad_(False) for _ in range(2)]
        return given

    fedstill.distil(**frozen(1))
    fedstill.distil(**frozen(1))
    with pytest.raises(RunFolderError, match="another models"):
        fedstill.distil(**frozen(2))
