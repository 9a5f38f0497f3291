"""Payload kinds: the declared meaning of each tensor that server and nodes exchange.

Policies, privacy mechanisms, checks and reports decide by the kind of a tensor. A method declares a custom
kind next to the query that releases it; there is no central list.
"""

from __future__ import annotations

from typing import Any, Literal

Category = Literal[
    "query", "scores", "rows", "responses", "critic", "gradients", "counts", "moments", "records", "model"
]

OUTPUT_CATEGORIES = ("scores", "rows", "responses", "critic", "gradients", "counts")


class PayloadKind(str):
    """Declared meaning of a tensor, such as logits, gradients or parameters; a string that equals its name.

    The node's policy decides by ``category``. Privacy mechanisms trust it, too.

    Args:
        name: name in audit logs, policies and reports.
        description: one line for data owners.
        category: the source of the values.

            - ``query``: sent to nodes only, or chosen by the server.
            - ``scores``: one row of class scores for each input.
            - ``rows``: other vectors that can be bounded and noised one by one.
            - ``responses``: other outputs of networks.
            - ``critic``: outputs of a network that every mechanism trains privately.
            - ``gradients``: gradients with respect to the inputs.
            - ``counts``: numbers of records. One record moves them by 1 in total, or counts by class by the
              task's ``count_sensitivity``.
            - ``moments``: sums over the records of vectors with a root mean square of 1 at most, such as
              numbers of magnitude 1 at most.
            - ``records``: the records, or values computed from each record.
            - ``model``: parameters of a network.
        by_class: for counts: there is one count for each class.
        from_label_maps: for records: policy option ``label_maps`` allows the release.
        normal_size: root mean square below which a tensor is never reported as an outlier among the nodes.
            None: sizes are not compared between nodes.
        opt_out: how to run the method without this kind.

    >>> PayloadKind("class logits", "mean scores by class", category="rows").is_output
    True
    """

    description: str
    category: Category
    by_class: bool
    from_label_maps: bool
    normal_size: float | None
    opt_out: str

    def __new__(
        cls,
        name: str,
        description: str = "",
        *,
        category: Category = "records",
        by_class: bool = False,
        from_label_maps: bool = False,
        normal_size: float | None = None,
        opt_out: str = "",
    ) -> PayloadKind:
        kind = super().__new__(cls, name)
        kind.description, kind.category, kind.by_class = description, category, by_class
        kind.from_label_maps, kind.normal_size = from_label_maps, normal_size
        kind.opt_out = opt_out
        return kind

    def with_opt_out(self, opt_out: str) -> PayloadKind:
        """Return the same kind with a method's way to run without it."""
        attributes: dict[str, Any] = {**vars(self), "opt_out": opt_out}
        return PayloadKind(str(self), **attributes)

    @property
    def must_be_named(self) -> bool:
        """True if a policy of outputs only releases it only where the owner names it."""
        return self.category == "moments"

    @property
    def is_output(self) -> bool:
        """True for outputs, which a policy of outputs only releases; false for records and networks."""
        return self.category in OUTPUT_CATEGORIES


INPUTS = PayloadKind("inputs", "the inputs of the server's query", category="query")
INDICES = PayloadKind("indices", "row numbers of the public data that a query is about", category="query")
SCHEDULE = PayloadKind("schedule", "the number of the round", category="query")
SOURCES = PayloadKind(
    "sources", "numbers of the nodes' label maps that the server's images are made from", category="query"
)
LOGITS = PayloadKind(
    "logits",
    "the score that a node's model gives each class, for each input of a query",
    category="scores",
    normal_size=0.0,
)
CRITIC = PayloadKind(
    "critic",
    "how unlike the node's own data its critic finds each input, patch by patch",
    category="critic",
    normal_size=1.0,  # an untrained critic gives values near 0
)
GRADIENTS = PayloadKind(
    "gradients", "gradients of the server's loss with respect to its inputs", category="gradients"
)
LABEL_COUNTS = PayloadKind(
    "label counts", "how many examples of each class a node holds", category="counts", by_class=True
)
COLUMN_SUMS = PayloadKind(
    "column sums",
    "the sum of each column of numbers of a node's table, and of its squares, within the schema's ranges",
    category="moments",
)
DATA_SIZES = PayloadKind("data sizes", "how many examples a node holds", category="counts")
LABEL_MAPS = PayloadKind(
    "label maps",
    "the class of each pixel in a node's training images, or in the images of a query",
    from_label_maps=True,
)
DIFFERENCE = PayloadKind(
    "difference",
    "the distance of a generated image from the node's own image of the same label map",
    from_label_maps=True,
)
PRIVATE_DATA = PayloadKind("private data", "the training examples, unchanged")
# Parameters include batch norm's counts of batches.
PARAMETERS = PayloadKind("parameters", "the weights of a model", category="model", normal_size=1.0)
EXTRACTOR_PARAMETERS = PayloadKind(
    "extractor parameters",
    "the weights of a model without its last part, the head",
    category="model",
    normal_size=1.0,
)
HEAD_PARAMETERS = PayloadKind(
    "head parameters",
    "the weights of a model's last part, the classifier",
    category="model",
    normal_size=1.0,
)
GENERATOR_PARAMETERS = PayloadKind(
    "generator parameters",
    "the weights of a network that generates inputs or features like the node's",
    category="model",
    normal_size=1.0,
)

KNOWN_KINDS = {str(kind): kind for kind in list(vars().values()) if isinstance(kind, PayloadKind)}


def payload_kind(name: str) -> PayloadKind:
    """Return the kind of a name. An undeclared name gets the strictest category, records."""
    return name if isinstance(name, PayloadKind) else KNOWN_KINDS.get(name) or PayloadKind(name)
