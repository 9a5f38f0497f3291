"""Feature cache: reuse, damaged files, full disks and permissions."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from fedstill.core.errors import ModelError
from fedstill.data import features as cached_features
from fedstill.data.features import FeatureCache, compute_features, compute_features_of_parts
from fedstill.models.backbones import Backbone, Features, RawInputs, load_backbone
from tests.support.models import save_tiny_encoder

RAW = RawInputs((1, 8, 8))


class Counted:
    """Counts the examples computed by a backbone."""

    def __init__(self, backbone: Backbone) -> None:
        self.examples = 0
        backbone.register_forward_hook(self._count)

    def _count(self, module: object, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        self.examples += len(output)


@pytest.fixture
def backbone() -> Backbone:
    return load_backbone(Features("random-conv:4"), RAW)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.rand(50, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def cache(folder: Path, backbone: Backbone, **options: float) -> FeatureCache:
    return FeatureCache.from_options(Features("random-conv:4", cache=str(folder), **options), backbone)


def test_features_are_computed_once_for_any_order_of_the_examples(
    tmp_path: Path, backbone: Backbone, x: torch.Tensor
) -> None:
    first = compute_features(backbone, x, cache(tmp_path, backbone))
    torch.testing.assert_close(first, backbone(x))
    counted = Counted(backbone)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(1))
    assert torch.equal(compute_features(backbone, x[order], cache(tmp_path, backbone)), first[order])
    assert counted.examples == 0


def test_padding_that_all_texts_of_a_batch_share_is_not_computed(tmp_path: Path) -> None:
    words = save_tiny_encoder(tmp_path)
    encoder = load_backbone(
        Features(f"hf:{tmp_path}", precision="float32"), RawInputs((6,), vocabulary=words)
    )
    ids = torch.tensor([[2, 5, 6, 7, 8, 3], [2, 5, 3, 0, 0, 0], [2, 6, 7, 8, 3, 0], [2, 3, 0, 0, 0, 0]])
    expected, lengths = encoder(ids), list[int]()
    encoder.register_forward_hook(lambda module, inputs, output: lengths.append(inputs[0].shape[1]))
    options = Features(f"hf:{tmp_path}", cache=str(tmp_path / "cache"))
    features = compute_features(encoder, ids, FeatureCache.from_options(options, encoder), batch=2)
    torch.testing.assert_close(features, expected)
    assert lengths == [3, 6]  # texts of similar length are in one batch


def test_each_cached_file_is_read_once_for_all_parts(
    tmp_path: Path, backbone: Backbone, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a thousand nodes with examples in all files would read each file a thousand times."""
    monkeypatch.setattr(cached_features, "CHUNK", 20)
    whole = compute_features(backbone, x[:40], cache(tmp_path, backbone))
    read: list[Path] = []
    original = FeatureCache._read_chunk

    def counted_read(self: FeatureCache, path: Path) -> torch.Tensor | None:
        read.append(path)
        return original(self, path)

    monkeypatch.setattr(FeatureCache, "_read_chunk", counted_read)
    counted = Counted(backbone)
    parts = [x[0:40:2], x[1:40:2], x[40:], x[:0]]
    features = compute_features_of_parts(backbone, parts, cache(tmp_path, backbone))
    assert len(read) == len(set(read)) == 2
    assert counted.examples == 10
    torch.testing.assert_close(features, [whole[0::2], whole[1::2], backbone(x[40:]), whole[:0]])


def test_only_changed_examples_are_computed_again(
    tmp_path: Path, backbone: Backbone, x: torch.Tensor
) -> None:
    compute_features(backbone, x, cache(tmp_path, backbone))
    counted, changed = Counted(backbone), x.clone()
    changed[7] += 0.5
    again = compute_features(backbone, changed, cache(tmp_path, backbone))
    assert counted.examples == 1
    torch.testing.assert_close(again, backbone(changed))


def test_features_of_another_backbone_are_not_used(
    tmp_path: Path, backbone: Backbone, x: torch.Tensor
) -> None:
    compute_features(backbone, x, cache(tmp_path, backbone))
    other = load_backbone(Features("random-conv:8"), RAW)
    torch.testing.assert_close(compute_features(other, x, cache(tmp_path, other)), other(x))


