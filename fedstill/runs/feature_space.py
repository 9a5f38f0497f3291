"""From images or texts to features: a run whose models are heads on a pretrained backbone.

The features of all examples are computed once, before the run, and cached on disk
(:mod:`fedstill.data.features`). The run itself then works on rows ``(N, F)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fedstill.core.compute import Compute
from fedstill.core.dataset import DataSet, TensorData
from fedstill.core.errors import ArgumentError
from fedstill.core.progress import ProgressBar
from fedstill.core.table_schema import NO_SCHEMA
from fedstill.data.features import FeatureCache, compute_features
from fedstill.data.public import GAUSSIAN, PublicConfig, PublicData, gaussian_features
from fedstill.models.backbones import (
    Backbone,
    Features,
    FeatureScale,
    RawInputs,
    batch_norm_moments,
    load_backbone,
)
from fedstill.runs.data_digests import digest_examples, digest_run_data


@dataclass(frozen=True, eq=False)
class FeatureSpace:
    """Backbone of a run, and the normalization of its features.

    Args:
        options: the options.
        backbone: maps the inputs of the data to features.
        scale: normalization of the features.
        data_digest: digest of the nodes' examples as they were before.
        run_data_digest: digest of these, the test examples and the public data.
        notes: remarks for the result.
    """

    options: Features
    backbone: Backbone
    scale: FeatureScale
    data_digest: str
    run_data_digest: str
    notes: tuple[str, ...] = ()

    def to_record(self) -> dict[str, Any]:
        """Return the entry of the backbone in a run's description."""
        return {
            "backbone": self.options.backbone,
            "digest": self.backbone.digest,
            "features": self.backbone.width,
            "normalize": self.options.normalize,
            "precision": self.backbone.precision,
        }


class FeatureExtractor:
    """Computes the features of all parts of a run's data, with one progress bar.

    Args:
        options: backbone and its options.
        raw: inputs as the data are.
        compute: device.
        bars: progress bars.
        total: number of examples of all parts.
    """

    def __init__(
        self, options: Features, raw: RawInputs, compute: Compute, bars: ProgressBar, total: int
    ) -> None:
        self.options, self.device, self.bars, self.total, self.done = options, compute.device, bars, total, 0
        self.backbone = load_backbone(options, raw, str(compute.device))
        self.cache = FeatureCache.from_options(options, self.backbone)

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the features of inputs ``(N, ...)``."""
        start = self.done
        features = compute_features(
            self.backbone,
            inputs,
            self.cache,
            batch=self.options.batch,
            device=self.device,
            progress=lambda done, _: self.bars.update("features", start + done, self.total),
        )
        self.done += len(inputs)
        self.bars.update("features", self.done, self.total)
        return features

    def scale(self, public: torch.Tensor | None) -> FeatureScale:
        """Return the normalization of features.

        Args:
            public: features of public data ``(N, F)``, if there are some.

        Raises:
            ArgumentError: there are fewer than 2, or the backbone has no batch normalization.
        """
        normalize = self.options.normalize
        if normalize == "backbone":
            return FeatureScale(False, *batch_norm_moments(self.backbone))
        if normalize != "public":
            return FeatureScale(normalize == "example")
        if public is None:
            expected = (
                "none, example or backbone, as there are no public data of the form of the private data"
            )
            raise ArgumentError("features.normalize", "public", expected)
        if len(public) < 2:  # one has no deviation
            expected = "2 public examples or more, or another normalization"
            raise ArgumentError("features.normalize", "public", expected)
        return FeatureScale(False, public.double().mean(0), public.double().std(0))


def to_feature_space(
    options: Features,
    raw: RawInputs,
    public_config: PublicConfig,
    parts: Sequence[TensorData],
    test: TensorData,
    public: PublicData | None,
    *,
    compute: Compute,
    progress: bool = False,
) -> tuple[list[TensorData], TensorData, PublicData | None, FeatureSpace]:
    """Return the nodes' data, test data and public data with features as inputs, and the feature space.

    Args:
        options: backbone and its options.
        raw: inputs as the data are.
        public_config: which says whether inputs are sampled in feature space.
        parts: each node's examples.
        test: test examples.
        public: public data, or None.
        compute: device.
        progress: show a progress bar.

    Raises:
        FedstillError: the backbone cannot be loaded, or does not take the inputs.
    """
    digests = digest_examples(parts), digest_run_data(parts, test, public)
    shared = [] if public is None else [public.inputs]
    inputs = [*shared, test.inputs, *(part.inputs for part in parts)]
    with ProgressBar(progress) as bars:
        extract = FeatureExtractor(options, raw, compute, bars, sum(map(len, inputs)))
        features = [extract(each) for each in inputs]
    scale = extract.scale(features[0] if shared else None)
    with torch.no_grad():
        features = [scale(each) for each in features]
    if public is not None:
        public = replace(public, inputs=features.pop(0))
    elif public_config.name == GAUSSIAN:
        public = gaussian_features(public_config, extract.backbone.width)
    space = FeatureSpace(options, extract.backbone, scale, *digests, tuple(extract.cache.notes))
    tested, *own = features
    new_parts = [replace(part, inputs=each) for part, each in zip(parts, own, strict=True)]
    return new_parts, replace(test, inputs=tested), public, space


def on_features(data: DataSet, test: TensorData) -> DataSet:
    """Return a data set whose test examples are features; its training examples are as they were."""
    return replace(data, test=test, mean=(), std=(), vocabulary=0, schema=NO_SCHEMA)
