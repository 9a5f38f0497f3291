"""A student takes raw inputs and refuses invalid ones. A file from another party imports nothing."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from unittest.mock import ANY

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

import fedstill
from fedstill.core.dataset import CaseIndex, DataSet, TensorData
from fedstill.core.errors import ArgumentError, DataError, MethodRefused, ModelError, RunFolderError
from fedstill.data import load, make_data_config, new_data
from fedstill.data.data_spec import DataSpec
from fedstill.data.new_data import EvaluationDataOptions, load_labeled, load_unlabeled
from fedstill.models import MLP, RandomConv, ResNet8, SmallCNN, build
from fedstill.runs.results import input_hashes
from fedstill.runs.student_file import StudentFile
from fedstill.student.export import export
from fedstill.student.predict import predict
from fedstill.student.student_model import PortableStudent
from fedstill.tasks import TASKS
from tests.support.errors import raises_invalid

PIXELS = DataSpec(TASKS["classification"](), ("cat", "dog"), (3, 8, 8), (0.4, 0.5, 0.6), (0.2, 0.3, 0.4))


def written(folder: Path, network: nn.Module, model: str, spec: DataSpec) -> Path:
    """Write a run's folder that only contains its student."""
    folder.mkdir(exist_ok=True)
    weights = {name: value.clone() for name, value in network.state_dict().items()}
    save_file(weights, folder / "student.safetensors", StudentFile(model, spec).header())
    return folder


@pytest.fixture
def cats(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    return written(tmp_path / "run", SmallCNN((3, 8, 8), 2).eval(), "small-cnn", PIXELS)


def test_bytes_and_floats_are_normalized_as_in_run(cats: Path) -> None:
    student = fedstill.load(cats)
    pixels = torch.arange(2 * 3 * 64).reshape(2, 3, 8, 8).remainder(256).to(torch.uint8)
    mean, std = torch.tensor(PIXELS.mean).view(-1, 1, 1), torch.tensor(PIXELS.std).view(-1, 1, 1)
    wanted = student.network((pixels.float() / 255 - mean) / std)
    pictures = [Image.fromarray(image) for image in pixels.permute(0, 2, 3, 1).contiguous().numpy()]
    backwards = pixels.flip(0).numpy()[::-1]  # with negative strides
    big_endian = (pixels.float() / 255).numpy().astype(">f4")
    for given in (pixels, pixels.float() / 255, pixels.numpy(), backwards, big_endian, pictures):
        torch.testing.assert_close(student(given), wanted)
    torch.testing.assert_close(student.probabilities(pixels), wanted.softmax(1))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (torch.full((2, 3, 8, 8), 200.0), "image 0 has values from 200 to 200 .* divide by 255"),
        (torch.linspace(-1, 1, 384).view(2, 3, 8, 8), "image 0 has values from -1 .* the student normalizes"),
        (torch.zeros(2, 3, 8, 8).index_fill(0, torch.tensor([1]), torch.nan), "image 1 has values from nan"),
        (torch.zeros(2, 8, 8, 3), r"images are 2 x 8 x 8 x 3 \(expected N x 3 x 8 x 8"),
        (torch.zeros(3, 8, 8), r"images are 3 x 8 x 8 \(expected N x 3"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.int64), "images are torch.int64"),
        (torch.zeros(2, 3, 8, 8) + 0j, "images: values are complex64"),
    ],
)
def test_rejects_invalid_images_in_one_line(cats: Path, given: torch.Tensor, message: str) -> None:
    with pytest.raises(DataError, match=message):
        fedstill.load(cats)(given)


def test_portable_student_returns_nan_for_invalid_inputs(cats: Path) -> None:
    pixels = torch.rand(3, 3, 8, 8)
    pixels[1, 0, 0, 0] = 255
    responses = PortableStudent(fedstill.load(cats))(pixels)
    assert responses.isnan().any(1).tolist() == [False, True, False]


