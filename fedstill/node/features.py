"""Features of a node's own data, by the backbone that its owner names in ``node.toml``.

They are computed once, and cached in the node's folder. No server chooses what is loaded: a run on features
that differ from the owner's is refused. The time of the computation is rounded up, as it would reveal the
number of records.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import replace
from pathlib import Path

import torch

from fedstill.core.compute import Compute
from fedstill.core.dataset import TensorData
from fedstill.data.data_spec import DataSpec
from fedstill.data.features import FeatureCache, compute_features
from fedstill.data.public import PublicData
from fedstill.models.backbones import Backbone, Features, RawInputs, load_backbone, make_scale
from fedstill.node.admission import refuse
from fedstill.node.node_file import NodeFile
from fedstill.protocol.feature_plan import FeaturePlan
from fedstill.protocol.run_plan import RunPlan

logger = logging.getLogger("fedstill.node")

CACHE = "features"  # folder of the computed features, in the node's folder
SECONDS_BETWEEN_LINES = 10.0  # of the log


def own_features(file: NodeFile, folder: Path, spec: DataSpec) -> FeaturePlan:
    """Return the features of the owner's backbone, as the CPU would compute them.

    Args:
        file: the node's configuration, with a backbone.
        folder: the node's folder, from which paths count.
        spec: spec of the inputs.

    Raises:
        FedstillError: the backbone cannot be loaded, or does not take the inputs.
    """
    backbone = _load(file.features, folder, spec, "cpu")
    return FeaturePlan.from_backbone(backbone, file.features)


def _load(options: Features, folder: Path, spec: DataSpec, device: str) -> Backbone:
    raw = RawInputs(spec.shape, spec.mean, spec.std, spec.vocabulary)
    return load_backbone(options.in_folder(folder), raw, device)


def refusal_reason(backbone: str, own: FeaturePlan | None, planned: FeaturePlan | None) -> str | None:
    """Return why a run is refused whose features are not those of the owner's backbone, or None.

    Args:
        backbone: the owner's ``features.backbone``; empty: none.
        own: features of that backbone; None: it was not loaded.
        planned: features of the run; None: its models take the inputs.
    """
    if planned is None:
        return "features: node.toml names a backbone, and the run has none" if backbone else None
    if own is None:
        return f"features: the run has {planned.backbone}, and node.toml names no backbone"
    difference = planned.difference(own)
    return None if difference is None else f"features: the node's differ in {difference}"


def load_run_backbone(file: NodeFile, folder: Path, plan: RunPlan, compute: Compute) -> Backbone | None:
    """Return the owner's backbone if its features are those of the run; None: neither of them has features.

    Raises:
        QueryRefused: the features differ, with the option that does.
        FedstillError: the owner's backbone cannot be loaded.
    """
    options, planned = file.features, plan.features
    if planned is None or not options:
        refuse(file.name, "join", refusal_reason(options.backbone, None, planned))
        return None
    precision = planned.precision if options.precision == "auto" else options.precision
    backbone = _load(replace(options, precision=precision), folder, plan.spec, str(compute.device))
    own = FeaturePlan.from_backbone(backbone, options)
    refuse(file.name, "join", refusal_reason(options.backbone, own, planned))
    return backbone


def compute_own_features(
    data: TensorData,
    backbone: Backbone,
    file: NodeFile,
    folder: Path,
    public: PublicData | None,
    compute: Compute,
) -> TensorData:
    """Return a node's examples with normalized features as inputs ``(N, F)``, or components ``(N, M)``.

    Args:
        data: the examples, in the form of the run's inputs.
        backbone: the owner's backbone.
        file: the node's configuration.
        folder: the node's folder.
        public: public data of the run, by whose moments ``features.normalize = "public"`` normalizes.
        compute: device.

    Raises:
        ArgumentError: there are no moments, or the backbone has no batch normalization.
    """
    start = printed = time.monotonic()

    def log_progress(done: int, total: int) -> None:
        nonlocal printed
        if time.monotonic() - printed > SECONDS_BETWEEN_LINES:
            logger.info("features: %d of %d examples", done, total)
            printed = time.monotonic()

    options = file.features.in_folder(folder)
    scale = make_scale(options.normalize, backbone, None if public is None else public.moments)
    cache = FeatureCache.from_options(options, backbone, folder / CACHE)
    features = compute_features(
        backbone, data.inputs, cache, batch=options.batch, device=compute.device, progress=log_progress
    )
    for note in cache.notes:  # for the owner only
        logger.warning("%s", note)
    with torch.no_grad():
        data = replace(data, inputs=scale(features))
    elapsed = time.monotonic() - start
    time.sleep(rounded_seconds(elapsed) - elapsed)
    return data


def rounded_seconds(seconds: float) -> float:
    """Return a time rounded up to a power of two, at least a quarter of a second.

    >>> rounded_seconds(0.01), rounded_seconds(3.0), rounded_seconds(4.0)
    (0.25, 4.0, 4.0)
    """
    return max(2.0 ** math.ceil(math.log2(max(seconds, 1e-3))), 0.25)
