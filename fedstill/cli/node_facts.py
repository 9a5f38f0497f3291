"""Facts of a node for ``fedstill node check``: data, model, compute, policy, privacy and link."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from fedstill.core.dataset import TensorData
    from fedstill.data.data_spec import DataSpec
    from fedstill.node.node_file import NodeFile
    from fedstill.node.owner_folder import FolderCheck
    from fedstill.node.policy import PolicyConfig

FEW = 20  # classes that are shown one by one


def node_facts(folder: Path, file: NodeFile, found: FolderCheck) -> dict[str, list[str]]:
    """Return lines by topic."""
    from fedstill.cli.node_check_privacy_section import privacy_facts, schema_fact
    from fedstill.core.startup_kit import KIT_FOLDER, StartupKit
    from fedstill.core.text_format import format_count, format_shape
    from fedstill.data.node_data import SOURCES
    from fedstill.node.startup_kit_faults import kit_faults
    from fedstill.node.sum_history import SUM_HISTORY_FILE, SumHistory

    facts: dict[str, list[str]] = {}
    if found.data is not None and found.spec is not None:
        source = file.data.path if file.data.source in SOURCES else file.data.source
        facts["data"] = [f"{len(found.data)} examples, {format_shape(found.spec.shape)}, from {source}"]
        if counts := _counts(found.spec, found.data):
            facts["data"].append(counts)
    elif found.unreported:
        facts["data"] = [found.unreported.removeprefix("data ")]
    if found.model is not None:
        facts["model"] = [f"{file.model.name}, {_about_model(found.model, file.model.weights)}"]
    if found.compute is not None:
        facts["compute"] = [f"{found.compute.device}, {found.compute.precision}"]
    policy = file.policy
    limits = {
        "queries": policy.max_queries,
        "bytes": policy.max_bytes,
        "inputs a query": policy.max_rows,
    }
    facts["policy"] = [
        f"queries {', '.join(policy.queries) or 'none'}; "
        + ("outputs only; " if policy.outputs_only else "parameters may leave; ")
        + (", ".join(f"at most {most} {what}" for what, most in limits.items() if most) or "no limits")
    ]
    facts["policy"] += admission_facts(policy)
    if found.spec is not None and found.spec.schema:
        facts["schema"] = [schema_fact(file)]
    facts["privacy"] = privacy_facts(folder, file, found.data)
    if not file.online:
        facts["link"] = ["none: the node responds to files of queries"]
    elif not kit_faults(folder, None):
        kit = StartupKit(folder / KIT_FOLDER)
        until = f"its certificate is valid until {kit.valid_until:%Y-%m-%d}"
        authority = f"its authority is {kit.authority_fingerprint}"
        facts["link"] = [f"dials out to {kit.server_address('client')}; {until}", authority]
        if corrupted := SumHistory(folder / SUM_HISTORY_FILE).corrupted:
            most = policy.max_corrupted_sums
            then = ", and all are from now on" if 0 < most <= corrupted else ""
            facts["link"].append(
                f"responses of this node have corrupted {format_count(corrupted, 'sum')}{then} "
                f"(max_corrupted_sums: {most})"
            )
    return facts


def admission_facts(policy: PolicyConfig) -> list[str]:
    """Return a line on the runs that a node admits; empty if it admits all."""
    conditions = {
        f"runs need your approval ({policy.approve})": policy.approve != "policy",
        f"{policy.min_records} examples or more": policy.min_records,
        f"{policy.min_nodes} nodes or more": policy.min_nodes,
        f"{len(policy.allowed_servers)} servers by name": policy.allowed_servers,
        policy.hours: policy.hours,
    }
    words = "; ".join(words for words, there in conditions.items() if there)
    return [words] if words else []


def _counts(spec: DataSpec, data: TensorData) -> str:
    """Return the class counts in one line; empty if there are no classes."""
    task, classes = spec.make_task(), spec.classes
    if task.kind == "image":
        return ""
    counts = task.counts(data).tolist()
    if task.kind == "map":
        shares = (
            f"{name}: {100 * count / len(data):.3g}%" for name, count in zip(classes, counts, strict=True)
        )
        return f"{', '.join(shares)} of all pixels"
    if len(classes) > FEW:
        there = [round(count) for count in counts if count]
        least, most = min(there, default=0), max(there, default=0)
        return f"{len(there)} of {len(classes)} classes, {least} to {most} of each"
    return ", ".join(f"{name}: {count:.0f}" for name, count in zip(classes, counts, strict=True))


def _about_model(model: nn.Module, weights: str) -> str:
    from fedstill.models.predictors import Predictor

    if isinstance(model, Predictor):
        return f"{model.extra_repr()}: it only predicts, and nothing of it is trained"
    sizes = [parameter.numel() for parameter in model.parameters()]
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    share = "all" if trained == sum(sizes) else f"{trained:,}" if trained else "none"
    origin = f", from {weights}" if weights else ""
    return f"{sum(sizes):,} parameters{origin}, {share} trained here"
