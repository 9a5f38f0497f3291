"""Images of a report: inlined pixels, outlines, scores, missing files and generated inputs."""

from __future__ import annotations

import base64
import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file

from fedstill.core.errors import RunFolderError
from fedstill.report import images, write_report
from fedstill.report.images import LINE_WIDTH, OUTLINE_COLORS, build_image_section, outline_codes
from fedstill.report.records import Result
from tests.support.result_files import FOUND, TRUTH, Page, a_case, a_folder, a_result, decoded, read


@pytest.mark.parametrize("channels", [1, 3])
def test_image_url_keeps_every_pixel(channels: int) -> None:
    image = np.random.default_rng(0).integers(0, 256, (channels, 5, 8), dtype=np.uint8)
    assert np.array_equal(decoded(images.image_url(image)), image.transpose(1, 2, 0).squeeze())


def test_large_image_is_averaged_in_blocks() -> None:
    image = np.zeros((1, 128, 128), np.uint8)
    image[0, 0, 0] = 200  # one of the four pixels of the first block
    small = decoded(images.image_url(image))
    assert small.shape == (64, 64)
    assert small[0, 0] == 50
    assert small.sum() == 50


def test_long_thin_image_keeps_a_row() -> None:
    assert decoded(images.image_url(np.full((1, 1, 640), 9, np.uint8))).shape == (1, 64)


# --- images in a run's page --------------------------------------------------------------------------


HOSTILE = '"><script>alert(1)</script>'


def segmented(folder: Path, *cases: dict[str, Any]) -> dict[str, Any]:
    """Write the folder of a run with images of label maps and return its result."""
    metrics = [{"key": "dice", "title": "Dice", "unit": "%", "digits": 1, "better": "higher"}]
    result = {**a_result(), "metric": "dice", "metrics": metrics, "pictures": list(cases)}
    a_folder(folder, result)
    tensors: dict[str, npt.NDArray[Any]] = {}
    for index in range(len(cases)):
        image = np.full((3, 6, 8), 40 + index, np.uint8)
        tensors |= {f"{index}/image": image, f"{index}/truth": TRUTH + index * 0}
        tensors |= {f"{index}/output/0": FOUND.copy(), f"{index}/output/1": np.zeros_like(FOUND)}
    save_file(tensors, folder / "pictures.safetensors")
    return result


def test_outlines_are_drawn_over_the_image(tmp_path: Path) -> None:
    segmented(tmp_path, a_case("best"), a_case("worst", case="patient 9", window=[0, 0, 6, 8], size=[60, 80]))
    source = write_report(tmp_path).read_text(encoding="utf-8")
    page = Page(source)
    for expected in (
        "Best case patient 7, Utrecht, slice 5 of 30",
        "Worst case patient 9, Utrecht, slice 5 of 30, 6 \u00d7 8 of 60 \u00d7 80 pixels",
        "student Dice of the patient 66.7%",
        "north Dice of the patient not measured",
        "best, median and worst test case of the student, by Dice",
        "orange: truth only blue: prediction only white: both agree",
    ):
        assert expected in page.text, expected
    images = [attrs["href"] or "" for tag, attrs in page.tags if tag == "image" and "id" in attrs]
    assert len(images) == 2  # once per case, shared by its panels
    lines = [attrs["href"] or "" for tag, attrs in page.tags if attrs.get("class") == "lines"]
    most = [decoded(line).max() for line in lines[:3]]
    assert most == [2, 4, 2]  # truth alone; both; no prediction
    names = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(names) == len(set(names))
    links = [attrs["href"] for tag, attrs in page.tags if tag == "use"]
    assert set(links) <= {f"#{name}" for name in names}
    drawings = [attrs for tag, attrs in page.tags if tag == "svg" and attrs.get("class") == "image-panel"]
    assert [attrs["aria-label"] for attrs in drawings[:3]] == [
        "image with the true outline",
        "image with the true outline and that of student",
        "image with the true outline and that of north",
    ]
    assert {attrs["viewBox"] for attrs in drawings if "viewBox" in attrs} <= {"0 0 8 6"}


