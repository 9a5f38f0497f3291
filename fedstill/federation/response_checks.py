"""Validation of nodes' responses and gradients at the server: shapes, dtypes, NaN, counts, outliers."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from math import inf, isfinite, sqrt

import torch

from fedstill.core.errors import DataError, NodeFault, list_names
from fedstill.protocol.queries import Query
from fedstill.protocol.tensor_forms import score_shape_fault
from fedstill.protocol.wire_format import SCALE, Tensors, json_from_tensor

MAX_EXAMPLES = 1e12  # largest valid number of examples or labels
TINY = 1e-30  # avoids division by zero
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
Norms = Mapping[tuple[str, str], float]  # L2 norm of each floating-point tensor, by node and name
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


def find_faults(
    responses: Mapping[str, Tensors],
    query: Query,
    outlier: float,
    rows: int | None = None,
    outputs: tuple[int, ...] | None = None,
) -> dict[str, str]:
    """Return a one-line description of the fault of each node with an invalid response, by the node's name.

    Args:
        responses: responses to one query, by node.
        query: declares the tensors of a response.
        outlier: largest valid ratio of a node's logits, scores or weights to the median of the others.
        rows: number of inputs of the query, if it has inputs; logits need a row for each.
        outputs: shape of the logits of one input, if known.

    Raises:
        NodeFault: nodes differ, and it is unknown which one is wrong.

    >>> asked = Query(None, releases={"logits": "logits"}, name="predict")
    >>> good, bad = torch.ones(2, 3), torch.tensor([[1.0, float("nan"), 1.0]] * 2)
    >>> find_faults({"a": {"logits": good}, "b": {"logits": bad}}, asked, 100.0)
    {'b': 'logits hold NaN or infinity (2 of 6 numbers)'}
    """
    found: dict[str, str] = {}
    for node, response in responses.items():
        if set(response) != set(query.releases):
            found[node] = f"responded {sorted(response) or 'nothing'}, not {sorted(query.releases)}"
    for node, response in responses.items():
        if node not in found:
            found |= _shape_fault(node, response, query, rows, outputs)
    found |= _shape_outlier_faults(_without(responses, found), query)
    found |= _malformed_json_faults(_without(responses, found), query)
    norms = l2_norms(_without(responses, found))
    found |= non_finite_faults(_without(responses, found), norms)
    if any(kind.category == "counts" for kind in query.releases.values()):
        for node, response in _without(responses, found).items():
            found |= _count_fault(node, response, query)
    sound = _without(responses, found)
    for name, kind in query.releases.items():
        if kind.normal_size is not None:
            sizes = _root_mean_squares(
                {node: {name: tensors[name]} for node, tensors in sound.items()}, norms
            )
            found |= _outlier_faults(
                _outlier_ratios(sizes, outlier, kind.normal_size), sizes, name, outlier, query.name
            )
    return found


def invalid_dtype_fault(tensors: Tensors) -> str | None:
    """Return a description of an invalid dtype among received tensors, or None.

    >>> invalid_dtype_fault({"x": torch.ones(2, dtype=torch.complex64)})
    'x are torch.complex64'
    """
    for name, tensor in tensors.items():
        scale = name.endswith(SCALE)
        if tensor.dtype not in ((torch.float32,) if scale else (*FLOATS, *WHOLE)):
            return f"{name} are {tensor.dtype}"
        if scale and name.removesuffix(SCALE).endswith(SCALE):
            return f"{name} is the scale of a scale"
    return None


def require_finite_inputs(tensors: Tensors, query: str) -> None:
    """Raise DataError if the method sends inputs with NaN or infinity, which is no node's fault."""
    responses = {"the server": tensors}
    for fault in non_finite_faults(responses, l2_norms(responses)).values():
        cause = "the method's networks at the server diverged"
        raise DataError(f"query {query!r}: the server sent numbers that are not finite, {fault}: {cause}")


def require_finite_gradients(output_gradients: Mapping[str, Tensors], query: str) -> None:
    """Raise DataError if the method's gradients hold NaN or infinity, which is no node's fault."""
    for fault in non_finite_faults(output_gradients, l2_norms(output_gradients)).values():
        raise DataError(f"query {query!r}: the method's gradients of {fault}: its loss is not finite")


