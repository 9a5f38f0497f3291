"""Checks of nodes' answers at the server: shapes, NaN, counts, outliers."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from math import inf, isfinite, sqrt

import torch

from fedstill.core.errors import DataError, NodeFault
from fedstill.protocol.queries import Query, score_shape_fault
from fedstill.protocol.wire_format import SCALE, Tensors, from_text

LARGEST = 1e12  # number of examples, or of labels
TINY = 1e-30  # stands for nothing where it is divided by
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


def faults(
    responses: Mapping[str, Tensors],
    query: Query,
    outlier: float,
    rows: int | None = None,
    outputs: tuple[int, ...] | None = None,
) -> dict[str, str]:
    """What is wrong with the nodes' answers to one query: one line for each faulty node, by its name.

    Args:
        query: its declaration says which tensors belong into an answer.
        outlier: how many times larger than the others' median a node's logits, scores or weights may be.
        rows: how many inputs it was about, if it was about inputs; logits have one row for each.
        outputs: the shape of an input's logits, if that is known.

    Raises:
        NodeFault: nodes differ, and none of them is known to be the one that is wrong.

    >>> asked = Query("predict", handler=None, releases={"logits": "logits"})
    >>> good, bad = torch.ones(2, 3), torch.tensor([[1.0, float("nan"), 1.0]] * 2)
    >>> faults({"a": {"logits": good}, "b": {"logits": bad}}, asked, 100.0)
    {'b': 'logits hold NaN or infinity (2 of 6 numbers)'}
    """
    found: dict[str, str] = {}
    for node, response in responses.items():
        if set(response) != set(query.releases):
            found[node] = f"answered {sorted(response) or 'nothing'}, not {sorted(query.releases)}"
    for node, response in responses.items():
        if node not in found:
            found |= _unlike(node, response, query, rows, outputs)
    found |= _misshapen(_without(responses, found), query)
    found |= _illegible(_without(responses, found), query)
    found |= not_finite(_without(responses, found))
    for node, response in _without(responses, found).items():
        found |= _miscounted(node, response, query)
    sound = _without(responses, found)
    for name, kind in query.releases.items():
        if kind.common is not None:
            sizes = _sizes({node: [response[name]] for node, response in sound.items()})
            found |= _blamed(_larger(sizes, outlier, kind.common), sizes, name, outlier, query.name)
    return found


def invalid_dtype_fault(tensors: Tensors) -> str | None:
    """What is wrong with tensors as they arrived, before anything is computed with them.

    >>> invalid_dtype_fault({"x": torch.ones(2, dtype=torch.complex64)})
    'x are torch.complex64'
    """
    for name, tensor in tensors.items():
        scale = name.endswith(SCALE)
        if tensor.dtype not in ((torch.float32,) if scale else (*FLOATS, *WHOLE)):
            return f"{name} are {tensor.dtype}"
        if scale and name.removesuffix(SCALE).endswith(SCALE):
            return f"{name} scales what is a scale"
    return None


def require_finite_inputs(tensors: Tensors, query: str) -> None:
    """Refuse (DataError) to ask about what is no number: which is no node's fault."""
    for fault in not_finite({"the server": tensors}).values():
        told = f"what the method sends, {fault}: its networks at the server, or what they made, is not finite"
        raise DataError(f"query {query!r}: {told}")


def require_finite(pulls: Mapping[str, Tensors], query: str) -> None:
    """Refuse (DataError) what a method pulls back that is no number: which is no node's fault."""
    for fault in not_finite(pulls).values():
        told = f"the method's gradients of {fault}: its loss is not finite"
        raise DataError(f"query {query!r}: {told}")


def not_finite(responses: Mapping[str, Tensors]) -> dict[str, str]:
    """Nodes whose tensors hold NaN or infinities."""
    parts = [
        (node, name, tensor)
        for node, response in responses.items()
        for name, tensor in response.items()
        if tensor.is_floating_point()
    ]
    found: dict[str, str] = {}
    for (node, name, tensor), size in zip(parts, _norms([tensor for _, _, tensor in parts]), strict=True):
        if node in found or isfinite(size):
            continue
        count = int((~torch.isfinite(tensor)).sum())
        if count:  # else numbers whose squares are beyond float32
            found[node] = f"{name} hold NaN or infinity ({count} of {tensor.numel()} numbers)"
    return found


