"""From images or texts to features: a run whose models are heads on a pretrained backbone.

The features of all examples are computed once, before the run, and cached on disk
(:mod:`fedstill.data.features`). The run itself then works on rows ``(N, F)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from fedstill.core.compute import Compute
from fedstill.core.dataset import DataSet, TensorData
from fedstill.core.errors import ArgumentError, ModelError
from fedstill.core.progress import ProgressBar
from fedstill.core.table_schema import NO_SCHEMA
from fedstill.data.features import FeatureCache, compute_features_of_parts
from fedstill.data.public import GAUSSIAN, PublicConfig, PublicData, gaussian_features
from fedstill.models.backbones import (
    Backbone,
    Features,
    FeatureScale,
    RawInputs,
    empty_scale,
    load_backbone,
    make_scale,
    raise_small_deviations,
)
from fedstill.models.inference import predict
from fedstill.models.principal_components import whitening_projection
from fedstill.protocol.feature_plan import FeaturePlan
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

    def to_plan(self) -> FeaturePlan:
        """Return what remote nodes get to know."""
        return FeaturePlan.from_backbone(self.backbone, self.options)

    @property
    def width(self) -> int:
        """Number of features that the models take."""
        return self.options.model_width(self.backbone.width)

    def head_inputs(self, inputs: torch.Tensor, compute: Compute) -> torch.Tensor:
        """Return the normalized features ``(N, width)`` of inputs ``(N, ...)``, which the models take."""
        return predict(nn.Sequential(self.backbone, self.scale), inputs, compute)

    def to_record(self) -> dict[str, Any]:
        """Return the entry of the backbone in a run's description."""
        return {
            "backbone": self.options.backbone,
            "digest": self.backbone.digest,
            "features": self.width,
            "normalize": self.options.normalize,
            "components": self.options.components,
            "precision": self.backbone.precision,
        }


UNNORMALIZED = (
    "The queries are standard normal vectors, and the features are not normalized: where the distributions "
    "differ, the responses teach little. See features.normalize."
)


def public_moments(features: torch.Tensor, components: int) -> dict[str, torch.Tensor]:
    """Return moments of the features of public data ``(N, F)``: ``mean`` ``(F,)``, and ``std`` ``(F,)``.

    With components, there is a ``projection`` ``(F, M)`` in place of ``std``
    (:func:`~fedstill.models.principal_components.whitening_projection`). Small deviations are raised
    (:func:`~fedstill.models.backbones.raise_small_deviations`).

    Raises:
        ArgumentError: there are fewer than 2, or fewer components vary on them.
        ModelError: a feature is not finite.
    """
    if not features.isfinite().all():
        raise ModelError("backbone: features of public data are not finite (expected finite numbers)")
    if len(features) < 2:  # one has no deviation
        expected = "2 public examples or more, or another normalization"
        raise ArgumentError("features.normalize", "public", expected)
    mean = features.double().mean(0)
    if components:
        return {"mean": mean, "projection": whitening_projection(features, components)}
    return {"mean": mean, "std": raise_small_deviations(features.double().std(0))}


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
    placeholder: bool = False,
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
        placeholder: return zeros as features, which are enough to check a run.

    Raises:
        FedstillError: the backbone cannot be loaded, or does not take the inputs; or there are too few public
            examples for the normalization.
    """
    shared = [] if public is None else [public.inputs]
    _check_shapes(raw.shape, public, test, parts)
    inputs = [*shared, test.inputs, *(part.inputs for part in parts)]
    backbone = load_backbone(options, raw, str(compute.device))
    is_public = options.normalize == "public" and bool(shared)
    width = options.model_width(backbone.width)
    if public is not None and 0 < len(public) <= options.components:
        expected = f"below {len(public)}, the number of public examples"
        raise ArgumentError("features.components", options.components, expected)
    scale = None if is_public else make_scale(options.normalize, backbone, None)  # refuses before any work
    cache = FeatureCache.from_options(options, backbone)
    if placeholder:
        digests, scale = ("", ""), scale or empty_scale(options, backbone.width)
        features = [torch.zeros(1, width).expand(len(each), -1) for each in inputs]
    else:
        digests = digest_examples(parts), digest_run_data(parts, test, public)
        with ProgressBar(progress) as bars:
            features = compute_features_of_parts(
                backbone,
                inputs,
                cache,
                batch=options.batch,
                device=compute.device,
                progress=partial(bars.update, "features"),
            )
        if scale is None:
            moments = public_moments(features[0], options.components)
            scale = make_scale(options.normalize, backbone, moments)
        with torch.no_grad():
            features = [scale(each) for each in features]
    public = public_on_features(public_config, public, width, None if public is None else features.pop(0))
    if public is not None and is_public:
        public = replace(public, moments=dict(scale.named_buffers()))
    notes = list(cache.notes)
    if public is not None and public_config.name == GAUSSIAN and options.normalize == "none":
        notes.append(UNNORMALIZED)
    space = FeatureSpace(options, backbone, scale, *digests, tuple(notes))
    tested, *own = features
    new_parts = [replace(part, inputs=each) for part, each in zip(parts, own, strict=True)]
    return new_parts, replace(test, inputs=tested), public, space


def _check_shapes(
    shape: tuple[int, ...], public: PublicData | None, test: TensorData, parts: Sequence[TensorData]
) -> None:
    named = {"public data": public, "test data": test}
    named |= {f"data of node {index}": part for index, part in enumerate(parts)}
    for name, examples in named.items():
        found = shape if examples is None else tuple(examples.inputs.shape[1:])
        if found != shape:
            raise ArgumentError(f"shape of {name}", found, f"{shape}, as the backbone takes them")


def public_on_features(
    config: PublicConfig, public: PublicData | None, width: int, features: torch.Tensor | None = None
) -> PublicData | None:
    """Return the public data of a run on features: the given ones, or vectors sampled in feature space.

    Args:
        config: source of the public data.
        public: public data before features, or None.
        width: number of features that the models take.
        features: features of the public data ``(N, width)``; None: zeros, which are enough to check a run.
    """
    if public is None:
        return gaussian_features(config, width) if config.name == GAUSSIAN else None
    return replace(public, inputs=torch.zeros(len(public), width) if features is None else features)


def on_features(data: DataSet, test: TensorData) -> DataSet:
    """Return a data set whose test examples are features; its training examples are as they were."""
    return replace(data, test=test, mean=(), std=(), vocabulary=0, schema=NO_SCHEMA)
