"""What tensors that travel are of: kinds, and all that policies, mechanisms, checks and reports know of one.

A method declares a kind of its own where it declares the query that releases it; nobody else has a list.
"""

from __future__ import annotations

from typing import Any, Literal

Of = Literal[
    "query", "scores", "rows", "answers", "critic", "gradients", "counts", "moments", "records", "model"
]

OUTPUTS = ("scores", "rows", "answers", "critic", "gradients", "counts")


class PayloadKind(str):
    """A kind of tensor, by its name.

    A node's owner lets it out by ``of``; a kind that a plug-in's method releases bears its package's name
    (``my_lab: class logits``), and is let out only by that name.

    Args:
        name: by which audit logs, policies and reports know it.
        says: what it says, for whoever is in charge of the data.
        of: what it is computed from. ``query``: it only goes down, or is chosen by the server.
            ``scores``: a row of class scores for each input. ``rows``: other vectors that may be bounded and
            noised one by one, whatever they are computed from. ``responses``: other outputs of networks.
            ``critic``: outputs of a network that learns privately under every mechanism. ``gradients``: what
            is pulled back to the inputs. ``counts``: numbers of records. ``moments``: sums over the
            records of numbers that are at most 1 in magnitude. ``records``: the records themselves,
            or what is computed from each of them. ``model``: what a network has learned.
        by_class: of counts: they are counted by class.
        of_maps: of records: what policy ``label_maps`` lets out.
        common: the size (root mean square) that is none too many whatever other nodes have; None: sizes
            are not compared between nodes.
        without: how a run does without it.
        package: whose method releases it; empty: one of ours.

    >>> PayloadKind("class logits", "a mean score vector for each class", of="rows").at("my_lab")
    'my_lab: class logits'
    """

    says: str
    of: Of
    by_class: bool
    of_maps: bool
    common: float | None
    without: str
    package: str

    def __new__(
        cls,
        name: str,
        says: str = "",
        *,
        of: Of = "records",
        by_class: bool = False,
        of_maps: bool = False,
        common: float | None = None,
        without: str = "",
        package: str = "",
    ) -> PayloadKind:
        kind = super().__new__(cls, name)
        kind.says, kind.of, kind.by_class, kind.of_maps = says, of, by_class, of_maps
        kind.common, kind.without, kind.package = common, without, package
        return kind

    def with_opt_out(self, without: str) -> PayloadKind:
        """The same kind, with how a run of some method does without it."""
        about: dict[str, Any] = {**vars(self), "without": without}
        return PayloadKind(str(self), **about)

    def at(self, package: str) -> PayloadKind:
        """The same kind as a package's method releases it."""
        about: dict[str, Any] = {**vars(self), "package": package}
        return PayloadKind(f"{package}: {self}", **about)

    @property
    def by_name(self) -> bool:
        """Whether "outputs only" lets it out where its owner names it, and not before."""
        return bool(self.package) or self.of == "moments"

    @property
    def output(self) -> bool:
        """Whether it is an output, and neither a record nor a network: what "outputs only" lets out."""
        return self.of in OUTPUTS


INPUTS = PayloadKind("inputs", "the inputs that the server asked about", of="query")
INDICES = PayloadKind("indices", "which rows of the public data a query is about", of="query")
SCHEDULE = PayloadKind("schedule", "the number of the round", of="query")
SOURCES = PayloadKind(
    "sources", "which of the nodes' label maps the server's images are made from", of="query"
)
LOGITS = PayloadKind(
    "logits",
    "the score that a node's model gives each class, for each input it was asked about",
    of="scores",
    common=0.0,
)
CRITIC = PayloadKind(
    "critic",
    "how unlike its own data a node's critic finds each input, part by part",
    of="critic",
    common=1.0,  # an untrained critic says next to nothing
)
GRADIENTS = PayloadKind(
    "gradients", "slopes of the server's loss, which tell it how to change its inputs", of="gradients"
)
LABEL_COUNTS = PayloadKind(
    "label counts", "how many examples of each class a node holds", of="counts", by_class=True
)
COLUMN_SUMS = PayloadKind(
    "column sums",
    "the sum of each column of numbers of a node's table, and of its squares, within the schema's ranges",
    of="moments",
)
DATA_SIZES = PayloadKind("data sizes", "how many examples a node holds", of="counts")
LABEL_MAPS = PayloadKind(
    "label maps",
    "what is where in each of a node's training images, or of what the server asks about",
    of_maps=True,
)
DIFFERENCE = PayloadKind(
    "difference",
    "how far an image that the server made is from the node's own of the same label map",
    of_maps=True,
)
PRIVATE_DATA = PayloadKind("private data", "training examples themselves, as they are")
# Weights come with counts of batches.
PARAMETERS = PayloadKind("parameters", "the weights of a model", of="model", common=1.0)
EXTRACTOR_PARAMETERS = PayloadKind(
    "extractor parameters", "the weights of a model but for its last part, the head", of="model", common=1.0
)
HEAD_PARAMETERS = PayloadKind(
    "head parameters",
    "the weights of a model's last part, which tells the classes apart",
    of="model",
    common=1.0,
)
GENERATOR_PARAMETERS = PayloadKind(
    "generator parameters",
    "the weights of a network that makes inputs or features like the node's",
    of="model",
    common=1.0,
)

KNOWN = {str(kind): kind for kind in list(vars().values()) if isinstance(kind, PayloadKind)}


def payload_kind(name: str) -> PayloadKind:
    """A kind by its name; of one that is not declared here the worst is supposed."""
    return name if isinstance(name, PayloadKind) else KNOWN.get(name) or PayloadKind(name)