def _norms(tensors: Sequence[torch.Tensor]) -> list[float]:
    """The root of each tensor's sum of squares: few kernels, and one look at the device, for all of them."""
    some = [tensor.float() for tensor in tensors if tensor.numel()]
    found = iter(torch.stack(torch._foreach_norm(some, 2.0)).tolist() if some else ())
    return [next(found) if tensor.numel() else 0.0 for tensor in tensors]


def mismatched_gradients(pulled: Mapping[str, Tensors], inputs: Tensors) -> dict[str, str]:
    """Nodes whose gradients are not those of the query's inputs, one number for each of theirs; ``inputs``
    are those that gradients are pulled back to."""
    wanted = {f"d/d{name}": tuple(tensor.shape) for name, tensor in inputs.items()}
    found: dict[str, str] = {}
    for node, each in pulled.items():
        shapes = {name: tuple(tensor.shape) for name, tensor in each.items()}
        dtypes = {name: tensor.dtype for name, tensor in each.items() if tensor.dtype not in FLOATS}
        if shapes != wanted:
            found[node] = f"gradients are {shapes}, not {wanted}"
        elif dtypes:
            found[node] = f"gradients are {dtypes}, not numbers with a fraction"
    return found


def oversized_gradients(
    pulled: Mapping[str, Tensors], pulls: Mapping[str, Tensors], outlier: float, query: str
) -> dict[str, str]:
    """Nodes whose gradients are far larger than the others' are, and not because more was pulled there.

    A sound node's may be tiny: what it holds little data of, little is pulled back to it. So the square of
    ``outlier`` is allowed, of the gradients and of what they are for one unit of what was pulled.

    Raises:
        NodeFault: the two there are differ so much.
    """
    sizes = _sizes({node: list(each.values()) for node, each in pulled.items()})
    reached = _sizes({node: list(pulls[node].values()) for node in sizes})
    gains = {node: size / max(reached.get(node, 0.0), TINY) for node, size in sizes.items()}
    allowed = outlier * outlier
    unasked = _larger(gains, allowed, 0.0)
    larger = {node: times for node, times in _larger(sizes, allowed, 0.0).items() if node in unasked}
    return _blamed(larger, sizes, "gradients", outlier, query)


def _without(responses: Mapping[str, Tensors], found: Mapping[str, str]) -> dict[str, Tensors]:
    return {node: response for node, response in responses.items() if node not in found}


def _unlike(
    node: str, response: Tensors, query: Query, rows: int | None, outputs: tuple[int, ...] | None
) -> dict[str, str]:
    """Whether a node's logits have a row for each input, and in it what the task has."""
    for name, kind in query.releases.items():
        shape = tuple(response[name].shape)
        if kind.common is not None and response[name].dtype == torch.bool:
            return {node: f"{name} are {response[name].dtype}"}
        if kind.of == "scores" and (fault := score_shape_fault(name, shape, rows, outputs)):
            return {node: fault}
    return {}


def _illegible(responses: Mapping[str, Tensors], query: Query) -> dict[str, str]:
    """Nodes of whose JSON values one is none."""
    found: dict[str, str] = {}
    for node, response in responses.items():
        for name in query.apart.intersection(query.values):
            try:
                from_text(response[name])
            except DataError as error:
                found[node] = f"{name}: {error}"
    return found


