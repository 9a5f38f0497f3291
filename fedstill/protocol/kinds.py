"""What tensors that travel are of: kinds, by which policies, mechanisms and reports know them."""

from __future__ import annotations

# Kinds of tensor that "outputs only" refuses: what was learned, or learned from, as it is.
PARAMETERS = "parameters"
EXTRACTOR_PARAMETERS, HEAD_PARAMETERS = "extractor parameters", "head parameters"
GENERATOR_PARAMETERS = "generator parameters"
PRIVATE_DATA = "private data"
LABEL_MAPS = "label maps"  # of a node's own images, or of what a server asks about
DIFFERENCE = "difference"  # of a server's images from the node's own
OF_MAPS = (LABEL_MAPS, DIFFERENCE)  # what policy label_maps lets out
INDICES = "indices"  # of public data
NOT_OUTPUTS = (PARAMETERS, EXTRACTOR_PARAMETERS, HEAD_PARAMETERS, GENERATOR_PARAMETERS, PRIVATE_DATA)
# Kinds that it lets pass, and no others: a kind that nobody has heard of is refused.
OUTPUTS = ("attention maps", "critic", "data sizes", "gradients", "label counts", "logit range", "logits")
LOGITS, SCHEDULE = "logits", "schedule"  # kinds of tensor
