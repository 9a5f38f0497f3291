"""Labeled data sets divided over nodes, as :func:`fedstill.distil` takes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError, caller_context
from fedstill.data.loading import load as load_data_set
from fedstill.data.public import PublicData
from fedstill.runs.build import split_data
from fedstill.runs.spec import from_dict

__all__ = ["FederatedData", "digits", "load"]

MAX_SIZES = 10  # numbers of examples in a repr


@dataclass(frozen=True, eq=False)
class FederatedData:
    """A data set whose training examples are divided over nodes.

    Args:
        nodes: private examples of each node; inputs ``(N, C, H, W)`` or ``(N, L)``.
        test: examples for evaluation that no node has.
        classes: names of the classes.
        public: public examples, or None.
        mean, std: normalization of images, one value per channel; empty for other inputs.
        vocabulary: number of token ids of texts, or 0.
    """

    nodes: tuple[TensorData, ...]
    test: TensorData
    classes: tuple[str, ...]
    public: PublicData | None
    mean: tuple[float, ...]
    std: tuple[float, ...]
    vocabulary: int

    def __repr__(self) -> str:
        sizes = ", ".join(f"{len(part):,}" for part in self.nodes[:MAX_SIZES])
        more = ", ..." if len(self.nodes) > MAX_SIZES else ""
        return (
            f"FederatedData: {len(self.nodes)} nodes with {sizes}{more} examples; {len(self.test):,} test "
            f"examples; {len(self.classes)} classes; shape {self.shape}"
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one input, such as ``(1, 28, 28)``."""
        return tuple(self.test.inputs.shape[1:])

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of :func:`fedstill.distil` that follow from the data.

        Example:
            >>> import fedstill
            >>> data = fedstill.datasets.digits(nodes=3)
            >>> models = [fedstill.models.MLP(data.shape, 10) for _ in data.nodes]
            >>> student = fedstill.models.MLP(data.shape, 10)
            >>> quick = dict(method=fedstill.FedIOD(steps=2), local=fedstill.LocalConfig(epochs=1))
            >>> outcome = fedstill.distil(models=models, student=student, **data.arguments(), **quick)
            >>> len(outcome.models)
            3
        """
        given: dict[str, Any] = {"data": self.nodes, "test": self.test, "classes": self.classes}
        given |= {"mean": self.mean, "std": self.std, "vocabulary": self.vocabulary}
        if self.public is not None:
            labels = self.public.labels
            given["public"] = self.public.inputs if labels is None else (self.public.inputs, labels)
        return given


@caller_context("options")
def load(
    name: str,
    *,
    nodes: int = 5,
    partition: str = "dirichlet",
    public: str = "none",
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    **partition_options: Any,
) -> FederatedData:
    """Load a data set of images or texts for classification and divide its training examples over nodes, as
    a run with these options does. For tables, use :func:`fedstill.run_preset`.

    Args:
        name: name of a data set from ``fedstill list``, or ``"module:Name"`` of your own.
        nodes: number of nodes, 1 or more.
        partition: name of a split from ``fedstill list``, such as ``"dirichlet"`` (each class is divided by
            proportions from a Dirichlet distribution), ``"iid"`` or ``"shards"``.
        public: public data: ``"none"``, ``"held-out"`` training examples, or the name of another data set.
        seed: seed of the split, 0 or more.
        options: options of the data set, such as ``{"root": "~/data", "train_limit": 5000}``, or those of
            other tables by dotted name, such as ``{"public.limit": 1000}``. Default: none.
        partition_options: options of the split, such as ``alpha=0.1``.

    Raises:
        UnknownName: there is no such data set, split or option.
        DataError: the data are missing or cannot be divided; the message says where they are looked for.
        ArgumentError: an option has an invalid value.

    Example:
        >>> load("digits", nodes=2, partition="iid")
        FederatedData: 2 nodes with 719, 719 examples; 359 test examples; 10 classes; shape (1, 8, 8)
    """
    table: dict[str, Any] = {
        "seed": seed,
        "method": {"name": "standalone"},  # has no influence on the data
        "data": {"name": name},
        "split": {"name": partition, "nodes": nodes, **partition_options},
        "public": {"name": public},
    }
    for option, value in (options or {}).items():
        section, _, key = option.rpartition(".")
        target = table[section or "data"] if section in ("", "data", "split", "public") else {}
        if not target or key in target:
            raise ArgumentError("options", option, "other options of data, split and public")
        target[key] = value
    spec = from_dict(table)
    data = load_data_set(spec.data, spec.task)
    parts, public_data = split_data(spec, data)
    return FederatedData(
        tuple(parts), data.test, data.classes, public_data, data.mean, data.std, data.vocabulary
    )


def digits(
    *, nodes: int = 5, partition: str = "dirichlet", public: str = "none", seed: int = 0, **options: Any
) -> FederatedData:
    """Divide the handwritten digits of scikit-learn over nodes: 1,797 images of 8 x 8 pixels, 10 classes.

    They come with scikit-learn; nothing is downloaded. Arguments as of :func:`load`.

    Example:
        >>> data = digits(nodes=3, alpha=0.5)
        >>> [len(part) for part in data.nodes] == [len(part) for part in digits(nodes=3, alpha=0.5).nodes]
        True
    """
    return load("digits", nodes=nodes, partition=partition, public=public, seed=seed, **options)
