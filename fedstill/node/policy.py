"""What the owner of a node allows: which queries it answers, what may leave, and what it may cost."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge

from fedstill.core.errors import ArgumentError
from fedstill.core.hashing import parse_fingerprint
from fedstill.core.options import CheckedOptions

MIN_MEMORY = 50_000_000  # bytes
POLICY, EACH_RUN = "policy", "each run"
_TIME_PATTERN = "([01][0-9]|2[0-3]):[0-5][0-9]"
HOURS_PATTERN = f"{_TIME_PATTERN}-{_TIME_PATTERN}"


Limit = Annotated[int, Ge(0), "0 (no limit) or more, a whole number"]


@dataclass(frozen=True)
class PolicyConfig(CheckedOptions):
    """What a node's owner allows."""

    section: ClassVar[str] = "policy"

    queries: tuple[str, ...] = ("*",)
    """Queries that may be answered; "*" is all that the method declares."""
    outputs_only: bool = True
    """Refuse any query whose answer carries anything but outputs: parameters of a network, the data
    themselves, or a kind of tensor that is not known. What a tensor is of, the installed method declares."""
    methods: tuple[str, ...] = ()
    """Methods that may be run here beside the package's own, by the names under which they are installed: a
    server can name no other, and none is imported for it."""
    tasks: tuple[str, ...] = ()
    """Tasks that may be learned here beside the package's own, by the names under which they are installed: a
    server can name no other, and none is imported for it. What a task counts of a record, and that its loss
    takes records one by one, is what privacy mechanisms go by: read it before you allow it."""
    kinds: tuple[str, ...] = ()
    """Kinds of tensor that may leave beside those that outputs_only lets out; those of methods that are not
    the package's own bear the name of theirs: "my_lab: class logits"."""
    label_maps: bool = False
    """Let label maps leave, what is where in each image, from which a server makes images of its own; and how
    far those are from the real ones of the same maps, which, asked often enough, tells the real ones. The
    maps do not stay with the server: it sends them on to all other nodes, with the images made from them
    (FedIOD; of AsynDGAN each node sees its own again). Both are data and no outputs; outputs_only = false
    allows them, too."""
    sums_only: bool = False
    """Refuse any answer that is not added to other nodes' under masks before the server sees it: it then
    learns sums of min_nodes answers, and of three at least. Who they are is proved by their certificates
    (live link); whoever holds the key of the authority that signed these could make nodes of its own."""
    sums_may_differ: bool = False
    """Let this node add with other members than it has added with before, in this run or an earlier one: so
    that runs go on without nodes that fail, and nodes come later. A server that asks alike both times takes
    one sum from the other, and has left what those answered who were in one of them only: of one node alone,
    its answer. Without it a run stops until all are back."""
    max_corrupted_sums: Limit = 1
    """Spoil all sums once so many were spoilt here, over all runs. Where an answer holds NaN, or what is too
    large to be added, random numbers stand for it, and the sum is lost; a server that chooses what is asked
    finds by such sums how large some node's answer is. So from then on random numbers stand for every answer
    of this node, until you raise this by one; 0 is no limit."""
    max_queries: Limit = 0
    """Refuse after so many queries, over all runs; 0 is no limit. A gradient of an answer belongs to its
    query; another gradient of the same answer is a query by itself."""
    max_bytes: Limit = 0
    """Refuse once so many bytes have left the node, over all runs; 0 is no limit."""
    max_rows: Limit = 100_000
    """Refuse a query about more inputs than this at once; 0 is no limit."""
    max_parameters: Limit = 50_000_000
    """Refuse to make further networks (critics, generators) of more parameters than this, as a server wants
    them; 0 is no limit."""
    max_memory: Limit | None = None
    """Refuse what would take more bytes of memory than this, beside the program itself; none: three quarters
    of what this machine has, and of its GPU where it computes on one; 0 is no limit."""
    max_seconds: Limit = 3600
    """Refuse a query whose answer takes longer than this to compute; 0 is no limit."""
    max_message: Limit = 1_000_000_000
    """Refuse messages and files of queries of more bytes than this; 0 is no limit."""
    max_header: Limit = 1_000_000
    """Refuse messages of which more bytes than this are not numbers of tensors: names of classes and of
    tensors, options of the method, a file's list of queries; 0 is no limit."""
    approve: Literal["policy", "each run", "listed"] = "policy"
    """Whose word a run needs beside these rules. policy: nobody's. each run: yours, who have read what it is
    (`fedstill node requests`), for each run anew. listed: what you have approved once may come again. What an
    approved run was not said to ask is refused. A simulation has nobody to ask: this and all that follow are
    for nodes with a folder of their own."""
    min_records: Limit = 0
    """Refuse all runs while the node has fewer examples than this; 0 is no limit."""
    min_nodes: Limit = 0
    """Refuse runs that would go on with fewer nodes than this, as their server says, which you cannot check;
    0 is no limit. A file of queries does not say it."""
    allowed_servers: tuple[str, ...] = ()
    """Fingerprints of those who may ask: on a live link of the authority in the startup kit (`fedstill node
    check` names it), by which the server's certificate is checked; of files, of the key that signed them.
    None: whoever has the kit's server, and any key."""
    hours: str = ""
    """When this node joins, learns and answers, by this machine's clock: "08:00-18:00", or over midnight
    "20:00-06:00"; empty: at any time. A run that was refused for the hour can go on later."""
    max_runs: Limit = 1000
    """Refuse new runs once so many have left a folder in runs/; 0 is no limit."""
    max_disk: Limit = 20_000_000_000
    """Refuse new runs, and whatever would write to the disk, once runs/, public/ and the audit log hold so
    many bytes; 0 is no limit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_memory and self.max_memory < MIN_MEMORY:  # the program's own libraries would fail
            expected = f"0 (no limit), or {MIN_MEMORY} or more"
            raise ArgumentError("policy.max_memory", self.max_memory, expected)
        for server in self.allowed_servers:
            if len(parse_fingerprint(server)) != 32:
                raise ArgumentError("policy.allowed_servers", server, "fingerprints of 32 hexadecimal digits")
        first, _, last = self.hours.partition("-")
        if self.hours and (not re.fullmatch(HOURS_PATTERN, self.hours) or first == last):
            raise ArgumentError("policy.hours", self.hours, "empty, or two times, as 08:00-18:00")