def l2_norms(responses: Mapping[str, Tensors]) -> Norms:
    """Return the L2 norm of each floating-point tensor, with few kernels and one synchronization with the
    device.
    """
    parts = {
        (node, name): tensor
        for node, response in responses.items()
        for name, tensor in response.items()
        if tensor.is_floating_point()
    }
    some = [tensor.float() for tensor in parts.values() if tensor.numel()]
    found = iter(torch.stack(torch._foreach_norm(some, 2.0)).tolist() if some else ())
    return {key: next(found) if tensor.numel() else 0.0 for key, tensor in parts.items()}


def non_finite_faults(responses: Mapping[str, Tensors], norms: Norms) -> dict[str, str]:
    """Return the faults of nodes whose tensors hold NaN or infinity.

    Args:
        responses: the tensors, by node.
        norms: their :func:`l2_norms`.
    """
    found: dict[str, str] = {}
    for (node, name), size in norms.items():
        if isfinite(size) or node in found:
            continue
        tensor = responses[node][name]
        count = int((~torch.isfinite(tensor)).sum())
        if count:  # otherwise the squares overflow float32
            found[node] = f"{name} hold NaN or infinity ({count} of {tensor.numel()} numbers)"
    return found


def mismatched_gradient_faults(input_gradients: Mapping[str, Tensors], inputs: Tensors) -> dict[str, str]:
    """Return the faults of nodes whose gradients do not have the shapes and dtypes of the query's inputs.

    Args:
        inputs: differentiable inputs of the query.
    """
    wanted = {f"d/d{name}": tuple(tensor.shape) for name, tensor in inputs.items()}
    found: dict[str, str] = {}
    for node, each in input_gradients.items():
        shapes = {name: tuple(tensor.shape) for name, tensor in each.items()}
        dtypes = {name: tensor.dtype for name, tensor in each.items() if tensor.dtype not in FLOATS}
        if shapes != wanted:
            found[node] = f"gradients are {shapes}, not {wanted}"
        elif dtypes:
            found[node] = f"gradients are {dtypes}, not floating point"
    return found


def oversized_gradient_faults(
    input_gradients: Mapping[str, Tensors],
    output_gradients: Mapping[str, Tensors],
    norms: Norms,
    outlier: float,
    query: str,
) -> dict[str, str]:
    """Return the faults of nodes whose input gradients are far larger than the others'.

    A node is faulty if both its gradients and their ratio to the gradients that it received are outliers. The
    gradients of a valid node may be tiny if it holds little data of a class, so the square of ``outlier`` is
    the limit.

    Args:
        input_gradients: input gradients, by node.
        output_gradients: gradients of the loss with respect to outputs that each node received.
        norms: :func:`l2_norms` of the input gradients.
        outlier: as in :func:`find_faults`.
        query: name of the query.

    Raises:
        NodeFault: there are two nodes, and they differ that much.
    """
    sizes = _root_mean_squares(input_gradients, norms)
    received = {node: output_gradients[node] for node in sizes}
    output_gradient_sizes = _root_mean_squares(received, l2_norms(received))
    gains = {node: size / max(output_gradient_sizes.get(node, 0.0), TINY) for node, size in sizes.items()}
    allowed = outlier * outlier
    gain_outliers = _outlier_ratios(gains, allowed, 0.0)
    outliers = {
        node: times for node, times in _outlier_ratios(sizes, allowed, 0.0).items() if node in gain_outliers
    }
    return _outlier_faults(outliers, sizes, "gradients", outlier, query)


def _without(responses: Mapping[str, Tensors], found: Mapping[str, str]) -> dict[str, Tensors]:
    return {node: response for node, response in responses.items() if node not in found}


def _shape_fault(
    node: str, response: Tensors, query: Query, rows: int | None, outputs: tuple[int, ...] | None
) -> dict[str, str]:
    """Return the fault of a node whose logits do not have the shape of the task's outputs."""
    for name, kind in query.releases.items():
        shape = tuple(response[name].shape)
        if kind.normal_size is not None and response[name].dtype == torch.bool:
            return {node: f"{name} are {response[name].dtype}"}
        if kind.category == "scores" and (fault := score_shape_fault(name, shape, rows, outputs)):
            return {node: fault}
    return {}


def _malformed_json_faults(responses: Mapping[str, Tensors], query: Query) -> dict[str, str]:
    """Return the faults of nodes with malformed JSON values."""
    found: dict[str, str] = {}
    for node, response in responses.items():
        for name in query.unstacked.intersection(query.details.json_values):
            try:
                json_from_tensor(response[name])
            except DataError as error:
                found[node] = f"{name}: {error}"
    return found