def test_student_file_imports_nothing_unnamed(tmp_path: Path) -> None:
    own = written(tmp_path / "run", MLP((3, 8, 8), 2, width=4), "their_lab:Net", PIXELS)
    with pytest.raises(ArgumentError, match=r"'their_lab:Net' \(expected .*"):
        fedstill.load(own)
    for model in (MLP((3, 8, 8), 2, width=4), "mlp:4"):
        assert fedstill.load(own, model)(torch.zeros(1, 3, 8, 8)).shape == (1, 2)
    with pytest.raises(ModelError, match=r"architecture .*MLP"):
        fedstill.load(own, "mlp:5")
    with raises_invalid("model", "MLP", "an instance"):
        fedstill.load(own, MLP)  # type: ignore[arg-type]


def test_rejects_files_without_student(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="finished run"):
        fedstill.load(tmp_path / "none")
    with pytest.raises(RunFolderError, match=r"student\.safetensors"):
        fedstill.load(tmp_path)
    save_file({"a": torch.zeros(1)}, tmp_path / "student.safetensors")
    with pytest.raises(RunFolderError, match="'fedstill student 1'"):
        fedstill.load(tmp_path)
    (tmp_path / "student.safetensors").write_bytes(b"broken")
    with pytest.raises(RunFolderError, match="cannot read"):
        fedstill.load(tmp_path)


def test_student_from_python_describes_its_inputs(tmp_path: Path) -> None:
    x, y = torch.rand(24, 1, 8, 8) * 2 - 1, torch.arange(24) % 2
    fedstill.distil(
        [(x[:8], y[:8]), (x[8:16], y[8:16])],
        [MLP((1, 8, 8), 2, width=4) for _ in range(2)],
        mine := MLP((1, 8, 8), 2, width=4),
        (x[16:], y[16:]),
        ["cat", "dog"],
        method=fedstill.FedAvg(rounds=1),
        local=fedstill.LocalConfig(epochs=1),
        policies=[fedstill.PolicyConfig(outputs_only=False)] * 2,
        out=tmp_path / "run",
    )
    student = fedstill.load(tmp_path / "run")
    assert (student.classes, student.about.model) == (("cat", "dog"), "mlp:4")
    torch.testing.assert_close(student((x[16:] + 1) / 2), mine(x[16:]))
    torch.testing.assert_close(student((x[16:, 0] + 1) / 2), mine(x[16:]))  # a single channel may be omitted


@pytest.mark.parametrize(
    ("model", "name"),
    [(SmallCNN, "small-cnn:8"), (ResNet8, "resnet8:4"), (RandomConv, "random-conv")],
)
def test_builtin_module_is_named_with_its_width(
    model: Callable[..., nn.Module], name: str, tmp_path: Path
) -> None:
    width = {"width": int(name.partition(":")[2])} if ":" in name else {}
    x, y = torch.rand(8, 1, 8, 8) * 2 - 1, torch.arange(8) % 2
    networks = [model((1, 8, 8), 2, **width) for _ in range(2)]
    method = fedstill.FedKD(student=fedstill.StudentTraining(epochs=1))
    fedstill.distil(
        [(x, y)], networks[:1], networks[1], (x, y), 2, method=method, public=x, out=tmp_path / "run"
    )
    student = fedstill.load(tmp_path / "run")
    assert student.about.model == name
    torch.testing.assert_close(student.network(x), networks[1](x))


def test_regression_predictions_are_in_target_unit(tmp_path: Path) -> None:
    column = fedstill.SchemaColumn
    columns = (column(name="age", range=(0.0, 100.0)), column(name="days", range=(0.0, 30.0)))
    schema = fedstill.TableSchema("days", columns)
    spec = DataSpec(TASKS["regression"](), ("days",), (1,), (), (), schema=schema)
    network = nn.Linear(1, 1)
    nn.init.constant_(network.weight, 0.5)
    nn.init.zeros_(network.bias)
    student = fedstill.load(written(tmp_path / "run", nn.Sequential(nn.Flatten(), network), "linear", spec))
    # An age of 100 is scaled to 1, for which the network returns 0.5: three quarters of 0 to 30.
    assert student({"age": [100, 0]}).flatten().tolist() == [22.5, 7.5]
    assert student(torch.tensor([[50.0]])).item() == 15.0
    with pytest.raises(DataError, match=r"row 0: .*'age' is 101 .*0 to 100"):
        student(torch.tensor([[101.0]]))
    with pytest.raises(DataError, match=r"rows: .*complex64"):
        student(torch.tensor([[50.0 + 1j]]))