def test_outlines_run_between_pixels_but_not_along_the_border() -> None:
    codes = outline_codes(np.array([[0, 1, 1, 1]]), np.array([[0, 1, 1, 0]]))
    k = codes.shape[1] // 4
    assert (codes[:, k] == 4).all()  # where both change
    assert (codes[:, 3 * k] == 3).all()  # where only the prediction changes
    assert (codes[:, [0, 2 * k, -1]] == 0).all()
    assert (outline_codes(np.array([[0, 1, 1, 1]]), np.array([[0, 0, 0, 0]])) == 2).any()
    alone = outline_codes(np.array([[0, 1]]))
    assert sorted(np.unique(alone)) == [0, 1, 2]  # the line has a dark border
    assert (alone == 2).sum(axis=1).max() == LINE_WIDTH


def simulated(color: str) -> list[npt.NDArray[np.float64]]:
    """Return a color as seen with normal and three kinds of color-deficient vision (Machado et al., 2009)."""
    kinds = (
        np.eye(3),
        [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
        [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
        [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
    )
    linear = np.array([int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]) ** 2.2
    return [np.clip(np.asarray(kind) @ linear, 0, 1) ** (1 / 2.2) for kind in kinds]


def test_outline_colors_differ_for_color_blind_readers(tmp_path: Path) -> None:
    segmented(tmp_path, a_case())
    source = write_report(tmp_path).read_text(encoding="utf-8")
    styles = ("truth", "prediction", "both")
    legend = [re.findall(rf"\.{style} {{ stroke: (#[0-9a-f]{{6}})", source) for style in styles]
    colors = ["#{:02x}{:02x}{:02x}".format(*color[:3]) for color in OUTLINE_COLORS[2:]]
    # in light and dark mode, in the legend and in the pictures
    assert legend == [[color] for color in colors]
    for one, other in itertools.combinations(map(simulated, colors), 2):
        assert all(np.abs(a - b).max() > 0.4 for a, b in zip(one, other, strict=True))


def test_score_titles_name_patient_or_whole_image(tmp_path: Path) -> None:
    result = segmented(tmp_path, a_case(), a_case(part=None, parts=None), a_case(part=None, size=[60, 80]))
    section = build_image_section(tmp_path, Result.from_record(result))
    assert section is not None
    titles = [case["metric"] for case in section["cases"]]
    assert titles == ["Dice of the patient", "Dice", "Dice of the whole image"]


def test_missing_image_file_is_reported(tmp_path: Path) -> None:
    segmented(tmp_path, a_case())
    (tmp_path / "pictures.safetensors").unlink()
    text = read(tmp_path).text
    assert "the run stored images of test cases, but pictures.safetensors is not in its folder" in text
    assert "Best case" not in text


def test_broken_file_and_missing_tensor_are_named(tmp_path: Path) -> None:
    result = segmented(tmp_path, a_case())
    save_file({"0/truth": TRUTH}, tmp_path / "pictures.safetensors")
    with pytest.raises(RunFolderError, match=r"pictures\.safetensors: 0/output/0 is missing"):
        build_image_section(tmp_path, Result.from_record(result))
    (tmp_path / "pictures.safetensors").write_bytes(b"no file of tensors")
    with pytest.raises(RunFolderError, match="as safetensors"):
        build_image_section(tmp_path, Result.from_record(result))


def test_panels_name_the_evaluated_model(tmp_path: Path) -> None:
    result = segmented(tmp_path, a_case())
    section = build_image_section(tmp_path, Result.from_record({**result, "evaluated_model": "virtual"}))
    assert section is not None
    assert [panel["name"] for panel in section["cases"][0]["panels"]] == ["truth", "average", "north"]


def test_models_beyond_maximum_are_counted(tmp_path: Path) -> None:
    models = [{"name": f"node-{k}", "score": 1.0} for k in range(9)]
    result = segmented(tmp_path, a_case(models=models))
    tensors = {f"0/output/{k}": FOUND for k in range(9)}
    image = np.zeros((1, 6, 8), np.uint8)
    save_file({**tensors, "0/truth": TRUTH, "0/image": image}, tmp_path / "pictures.safetensors")
    section = build_image_section(tmp_path, Result.from_record(result))
    assert section is not None
    assert section["more"] == 3
    assert len(section["cases"][0]["panels"]) == 7  # the truth and six models


# --- reconstructions ---


def test_errors_of_all_cases_share_one_scale(tmp_path: Path) -> None:
    """A constant error of 0.1 in the first case and 0.2 in the second has half and full brightness."""
    cases = [a_case(rank, "image", models=[{"name": "student", "score": 90.0}]) for rank in ("best", "worst")]
    truth = np.full((1, 4, 4), 0.5, np.float16)
    tensors = {f"{k}/truth": truth + 0 * k for k in range(2)} | {f"{k}/seen": truth + 1 for k in range(2)}
    tensors |= {"0/output/0": truth + np.float16(0.1), "1/output/0": truth - np.float16(0.2)}
    result = segmented(tmp_path, *cases)
    save_file(tensors, tmp_path / "pictures.safetensors")
    section = build_image_section(tmp_path, Result.from_record(result))
    assert section is not None
    assert section["max_error"] == "20.0%"
    shades = []
    for case in section["cases"]:
        assert [panel["name"] for panel in case["panels"]] == ["truth", "measured, zero-filled", "student"]
        address = re.search(r'src="([^"]+)"', case["errors"][1])
        assert address is not None
        shades.append(decoded(address[1])[0, 0].tolist())  # its index among the colors
    assert shades[1] == 255
    assert shades[0] in (127, 128)
    page = read(tmp_path)
    assert "absolute error, 0 20.0% of white, or more" in page.text
    assert "error of student" in page.attributes("alt")


# --- generated inputs ---


def test_generated_images_are_above_their_label_maps(tmp_path: Path) -> None:
    folder = a_folder(tmp_path, a_result())
    images, maps = np.zeros((3, 1, 8, 8), np.uint8), np.zeros((3, 8, 8), np.uint8)
    maps[1] = 2
    save_file(
        {"000002": images, "000002.maps": maps, "000004": images.copy()}, folder / "samples.safetensors"
    )
    page = read(folder)
    labels = page.attributes("aria-label")
    assert sum(label == "label maps of the generated inputs" for label in labels) == 1
    assert "3 generated inputs at step 4" in labels
    sources = [attrs["src"] or "" for tag, attrs in page.tags if tag == "img"]
    kinds = [decoded(source)[0] for source in sources if decoded_is_indexed(source)]
    assert len(sources) == 9
    assert len(kinds) == 3


def test_images_from_label_maps_are_fewer_and_larger(tmp_path: Path) -> None:
    folder = a_folder(tmp_path, a_result())
    tensors: dict[str, npt.NDArray[np.uint8]] = {}
    for step in range(0, 101, 10):
        tensors[f"{step:06d}"] = np.zeros((12, 1, 256, 256), np.uint8)
        tensors[f"{step:06d}.maps"] = np.zeros((12, 256, 256), np.uint8)
    save_file(tensors, folder / "samples.safetensors")
    page = read(folder)
    labels = [label for label in page.attributes("aria-label") if "generated inputs at step" in label]
    assert [label.rpartition(" ")[2] for label in labels] == ["10", "40", "70", "100"]  # equally spaced
    assert labels[0].startswith("6 generated")
    first = next(attrs["src"] or "" for tag, attrs in page.tags if tag == "img")
    assert decoded(first).shape == (128, 128)


def decoded_is_indexed(address: str) -> bool:
    return base64.b64decode(address.removeprefix("data:image/png;base64,"))[25] == 3
