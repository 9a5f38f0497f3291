"""Data of other tasks than classification, where no run says what the task is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedstill.core.errors import DataError, RunNeeded
from fedstill.data.private import load
from fedstill.data.private_config import PrivateConfig

PIXELS = np.random.default_rng(0).integers(0, 256, (4, 8, 8), dtype=np.uint8)
LABELS = np.array([0, 1, 1, 0])


def refusal(config: PrivateConfig, folder: Path) -> str:
    with pytest.raises(RunNeeded) as caught:
        load(config, folder)
    said = str(caught.value)
    assert "name the run, which says what the task is" in said
    assert "\n" not in said
    return said


@pytest.mark.parametrize(
    ("arrays", "what"),
    [
        ({"images": PIXELS, "masks": PIXELS}, "'data.npz': images with masks"),
        ({"images": PIXELS, "instances": PIXELS}, "'data.npz': pictures with objects"),
        ({"images": PIXELS, "labels": np.zeros((4, 3), dtype=np.int64)}, "'data.npz': images with findings"),
        ({"images": PIXELS, "patient": LABELS}, "'data.npz': images without labels"),
    ],
)
def test_an_npz_is_known_by_its_arrays(tmp_path: Path, arrays: dict[str, Any], what: str) -> None:
    np.savez(tmp_path / "data.npz", **arrays)
    assert what in refusal(PrivateConfig(), tmp_path)


@pytest.mark.parametrize(
    ("table", "what"),
    [
        ("text,label\ngood film,1\nbad film,0\n", "texts"),
        ("image,Mass,Edema\na.png,1,0\n", "images with findings"),
        ("image,label\na.png,Mass|Edema\n", "images with findings"),
    ],
)
def test_a_csv_is_known_by_its_columns(tmp_path: Path, table: str, what: str) -> None:
    (tmp_path / "data.csv").write_text(table, encoding="utf-8")
    assert f"'data.csv': {what}: " in refusal(PrivateConfig(source="csv", path="data.csv"), tmp_path)


def test_folders_volumes_tensors_and_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("images", "masks"):
        (tmp_path / "maps" / name).mkdir(parents=True)
        Image.fromarray(PIXELS[0]).save(tmp_path / "maps" / name / "a.png")
    assert "'maps': images with masks" in refusal(PrivateConfig("folder", "maps"), tmp_path)
    assert "'maps/images': images without labels" in refusal(PrivateConfig("folder", "maps/images"), tmp_path)
    assert "'maps': volumes" in refusal(PrivateConfig("nifti", "maps"), tmp_path)
    (tmp_path / "a.safetensors").write_bytes(b"")
    assert "tensors of a server's input spec" in refusal(PrivateConfig("tensors", "a.safetensors"), tmp_path)
    function = (
        "import numpy\ndef masks(path): return {k: numpy.zeros((2, 8, 8)) for k in ('images', 'masks')}"
    )
    (tmp_path / "my_masks.py").write_text(function, encoding="utf-8")
    monkeypatch.setattr("sys.path", [])
    assert "'my_masks:masks': images with masks" in refusal(PrivateConfig("my_masks:masks"), tmp_path)


def test_images_of_classes_are_read_and_what_is_wrong_with_them_is_told(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", images=PIXELS, labels=LABELS)
    assert load(PrivateConfig(), tmp_path)[1].task.called == "classification"
    np.savez(tmp_path / "data.npz", pictures=PIXELS)
    with pytest.raises(DataError, match="has no array 'images'") as caught:
        load(PrivateConfig(), tmp_path)
    assert not isinstance(caught.value, RunNeeded)
    (tmp_path / "data.csv").write_text(
        "label," + ",".join(f"p{i}" for i in range(16)) + "\n", encoding="utf-8"
    )
    with (tmp_path / "data.csv").open("a", encoding="utf-8") as stream:
        stream.writelines(f"{label},{','.join(['9'] * 16)}\n" for label in (0, 1))
    assert len(load(PrivateConfig("csv", "data.csv"), tmp_path)[0]) == 2
    (tmp_path / "data.npz").write_bytes(b"nothing")
    with pytest.raises(DataError, match="cannot be read"):
        load(PrivateConfig(), tmp_path)