def test_survival_predictions_are_survival_probabilities(tmp_path: Path) -> None:
    column = fedstill.SchemaColumn
    columns = (
        column(name="age", range=(0.0, 100.0)),
        column(name="days", range=(0.0, 30.0)),
        column(name="died", type="category", categories=("no", "yes")),
    )
    schema = fedstill.TableSchema("days", columns, event="died", intervals=3)
    network = nn.Linear(1, 3)
    nn.init.zeros_(network.weight)
    nn.init.zeros_(network.bias)  # a hazard of one half in each interval
    spec = DataSpec(TASKS["survival"](), schema.classes, (1,), (), (), schema=schema)
    student = fedstill.load(written(tmp_path / "run", network, "linear", spec), nn.Linear(1, 3))
    assert student.probabilities({"age": [50]}).tolist() == [[0.5, 0.25, 0.125]]
    (tmp_path / "new.csv").write_text("age\n50\n", encoding="utf-8")
    predict(student, str(tmp_path / "new.csv"), EvaluationDataOptions(), tmp_path / "a.csv")
    lines = (tmp_path / "a.csv").read_text(encoding="utf-8").splitlines()
    assert lines == ["example,beyond 10,beyond 20,beyond 30", "0,0.500000,0.250000,0.125000"]


def test_map_predictions_are_exported_but_not_written_to_csv(tmp_path: Path) -> None:
    spec = DataSpec(TASKS["segmentation"](), ("background", "tumor"), (1, 8, 8), (0.5,), (0.5,))
    student = fedstill.load(written(tmp_path / "run", nn.Conv2d(1, 2, 1), "unet", spec), nn.Conv2d(1, 2, 1))
    with pytest.raises(MethodRefused, match="predicts maps"):
        predict(student, "x.npz", EvaluationDataOptions(), tmp_path / "a.csv")
    assert export(student, "torchscript", tmp_path / "student.pt") < 1e-6
    with pytest.raises(ModelError, match=r"'unet' .*huggingface"):
        export(student, "huggingface", tmp_path / "folder")  # the export would create a U-Net
    with raises_invalid("--out", ANY, "existing folder"):
        export(student, "torchscript", tmp_path / "nowhere" / "student.pt")
    with raises_invalid("--out", ANY, "a file", "new path"):
        export(student, "torchscript", tmp_path / "run")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "student.pt"]  # no incomplete export


def test_fixed_features_are_rebuilt_on_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    network = build("scattering:4", (1, 8, 8), 2, 0)
    nn.init.normal_(network[4].weight)  # type: ignore[index]
    spec = DataSpec(TASKS["classification"](), ("cat", "dog"), (1, 8, 8), (0.5,), (0.5,))
    student = fedstill.load(written(tmp_path / "run", network, "scattering:4", spec))
    assert export(student, "huggingface", tmp_path / "folder") < 1e-5
    monkeypatch.setattr("fedstill.models.image_classifiers.PIXELS_PER_BATCH", 64)
    assert export(student, "torchscript", tmp_path / "student.pt") < 1e-5
    traced, x = torch.jit.load(str(tmp_path / "student.pt")), torch.rand(50, 1, 8, 8)  # type: ignore[no-untyped-call]
    torch.testing.assert_close(traced(x), student(x), atol=1e-5, rtol=1e-4)


# --- new data -----------------------------------------------------------------------------------------


