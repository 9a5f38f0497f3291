"""Hugging Face models: the real loading code on a tiny random model saved by the test. No network access."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import ANY

import pytest
import torch

from fedstill import models
from fedstill.core.errors import ModelError
from fedstill.models import custom_model, hugging_face
from fedstill.models.interface import Interface
from fedstill.models.model_config import CustomModel, ModelConfig
from fedstill.tasks.classification import ClassificationConfig
from tests.support.errors import raises_invalid

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "##s"]
LENGTH = 8


def save_model(folder: Path, labels: int = 2, safe: bool = True) -> str:
    """Save a DistilBERT model with two thousand weights and its tokenizer."""
    transformers = pytest.importorskip("transformers")
    config = transformers.DistilBertConfig(
        vocab_size=len(WORDS), dim=16, n_layers=1, n_heads=2, hidden_dim=32, max_position_embeddings=LENGTH,
        num_labels=labels, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.DistilBertForSequenceClassification(config)
    model.save_pretrained(folder)
    if not safe:
        (folder / "model.safetensors").unlink()
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / "vocab.txt").write_text("\n".join(WORDS), encoding="utf-8")
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    return f"hf:{folder}"


def build(spec: str, classes: int = 2, length: int = LENGTH, vocabulary: int = len(WORDS)) -> torch.nn.Module:
    return models.build(spec, (length,), classes, 0, "model", vocabulary=vocabulary)


IDS = torch.tensor([[2, 5, 7, 3, 0, 0, 0, 0], [2, 6, 7, 8, 3, 0, 0, 0]])


def test_saved_model_has_outputs_of_the_library(tmp_path: Path) -> None:
    model = build(save_model(tmp_path)).eval()
    models.check_module(model, (LENGTH,), (2,), "model", "texts")
    transformers = pytest.importorskip("transformers")
    theirs = transformers.DistilBertForSequenceClassification.from_pretrained(tmp_path).eval()
    expected = theirs(input_ids=IDS, attention_mask=(IDS != 0).long()).logits
    torch.testing.assert_close(model(IDS), expected)


def test_padding_does_not_change_outputs(tmp_path: Path) -> None:
    model = build(save_model(tmp_path)).eval()
    torch.testing.assert_close(model(IDS[:1]), model(IDS[:1, :4]))
    assert torch.isfinite(model(torch.zeros_like(IDS))).all()


def test_head_with_other_classes_is_replaced_by_seeded_head(tmp_path: Path) -> None:
    spec = save_model(tmp_path)
    one, same = (build(spec, classes=5).eval() for _ in range(2))
    assert one(IDS).shape == (2, 5)
    assert torch.equal(one(IDS), same(IDS))
    body = build(spec).get_submodule("model.distilbert").state_dict()
    for name, value in one.get_submodule("model.distilbert").state_dict().items():
        assert torch.equal(value, body[name])


def test_roberta_length_limit_excludes_unused_positions(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.RobertaConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=12, num_labels=2,
    )  # fmt: skip
    transformers.RobertaForSequenceClassification(config).save_pretrained(tmp_path)
    model = build(f"hf:{tmp_path}", length=10, vocabulary=20).eval()
    assert model(torch.full((1, 10), 5)).shape == (1, 2)
    with pytest.raises(ModelError, match=r"10 tokens .* 11 .*--data\.length 10"):
        build(f"hf:{tmp_path}", length=11, vocabulary=20)


def test_rejects_pickled_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot be loaded: .*model\.safetensors"):
        build(save_model(tmp_path, safe=False))


def test_rejects_model_with_too_few_tokens_or_positions(tmp_path: Path) -> None:
    spec = save_model(tmp_path)
    with pytest.raises(ModelError, match=r"9 tokens .* 8193"):
        build(spec, vocabulary=8193)
    with pytest.raises(ModelError, match=r"8 tokens .* 64 .*--data\.length 8"):
        build(spec, length=64)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"empty' cannot be loaded: .*config\.json"):
        build(f"hf:{tmp_path / 'empty'}")


def test_tokenizer_of_the_model_makes_token_ids(tmp_path: Path) -> None:
    where = save_model(tmp_path).removeprefix("hf:")
    ids, count = hugging_face.tokenize(where, ["Good films", "bad zyx", ""], 6)
    assert count == len(WORDS)
    assert ids.tolist() == [[2, 5, 7, 8, 3, 0], [2, 6, 1, 3, 0, 0], [2, 3, 0, 0, 0, 0]]
    ids, _ = hugging_face.tokenize(where, ["good bad film good bad film"], 5)
    assert ids.tolist() == [[2, 5, 6, 7, 3]]
    with raises_invalid("data.vocabulary", ANY, "a tokenizer"):
        hugging_face.tokenize(str(tmp_path / "none"), ["good"], 5)


@pytest.mark.parametrize("kind", ["bert", "mpnet"])
def test_folder_without_tokenizer_is_refused(tmp_path: Path, kind: str) -> None:
    """The library makes a tokenizer without words of BERT, and raises Exception itself for MPNet."""
    (tmp_path / "config.json").write_text(f'{{"model_type": "{kind}"}}')
    with raises_invalid("data.vocabulary", f"hf:{tmp_path}", "tokenizer"):
        hugging_face.tokenize(str(tmp_path), ["good film"], 5)


def test_swap_padding_is_its_own_inverse() -> None:
    ids = torch.tensor([[0, 5, 1, 1]])  # like RoBERTa: 0 starts a text and 1 is padding
    ours = hugging_face.swap_padding(ids, 1)
    assert ours.tolist() == [[1, 5, 0, 0]]
    assert torch.equal(hugging_face.swap_padding(ours, 1), ids)
    assert torch.equal(hugging_face.swap_padding(ids, 0), ids)


def test_image_classifier_by_name_or_object_maps_its_labels(
    tmp_path: Path,
) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=8,
        patch_size=4, num_channels=1, id2label={0: "ill", 1: "well"}, label2id={"ill": 0, "well": 1},
    )  # fmt: skip
    torch.manual_seed(0)
    library_model = transformers.ViTForImageClassification(config).eval()
    library_model.save_pretrained(tmp_path)
    x, classes = torch.randn(3, 1, 8, 8), ("well", "ill")
    expected = library_model(pixel_values=x).logits.flip(1)
    to = Interface(ClassificationConfig().make(classes), classes, (1, 8, 8))
    for chosen in (ModelConfig(name=f"hf:{tmp_path}"), CustomModel(source=library_model)):
        model = custom_model.build_model(chosen, to, Path(), 0).eval()
        torch.testing.assert_close(model(x), expected)
        assert models.carries_gradient(model, (1, 8, 8))