def _shape_outlier_faults(responses: Mapping[str, Tensors], query: Query) -> dict[str, str]:
    """Return the faults of nodes whose tensors differ from most nodes' in shape or dtype (ragged: in
    ndim)."""
    forms = {
        node: {
            name: ((-1,) * tensor.ndim if name in query.unstacked else tuple(tensor.shape), tensor.dtype)
            for name, tensor in response.items()
        }
        for node, response in responses.items()
    }
    found: dict[str, str] = {}
    for name in next(iter(forms.values()), {}):
        ranked = Counter(form[name] for form in forms.values()).most_common(2)
        (usual, most), others = ranked[0], ranked[1:]
        if others and others[0][1] == most:
            (shape, dtype), (other, another) = usual, others[0][0]
            reason = f"{name} are {dtype} of shape {shape} and {another} of {other}"
            raise NodeFault(
                list_names(forms), query.name, f"{reason}: one is wrong, and it is not known which"
            )
        for node, form in forms.items():
            if form[name] != usual and node not in found:
                shape, dtype = form[name]
                found[node] = f"{name} are {dtype} of shape {shape}, those of others {usual[1]} of {usual[0]}"
    return found


def _count_fault(node: str, response: Tensors, query: Query) -> dict[str, str]:
    """Return the fault of a node whose counts are invalid, or whose label counts do not add up to its
    examples."""
    kinds = {name: kind for name, kind in query.releases.items() if kind.category == "counts"}
    counted = {name: response[name].double() for name in kinds}
    for name, numbers in counted.items():
        if not ((numbers >= 0) & (numbers < MAX_EXAMPLES)).all():
            return {node: f"{name} are not numbers from 0 up to {MAX_EXAMPLES:g}"}
        if not kinds[name].by_class and not (numbers == numbers.round()).all():
            return {node: f"{name} are not whole numbers"}
    by_class = {name for name, kind in kinds.items() if kind.by_class}
    whole = {name for name in by_class if not counted[name].ndim}  # totals
    for name, size in ((name, size) for name in by_class - whole for size in whole):
        labels, examples = float(counted[name].sum()), float(counted[size])
        if kinds[name] == kinds[size] and abs(labels - examples) > 1e-6 * examples:  # float32 resolution
            return {node: f"{name} are {labels:g} labels of {examples:g} examples"}
    return {}


def _root_mean_squares(tensors: Mapping[str, Tensors], norms: Norms) -> dict[str, float]:
    """Return the root mean square of each node's floating-point numbers, without nodes that have none."""
    sizes: dict[str, float] = {}
    for node, parts in tensors.items():
        square, count = 0.0, 0
        for name, part in parts.items():
            if (node, name) in norms:
                square += norms[node, name] ** 2
                count += part.numel()
        if count:
            sizes[node] = sqrt(square / count)
    return sizes


def _outlier_ratios(sizes: Mapping[str, float], outlier: float, ordinary: float) -> dict[str, float]:
    """Return the ratio to the median of the others, for each node whose ratio is above ``outlier``."""
    found: dict[str, float] = {}
    ordered = sorted(sizes.values())  # once, to avoid quadratic time
    for node, own_size in sizes.items():
        usual = _median_without(ordered, bisect_left(ordered, own_size))
        if own_size > outlier * max(usual, ordinary) > 0:
            found[node] = own_size / usual if usual else inf
    return found


def _median_without(ordered: Sequence[float], index: int) -> float:
    """Return the median of sorted numbers without the one at an index; infinity if none remains.

    >>> _median_without([1.0, 2.0, 5.0, 9.0], 1), _median_without([1.0, 2.0, 5.0], 2)
    (5.0, 1.5)
    """
    count = len(ordered) - 1
    if not count:
        return inf
    low, high = ((count - 1) // 2, count // 2)
    return (ordered[low + (low >= index)] + ordered[high + (high >= index)]) / 2


def _outlier_faults(
    outliers: Mapping[str, float], sizes: Mapping[str, float], name: str, outlier: float, query: str
) -> dict[str, str]:
    """Return a one-line description for each outlier."""
    if outliers and len(sizes) == 2:
        ((node, times),) = outliers.items()
        (other,) = set(sizes) - {node}
        ratio = f"{name} of {node} are {times:.3g} times as large as those of {other}"
        advice = (
            f"link.outlier is {outlier:g}, and with two nodes it is unknown which one is wrong. If noise is "
            "the reason, set a larger link.outlier in the run's config.toml and resume"
        )
        raise NodeFault(list_names(sizes), query, f"{ratio}: {advice}")
    return {
        node: f"{name} are {times:.3g} times as large as others': link.outlier {outlier:g}"
        for node, times in outliers.items()
    }