def test_interrupted_computation_resumes(
    tmp_path: Path, backbone: Backbone, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cached_features, "CHUNK", 20)

    def stop(done: int, total: int) -> None:
        if done == 40:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compute_features(backbone, x, cache(tmp_path, backbone), progress=stop)
    counted = Counted(backbone)
    compute_features(backbone, x, cache(tmp_path, backbone))
    assert counted.examples == 10


@pytest.mark.parametrize("how", ["cut", "flipped"])
def test_damaged_chunk_is_computed_again_with_one_note(
    tmp_path: Path, backbone: Backbone, x: torch.Tensor, how: str
) -> None:
    compute_features(backbone, x, cache(tmp_path, backbone))
    (path,) = tmp_path.glob("*/*.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content if how == "flipped" else content[:100])
    again = cache(tmp_path, backbone)
    torch.testing.assert_close(compute_features(backbone, x, again), backbone(x))
    assert again.notes == [f"{path} is damaged; its features are computed again"]
    assert (
        cache(tmp_path, backbone)
        .read(cached_features.example_hashes(x), torch.empty(50, backbone.width))
        .all()
    )


def test_any_truncated_or_flipped_file_is_detected(
    tmp_path: Path, backbone: Backbone, x: torch.Tensor
) -> None:
    """At the start, where the header has the names and shapes of the tensors, and at random places."""
    expected = compute_features(backbone, x, cache(tmp_path, backbone))
    (path,) = tmp_path.glob("*/*.safetensors")
    whole, draws = path.read_bytes(), random.Random(0)
    places = [*range(0, 220, 20), *(draws.randrange(len(whole)) for _ in range(10))]
    for at in places:
        flipped = bytearray(whole)
        flipped[at] ^= 1 << draws.randrange(8)
        for damaged in (whole[:at], bytes(flipped)):
            path.write_bytes(damaged)
            again = cache(tmp_path, backbone)
            assert torch.equal(compute_features(backbone, x, again), expected), at
            assert len(again.notes) == 1, at


def test_file_that_may_not_be_read_is_not_deleted(
    tmp_path: Path, backbone: Backbone, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute_features(backbone, x, cache(tmp_path, backbone))
    (path,) = tmp_path.glob("*/*.safetensors")

    def refused(*given: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(cached_features, "safe_open", refused)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may read all files
    monkeypatch.setattr(os, "replace", refused)
    other = cache(tmp_path, backbone)
    torch.testing.assert_close(compute_features(backbone, x, other), backbone(x))
    assert path.exists()
    assert len(other.notes) == 2
    assert "cannot be read" in other.notes[0]


def test_folder_of_another_user_is_not_a_cache(
    tmp_path: Path, backbone: Backbone, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: Path, pattern: str) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "glob", refused)
    theirs = cache(tmp_path, backbone)
    torch.testing.assert_close(compute_features(backbone, x, theirs), backbone(x))
    assert theirs.notes == [f"features are not cached in {tmp_path}: Permission denied"]


def test_chunk_with_fewer_features_than_hashes_is_computed_again(
    tmp_path: Path, backbone: Backbone, x: torch.Tensor
) -> None:
    compute_features(backbone, x, cache(tmp_path, backbone))
    (path,) = tmp_path.glob("*/*.safetensors")
    tensors = {
        "hashes": torch.tensor(list(b"".join(cached_features.example_hashes(x))), dtype=torch.uint8),
        "features": torch.zeros(7, backbone.width),
    }
    path.write_bytes(save(tensors, {"checksum": cached_features._checksum(**tensors)}))
    torch.testing.assert_close(compute_features(backbone, x, cache(tmp_path, backbone)), backbone(x))


def test_two_processes_may_write_the_same_chunk(
    tmp_path: Path, backbone: Backbone, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace, first, second = os.replace, cache(tmp_path, backbone), cache(tmp_path, backbone)

    def replace_after_another(part: Path, path: Path) -> None:
        monkeypatch.setattr(os, "replace", replace)
        compute_features(backbone, x, second)
        replace(part, path)

    monkeypatch.setattr(os, "replace", replace_after_another)
    compute_features(backbone, x, first)
    assert first.notes == second.notes == []
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 1


def test_no_examples_have_no_features(tmp_path: Path, backbone: Backbone, x: torch.Tensor) -> None:
    assert compute_features(backbone, x[:0], cache(tmp_path, backbone)).shape == (0, backbone.width)


def test_features_of_a_custom_factory_are_not_cached(tmp_path: Path, x: torch.Tensor) -> None:
    """The code of a factory may change between two runs, without a change of the digest."""
    options = Features("tests.support.models:tiny_backbone", cache=str(tmp_path / "cache"))
    custom = load_backbone(options, RAW)
    compute_features(custom, x, FeatureCache.from_options(options, custom))
    assert not (tmp_path / "cache").exists()


def test_full_disk_does_not_lose_features(
    tmp_path: Path, backbone: Backbone, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(part: Path, path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    monkeypatch.setattr(cached_features, "CHUNK", 20)
    unsaved = cache(tmp_path, backbone)
    torch.testing.assert_close(compute_features(backbone, x, unsaved), backbone(x))
    assert unsaved.notes == [f"features are not cached in {tmp_path}: No space left on device"]
    assert not list(tmp_path.rglob("*.*"))


def test_cache_is_accessible_to_its_owner_only(tmp_path: Path, backbone: Backbone, x: torch.Tensor) -> None:
    compute_features(backbone, x, cache(tmp_path / "cache", backbone))
    for path in [tmp_path / "cache", *(tmp_path / "cache").rglob("*")]:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600)


def test_limit_deletes_features_of_other_backbones(
    tmp_path: Path, backbone: Backbone, x: torch.Tensor
) -> None:
    other = load_backbone(Features("random-conv:8"), RAW)
    compute_features(other, x, cache(tmp_path, other))
    used = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    compute_features(backbone, x, cache(tmp_path, backbone, cache_gib=used / 2**30))
    assert [path.parent.name for path in tmp_path.rglob("*.safetensors")] == [f"{backbone.digest}-float32"]


def test_limit_deletes_no_other_files(tmp_path: Path, backbone: Backbone, x: torch.Tensor) -> None:
    name = "0123456789abcdef" * 2
    others = [
        "my-model/model.safetensors",
        f"my-model/{name}.safetensors",
        f"{name}-float32/model.safetensors",
    ]
    left = [f"{name}-float32/{name}.safetensors", f"{name}-float32/{name}.{name[:16]}.part"]
    for path in (tmp_path / each for each in others + left):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(100_000))
    compute_features(backbone, x, cache(tmp_path, backbone, cache_gib=100_000 / 2**30))
    assert all((tmp_path / each).exists() for each in others)
    assert not any((tmp_path / each).exists() for each in left)


def test_cache_that_is_too_small_is_not_written(tmp_path: Path, backbone: Backbone, x: torch.Tensor) -> None:
    small = cache(tmp_path, backbone, cache_gib=2**-20)
    compute_features(backbone, x, small)
    assert not list(tmp_path.rglob("*.safetensors"))
    assert small.notes == ["features are not cached: features.cache_gib = 9.54e-07 is too small"]


def test_equal_examples_are_computed_once(tmp_path: Path, backbone: Backbone, x: torch.Tensor) -> None:
    counted = Counted(backbone)
    features = compute_features(backbone, x[[3, 3, 3, 5]], cache(tmp_path, backbone))
    assert counted.examples == 2
    assert torch.equal(features[0], features[2])


# --- backbones that fail ------------------------------------------------------------------------------


def fails(output: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("a batch of 2\nis expected")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda output: output * float("nan"), r"NaN or infinity \("),
        (lambda output: output.index_fill(0, torch.tensor(7), float("inf")), "infinity"),
        (lambda output: output[:1], r"\(1, \d+\) for 50 inputs \(expected \(50, \d+\)\)"),
        (fails, r"a batch of 50: RuntimeError: a batch of 2 \(expected another features\.batch\)$"),
    ],
)
def test_backbone_that_fails_is_refused_in_one_line_and_not_cached(
    tmp_path: Path,
    backbone: Backbone,
    x: torch.Tensor,
    change: Callable[[torch.Tensor], torch.Tensor],
    message: str,
) -> None:
    backbone.network.register_forward_hook(lambda module, inputs, output: change(output))
    with pytest.raises(ModelError, match=rf"^backbone: .*{message}") as caught:
        compute_features(backbone, x, cache(tmp_path, backbone))
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_inputs_that_are_not_finite_are_named(tmp_path: Path, backbone: Backbone, x: torch.Tensor) -> None:
    x[3, 0, 0, 0] = float("nan")
    with pytest.raises(ModelError, match="for inputs that hold them"):
        compute_features(backbone, x, cache(tmp_path, backbone))