def test_image_folder_is_read_for_predict_and_evaluate(cats: Path, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    for name in ("dog", "cat"):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for number in range(2):
            pixels = draw.integers(0, 256, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "pets" / name / f"{number}.png")
    student = fedstill.load(cats)
    with pytest.raises(DataError, match=r"3 x 16 x 16 .*3 x 8 x 8.*--fit"):
        predict(student, str(tmp_path / "pets"), EvaluationDataOptions(), tmp_path / "a.csv")
    assert predict(student, str(tmp_path / "pets"), EvaluationDataOptions(fit=True), tmp_path / "a.csv") == 4
    lines = list(csv.DictReader((tmp_path / "a.csv").open(encoding="utf-8")))
    assert [line["example"] for line in lines] == ["cat/0.png", "cat/1.png", "dog/0.png", "dog/1.png"]
    data = load_labeled(str(tmp_path / "pets"), PIXELS, EvaluationDataOptions(fit=True))
    expected = student.network(data.inputs).softmax(1)[:, 0].tolist()
    assert [float(line["cat"]) for line in lines] == pytest.approx(expected, abs=1e-5)
    assert data.targets.tolist() == [0, 0, 1, 1]
    (tmp_path / "flat").mkdir()
    (tmp_path / "pets/cat/0.png").rename(tmp_path / "flat" / "=1+1.png")
    predict(student, str(tmp_path / "flat"), EvaluationDataOptions(fit=True), tmp_path / "a.csv")
    (line,) = csv.DictReader((tmp_path / "a.csv").open(encoding="utf-8"))
    assert line["example"] == "'=1+1.png", "spreadsheets must not evaluate file names as formulas"


def test_class_folders_are_matched_by_name(tmp_path: Path) -> None:
    images, labels = np.zeros((2, 8, 8, 3), dtype=np.uint8), np.array(["dog", "dog"])
    np.savez(tmp_path / "dogs.npz", images=images, labels=labels, site=np.array(["x", "y"]))
    data = load_labeled(str(tmp_path / "dogs.npz"), PIXELS, EvaluationDataOptions())
    assert data.targets.tolist() == [1, 1]
    assert data.cases is not None
    assert data.cases.sites == ("x", "y")
    with raises_invalid("data.sites", "z", "some of x, y"):
        load_labeled(str(tmp_path / "dogs.npz"), PIXELS, EvaluationDataOptions(sites=("z",)))


def test_named_dataset_is_evaluated_at_requested_sites(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    images = torch.zeros(4, *PIXELS.shape)
    cases = CaseIndex(torch.arange(4), ("p", "q", "r", "s"), ("north", "south", "north", "south"))
    data = TensorData(images, torch.tensor([0, 1, 1, 0]), cases=cases)
    whole = DataSet("four", data, data, PIXELS.classes, PIXELS.mean, PIXELS.std)
    monkeypatch.setattr(new_data, "load", lambda *_, **__: whole)
    assert load_labeled("digits", PIXELS, EvaluationDataOptions(sites=("south",))).targets.tolist() == [1, 0]
    assert len(load_labeled("digits", PIXELS, EvaluationDataOptions())) == 4
    with raises_invalid("data.sites", "east", "some of north, south"):
        load_labeled("digits", PIXELS, EvaluationDataOptions(sites=("east",)))


def test_maps_are_resized_as_in_run(tmp_path: Path) -> None:
    """Otherwise metrics would be of other images, and seen examples would not be recognized."""
    draw = np.random.default_rng(0)
    images, masks = draw.integers(0, 256, (6, 16, 16), dtype=np.uint8), draw.integers(0, 2, (6, 16, 16))
    np.savez(tmp_path / "scans.npz", images=images, masks=masks)
    task = TASKS["segmentation"]()
    run = load(make_data_config(str(tmp_path / "scans.npz"), size=8), task)
    data = load_labeled(
        str(tmp_path / "scans.npz"), DataSpec.from_data(task, run), EvaluationDataOptions(fit=True)
    )
    own = torch.cat([run.train.inputs, run.test.inputs])
    assert set(input_hashes(own)) == set(input_hashes(data.inputs))
    _, pixels = load_unlabeled(
        str(tmp_path / "scans.npz"), DataSpec.from_data(task, run), EvaluationDataOptions(fit=True)
    )
    torch.testing.assert_close((pixels - 0.5) / 0.5, data.inputs)