def _misshapen(responses: Mapping[str, Tensors], query: Query) -> dict[str, str]:
    """Nodes whose tensors have another shape or dtype than most nodes' have; of a ragged one, other axes."""
    forms = {
        node: {
            name: ((-1,) * tensor.ndim if name in query.apart else tuple(tensor.shape), tensor.dtype)
            for name, tensor in response.items()
        }
        for node, response in responses.items()
    }
    found: dict[str, str] = {}
    for name in next(iter(forms.values()), {}):
        told = Counter(form[name] for form in forms.values()).most_common(2)
        (usual, most), others = told[0], told[1:]
        if others and others[0][1] == most:
            (shape, dtype), (other, another) = usual, others[0][0]
            reason = f"{name} are {dtype} of shape {shape} and {another} of {other}"
            raise NodeFault(
                ", ".join(forms), query.name, f"{reason}: one is wrong, and it is not known which"
            )
        for node, form in forms.items():
            if form[name] != usual and node not in found:
                shape, dtype = form[name]
                found[node] = f"{name} are {dtype} of shape {shape}, those of others {usual[1]} of {usual[0]}"
    return found


def _miscounted(node: str, response: Tensors, query: Query) -> dict[str, str]:
    """Whether a node's numbers of examples are such numbers, and its labels as many as its examples."""
    kinds = {name: kind for name, kind in query.releases.items() if kind.of == "counts"}
    counted = {name: response[name].double() for name in kinds}
    for name, numbers in counted.items():
        if not ((numbers >= 0) & (numbers < LARGEST)).all():
            return {node: f"{name} are not numbers from 0 up to {LARGEST:g}"}
        if not kinds[name].by_class and not (numbers == numbers.round()).all():
            return {node: f"{name} are not whole numbers"}
    by_class = {name for name, kind in kinds.items() if kind.by_class}
    whole = {name for name in by_class if not counted[name].ndim}  # how many in all
    for name, size in ((name, size) for name in by_class - whole for size in whole):
        labels, examples = float(counted[name].sum()), float(counted[size])
        if kinds[name] == kinds[size] and abs(labels - examples) > 1e-6 * examples:  # as float32 tells apart
            return {node: f"{name} are {labels:g} labels in all, of {examples:g} examples"}
    return {}


def _sizes(tensors: Mapping[str, Sequence[torch.Tensor]]) -> dict[str, float]:
    """The root mean square of each node's numbers, of those with a fraction; without nodes that have none."""
    parts = [(node, part) for node, some in tensors.items() for part in some if part.is_floating_point()]
    squares, counts = defaultdict[str, float](float), Counter[str]()
    for (node, part), size in zip(parts, _norms([part for _, part in parts]), strict=True):
        squares[node] += size * size
        counts[node] += part.numel()
    return {node: sqrt(squares[node] / count) for node, count in counts.items() if count}


def _larger(sizes: Mapping[str, float], outlier: float, ordinary: float) -> dict[str, float]:
    """How many times larger than the others' median each is that is an outlier."""
    found: dict[str, float] = {}
    ordered = sorted(sizes.values())  # once: for each node anew it would be the square of their number
    for node, mine in sizes.items():
        usual = _median_without(ordered, bisect_left(ordered, mine))
        if mine > outlier * max(usual, ordinary) > 0:
            found[node] = mine / usual if usual else inf
    return found


def _median_without(ordered: Sequence[float], place: int) -> float:
    """The median of sorted numbers but for the one at a place; of none, infinity.

    >>> _median_without([1.0, 2.0, 5.0, 9.0], 1), _median_without([1.0, 2.0, 5.0], 2)
    (5.0, 1.5)
    """
    count = len(ordered) - 1
    if not count:
        return inf
    low, high = ((count - 1) // 2, count // 2)
    return (ordered[low + (low >= place)] + ordered[high + (high >= place)]) / 2


def _blamed(
    larger: Mapping[str, float], sizes: Mapping[str, float], name: str, outlier: float, query: str
) -> dict[str, str]:
    """One line for each node whose numbers are far larger than the other nodes' are."""
    if larger and len(sizes) == 2:
        ((node, times),) = larger.items()
        (other,) = set(sizes) - {node}
        told = f"{name} of {node} are {times:.3g} times as large as those of {other}"
        why = (
            f"link.outlier {outlier:g}; of two it is not known which is wrong. Where one's noise is so "
            "large, link.outlier in the run's config.toml can be larger before it goes on"
        )
        raise NodeFault(", ".join(sizes), query, f"{told}: {why}")
    return {
        node: f"{name} are {times:.3g} times as large as others': link.outlier {outlier:g}"
        for node, times in larger.items()
    }
