"""Policy of a node's owner: the allowed queries, releases and costs."""

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


Limit = Annotated[int, Ge(0), "0 (no limit) or more, an integer"]


@dataclass(frozen=True)
class PolicyConfig(CheckedOptions):
    """Rules of a node's owner (``[policy]`` in ``node.toml``)."""

    section: ClassVar[str] = "policy"

    queries: tuple[str, ...] = ("*",)
    """Allowed queries; "*" allows all that the method declares."""
    outputs_only: bool = True
    """Refuse any query whose response holds anything but outputs: parameters of a network, the data
    themselves, or a payload kind that is not known. The installed method declares the kind of each
    tensor."""
    plugins: tuple[str, ...] = ()
    """Methods and tasks allowed here in addition to the built-in ones, by the names under which they are
    installed. A server cannot name any other, and none is imported for it. Read their code before you allow
    it: what a method declares about its responses is trusted, here and by privacy mechanisms, and so are the
    loss and the count of records of a task."""
    kinds: tuple[str, ...] = ()
    """Payload kinds that may be released in addition to those that outputs_only allows."""
    label_maps: bool = False
    """Allow the release of label maps (the class of each pixel), from which a server generates images, and
    of the distance between these and the real images of the same maps. Many such distances reveal the
    real images. The maps do not stay with the server: it sends them on to all other nodes, with the
    generated images (FedIOD; with AsynDGAN each node sees its own again). Both are data and no outputs;
    outputs_only = false allows them, too."""
    sums_only: bool = False
    """Refuse any response that is not added to other nodes' responses under masks before the server sees
    it (secure aggregation, experimental: not reviewed from outside). The server then learns sums of
    min_nodes responses, and of three at least. Certificates prove who the other nodes are (live link);
    the holder of the key of the authority that signed these could make further nodes."""
    sums_may_differ: bool = False
    """Let this node add with other members than before, in this run or an earlier one: runs then continue
    without nodes that fail, and nodes may join later. A server that sends the same query both times
    subtracts one sum from the other, which leaves the responses of the nodes that were in one of them
    only: if that is one node, its response. Without this option a run stops until all nodes are back."""
    max_corrupted_sums: Limit = 1
    """Corrupt all further sums once so many were corrupted here, over all runs. If a response holds NaN, or
    numbers too large to be added, random numbers replace it, and the sum is lost. A server that chooses
    the inputs learns from such sums how large a node's response is. Once the limit is reached, random
    numbers replace every response of this node until you raise the limit by one; 0 is no limit."""
    max_queries: Limit = 0
    """Refuse queries after this number, over all runs; 0 is no limit. A gradient of a response belongs to
    its query; another gradient of the same response is a query by itself."""
    max_bytes: Limit = 0
    """Refuse further releases once so many bytes have left the node, over all runs; 0 is no limit."""
    max_rows: Limit = 100_000
    """Refuse a query about more inputs than this at once; 0 is no limit."""
    max_parameters: Limit = 50_000_000
    """Refuse to create further networks (critics, generators) with more parameters than this for a server;
    0 is no limit."""
    max_memory: Limit | None = None
    """Refuse operations that take more bytes of memory than this, in addition to the program itself. None:
    three quarters of this machine's memory, and of its GPU's if it computes on one. 0 is no limit. This
    option and those below are for nodes with their own folder: a simulation has no other server, and no
    owner to ask."""
    max_seconds: Limit = 3600
    """Refuse a query whose response takes longer than this to compute; 0 is no limit."""
    max_message: Limit = 1_000_000_000
    """Refuse messages and files of queries with more bytes than this; 0 is no limit."""
    max_header: Limit = 1_000_000
    """Refuse messages with more bytes than this outside their tensors (names of classes and tensors,
    options of the method, a file's list of queries); 0 is no limit."""
    approve: Literal["policy", "each run", "listed"] = "policy"
    """Approval that a run needs in addition to these rules. policy: none. each run: yours for each run,
    after you have read its description (`fedstill node requests`). listed: a description that you have
    approved once may come again. Queries outside an approved description are refused."""
    min_records: Limit = 0
    """Refuse all runs while the node has fewer examples than this; 0 is no limit."""
    min_nodes: Limit = 0
    """Refuse runs that continue with fewer nodes than this according to their server, which you cannot
    check; 0 is no limit. A file of queries does not state the number."""
    allowed_servers: tuple[str, ...] = ()
    """Fingerprints of the servers that may send queries. On a live link: of the authority in the startup
    kit (`fedstill node check` prints it), which signed the server's certificate. For files: of the key
    that signed them. Empty: the kit's server, and any key."""
    hours: str = ""
    """Hours in which this node joins, trains and responds, by this machine's clock: "08:00-18:00", or over
    midnight "20:00-06:00"; empty: at any time. A run that was refused for the hour can continue later."""
    max_runs: Limit = 1000
    """Refuse new runs once so many have a folder in runs/; 0 is no limit."""
    max_disk: Limit = 20_000_000_000
    """Refuse new runs, and all writes to the disk, once runs/, public/ and the audit log hold so many
    bytes; 0 is no limit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (
            self.max_memory and self.max_memory < MIN_MEMORY
        ):  # less is not enough for the program's own libraries
            expected = f"0 (no limit), or {MIN_MEMORY} or more"
            raise ArgumentError("policy.max_memory", self.max_memory, expected)
        for server in self.allowed_servers:
            if len(parse_fingerprint(server)) != 32:
                raise ArgumentError("policy.allowed_servers", server, "fingerprints of 32 hexadecimal digits")
        start, _, end = self.hours.partition("-")
        if self.hours and (not re.fullmatch(HOURS_PATTERN, self.hours) or start == end):
            raise ArgumentError("policy.hours", self.hours, "empty, or two times, as 08:00-18:00")
