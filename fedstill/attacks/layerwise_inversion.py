"""Layer-by-layer inversion of gradients of networks with ReLU and max pooling, from the last layers to the
first.

Gradient matching fails there, as the active units and the winners of the pooling windows jump when the
image changes. But the gradient of the first linear layer is ``sum_b delta_b f_b^T``, and that of its bias
``sum_b delta_b``. For one image, the features f and the gradients delta follow exactly (Zhu, Blaschko,
"R-GAP", ICLR 2021); for a few, they follow from the zeros that ReLU leaves in delta (Dimitrov et al.,
"SPEAR", NeurIPS 2024). Given these, a block's gradient is linear in its input except for active units and
winners. These are softened, and sharpened during the search for the input: first of the last block, then of
the one before it, and finally for the image.

The head's gradient alone gives the features, too. The image with these features is searched if the
adversary has the extractor, as in the first round, when all nodes have the server's. The wider the
extractor, the more of the image the features determine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import vjp

from fedstill.attacks.gradient_matching import DEFAULT_PIXELS, PixelRange, RecoveredImages
from fedstill.attacks.simulated_updates import ObservedUpdate
from fedstill.core.errors import ArgumentError
from fedstill.core.seeds import torch_generator
from fedstill.models.extractor_head import split_model

EXPECTED_NETWORK = "a Sequential of blocks (Conv2d, ReLU, MaxPool2d), Flatten and linear layers"
EXPECTED_COUNT = "so few that a ReLU's zeros separate the images' gradients"
ZERO_TOLERANCE = 1e-4  # relative to a row's norm: smaller numbers count as zero
Weights = tuple[torch.Tensor, ...]  # weight and bias of each block's convolution
Activations = list[tuple[torch.Tensor, torch.Tensor]]  # winners and active units of each block
Bounds = tuple[torch.Tensor, torch.Tensor]  # lower and upper, (B, C, H, W) each
Candidates = list[torch.Tensor]  # (B, C, H, W) each
STEPS = 600  # of Adam, for each block and for all at once
LR = 0.05  # of the first step, in units of half the pixels' range; falls to nothing
TV = 3.0  # weight of the image's total variation at first; falls to nothing, of a head alone to little


class _ConvolutionBlock(NamedTuple):
    """Convolution, ReLU and pooling; ``name`` of the convolution in the model."""

    name: str
    convolution: nn.Conv2d
    pool: int
    unit: float  # spread of the values in a window, for noise
    scale: float  # mean of the block's outputs, for noise


class _KnownBlockTensors(NamedTuple):
    """Known values of a chain of blocks: outputs, output gradients and weight gradients."""

    outputs: torch.Tensor  # (B, C, H, W)
    output_gradients: torch.Tensor  # (B, C, H, W)
    weight_gradients: Weights  # empty where the extractor's were not released


def invert_layers(
    release: ObservedUpdate,
    shape: tuple[int, int, int],
    count: int,
    *,
    steps: int = STEPS,
    pixels: PixelRange = DEFAULT_PIXELS,
    seed: int = 0,
) -> RecoveredImages:
    """Recover images ``(B, C, H, W)`` from one gradient of all parameters, or of the head's, for batches of
    up to 4.

    For the gradient of a head alone, the model's extractor is taken for the node's.

    Args:
        release: gradient and network.
        shape: ``(C, H, W)`` of an image.
        count: number of images, B.
        steps: of Adam, for each block and for all at once.
        pixels: range of the images.
        seed: of random numbers.

    Raises:
        ArgumentError: an unsupported network, a gradient without the head's first layer, or a batch whose
            images cannot be separated.
    """
    noise = torch.randn(4, *shape, generator=torch_generator(seed, "layers", "units"))
    blocks, linear = _find_blocks(release.model, noise)
    convolutions, linear_names = (
        [f"{name}.{kind}" for name in names for kind in ("weight", "bias")]
        for names in ([block.name for block in blocks], [linear])
    )
    has_extractor = all(
        name in release.target for name in convolutions
    )  # else a partial gradient is not used
    if missing := ", ".join(name for name in linear_names if name not in release.target):
        raise ArgumentError("release", f"without {missing}", "a gradient of all parameters, or of the head")
    features, deltas = factor_gradient(
        release.target[linear_names[0]], release.target[linear_names[1]], count, seed
    )
    labels = _infer_labels(release, features, deltas)
    weight = release.model.get_parameter(linear_names[0]).detach()
    feature_shape = _outputs(blocks, noise).shape[1:]
    known = _KnownBlockTensors(
        features.to(weight).view(count, *feature_shape),
        (deltas.to(weight) @ weight).view(count, *feature_shape),
        tuple(release.target[name] for name in convolutions) if has_extractor else (),
    )
    low, high = (torch.as_tensor(end).to(weight).expand(count, *shape) for end in (pixels.low, pixels.high))
    candidates = (_invert_blockwise if has_extractor else _search_images_with_features)(
        blocks, known, (low, high), steps
    )
    losses = [float(_mismatch(blocks, x, known, 200.0).detach()) for x in candidates]
    best = min(range(len(candidates)), key=losses.__getitem__)
    return RecoveredImages(candidates[best], labels, losses[best])


def _invert_blockwise(
    blocks: Sequence[_ConvolutionBlock], all_known: _KnownBlockTensors, bounds: Bounds, steps: int
) -> Candidates:
    """Invert the blocks from the last to the first, and then all at once from that image."""
    low, high = bounds
    half_range, center = (high - low) / 2, (low + high) / 2
    known = all_known
    for depth in range(len(blocks) - 1, 0, -1):
        previous = blocks[depth - 1]
        start = torch.full_like(_outputs(blocks[:depth], low), previous.scale / 2)
        block_known = known._replace(weight_gradients=all_known.weight_gradients[2 * depth :][:2])
        positive = torch.zeros_like(start), torch.full_like(start, torch.inf)
        unit = torch.full_like(start, 1.6 * previous.scale)
        block_input = _search_input(
            blocks[depth : depth + 1], start, block_known, positive, unit, steps, 0.3, (0.3, 100.0)
        )
        input_gradients = _input_gradients(
            blocks[depth], block_input, known.output_gradients * (known.outputs > 0), 100.0
        )
        fires = block_input > 0.02 * previous.scale
        known = _KnownBlockTensors(block_input * fires, input_gradients * fires, all_known.weight_gradients)
    block_known = known._replace(weight_gradients=all_known.weight_gradients[:2])
    from_first_block = _search_input(
        blocks[:1], center, block_known, bounds, half_range, steps, TV, (1.0, 500.0), output_weight=10.0
    )
    starts = [(from_first_block, 5.0), (center, 1.0)] if len(blocks) > 1 else []
    return [from_first_block] + [
        _search_input(blocks, start, all_known, bounds, half_range, steps, TV / 3, (sharp, 200.0))
        for start, sharp in starts
    ]


def _search_images_with_features(
    blocks: Sequence[_ConvolutionBlock], known: _KnownBlockTensors, bounds: Bounds, steps: int
) -> Candidates:
    """Search images with given features, and prefer smooth ones, as features do not determine an image."""
    half, tv = (bounds[1] - bounds[0]) / 2, TV / 10
    starts = bounds[0] + half, bounds[0]
    return [
        _search_input(blocks, x, known, bounds, half, steps, tv, (1.0, 200.0), min_tv=tv / 30) for x in starts
    ]


def _infer_labels(release: ObservedUpdate, features: torch.Tensor, deltas: torch.Tensor) -> torch.Tensor:
    """Return the class of each image, ``(B,)`` int64: the one whose loss has the recovered gradient."""
    first_layer, *other_layers = split_model(release.model, "model").head.children()
    inputs = first_layer(features.to(next(release.model.parameters()))).detach().requires_grad_()
    outputs = nn.Sequential(*other_layers)(inputs)
    errors = []
    for label in range(outputs.shape[1]):
        targets = torch.full((len(outputs),), label)
        loss = F.cross_entropy(outputs, targets, label_smoothing=release.schedule.smoothing)
        (gradients,) = torch.autograd.grad(loss, inputs, retain_graph=True)
        errors.append((gradients - deltas).square().sum(1))
    smallest, labels = (torch.stack(errors) / deltas.square().sum(1)).min(0)
    if len(labels) > 1 and not smallest.max() < 0.01:
        raise ArgumentError("count", len(labels), EXPECTED_COUNT)
    return labels


def factor_gradient(
    weight: torch.Tensor, bias: torch.Tensor, count: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Recover the inputs of a linear layer before a ReLU, and the gradients of its outputs, from its weight
    gradient.

    The gradient's row space is spanned by the inputs. A combination of its left singular vectors that has
    more zeros than it was constructed with is the output gradient of one image.

    Args:
        weight: ``(U, N)``, gradient of the weights: ``sum_b delta_b f_b^T``.
        bias: ``(U,)``, gradient of the biases: ``sum_b delta_b``.
        count: number of images, B.
        seed: of the random combinations.

    Returns:
        f ``(B, N)``, 0 or more, and delta ``(B, U)`` float64, in no particular order.

    Raises:
        ArgumentError: the gradient has a rank below B, or too few zeros to separate the images.
    """
    left_vectors, singular_values, _ = torch.linalg.svd(weight.double(), full_matrices=False)
    if count > len(singular_values) or not singular_values[count - 1] > 1e-6 * singular_values[0]:
        raise ArgumentError("count", count, "at most the rank of the first linear layer's gradient")
    left_vectors = left_vectors[:, :count]
    rows = left_vectors.norm(dim=1)
    unit = (left_vectors / rows[:, None])[rows > ZERO_TOLERANCE * rows.max()]
    chosen = left_vectors.new_ones(1, 1)
    if count > 1:
        generator = torch_generator(seed, "layers", "factors")
        rows_tried = torch.rand(4000, len(unit), generator=generator).topk(count - 1, dim=1).indices
        combinations = torch.linalg.svd(unit[rows_tried], full_matrices=True)[2][
            :, -1
        ]  # zero in those places, (4000, B)
        zeros = ((unit @ combinations.T).abs() < ZERO_TOLERANCE).sum(0)
        chosen = combinations[:0]
        for combination in combinations[zeros.argsort(descending=True)][: int((zeros >= count).sum())]:
            extended = torch.cat([chosen, combination[None]])
            if torch.linalg.svdvals(extended)[-1] > 1e-3:
                chosen = extended
            if len(chosen) == count:
                break
    if len(chosen) < count:
        raise ArgumentError("count", count, EXPECTED_COUNT)
    directions = left_vectors @ chosen.T  # (U, B)
    deltas = directions * torch.linalg.lstsq(directions, bias.double()[:, None]).solution[:, 0]
    features = torch.linalg.lstsq(deltas, weight.double()).solution
    is_nonzero = features > ZERO_TOLERANCE * features.amax(
        1, keepdim=True
    )  # ignores units that are active by rounding alone
    return features * is_nonzero, deltas.T


def _find_blocks(model: nn.Module, noise: torch.Tensor) -> tuple[list[_ConvolutionBlock], str]:
    """Return the blocks before the first linear layer, and the layer's name."""
    if not isinstance(model, nn.Sequential):
        raise ArgumentError("release.model", type(model).__name__, EXPECTED_NETWORK)
    parts = split_model(model, "model")
    layers = list(parts.extractor.named_children())
    head = list(parts.head.named_children())
    blocks: list[_ConvolutionBlock] = []
    types = [type(layer) for _, layer in layers]
    is_supported = types == [nn.Conv2d, nn.ReLU, nn.MaxPool2d] * (len(types) // 3) + [nn.Flatten]
    if not is_supported or not isinstance(head[0][1], nn.Linear) or head[0][1].bias is None:
        raise ArgumentError("release.model", " ".join(kind.__name__ for kind in types), EXPECTED_NETWORK)
    x = noise
    for (name, convolution_layer), (_, pooling) in zip(layers[0:-1:3], layers[2::3], strict=True):
        convolution, pool = cast(nn.Conv2d, convolution_layer), cast(nn.MaxPool2d, pooling)  # as kinds says
        side = pool.kernel_size
        is_plain = (pool.stride, pool.padding, pool.dilation, pool.ceil_mode) == (side, 0, 1, False)
        pads_with_zeros = convolution.padding_mode == "zeros" and not isinstance(convolution.padding, str)
        if not isinstance(side, int) or not is_plain or not pads_with_zeros or convolution.bias is None:
            raise ArgumentError("release.model", f"{convolution}, {pool}", "windows side by side, and a bias")
        with torch.no_grad():
            windows = _pooling_windows(convolution(x.to(convolution.weight)), side)
            x = windows.amax(-1).relu()
        blocks.append(
            _ConvolutionBlock(name, convolution, side, float(windows.std(-1).mean()), float(x.mean()))
        )
    return blocks, head[0][0]


def _pooling_windows(maps: torch.Tensor, side: int) -> torch.Tensor:
    """Split ``(B, C, H, W)`` into pooling windows ``(B, C, H / side, W / side, side^2)``, without a
    remainder at the edges.
    """
    windows = maps.unfold(2, side, side).unfold(3, side, side)  # (B, C, h, w, side, side)
    return windows.flatten(4)


def _outputs(blocks: Sequence[_ConvolutionBlock], x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        with torch.no_grad():
            maps = block.convolution(x.to(block.convolution.weight))
            x = F.max_pool2d(maps, block.pool).relu()
    return x


def _soft_forward(
    blocks: Sequence[_ConvolutionBlock],
    x: torch.Tensor,
    weights: Weights,
    sharp: float,
    patterns: Activations | None = None,
) -> tuple[torch.Tensor, Activations]:
    """Softened outputs of a chain before its last ReLU, with its winners and active units; or outputs under
    given ones.
    """
    activations: Activations = []
    for depth, block in enumerate(blocks):
        convolution = block.convolution
        maps = F.conv2d(
            x,
            weights[2 * depth],
            weights[2 * depth + 1],
            convolution.stride,
            convolution.padding,
            convolution.dilation,
            convolution.groups,
        )
        windows = _pooling_windows(maps, block.pool)
        if patterns is None:
            wins = (windows * (sharp / block.unit)).softmax(-1)
            x = (wins * windows).sum(-1)
            fires = torch.sigmoid(x * (2 * sharp / block.unit))
        else:
            wins, fires = patterns[depth]
            x = (wins * windows).sum(-1)
        activations.append((wins, fires))
        if depth < len(blocks) - 1:
            x = x * fires
    return x, activations


def _weights(blocks: Sequence[_ConvolutionBlock]) -> Weights:
    return tuple(parameter.detach() for block in blocks for parameter in block.convolution.parameters())


def _mismatch(
    blocks: Sequence[_ConvolutionBlock],
    x: torch.Tensor,
    known: _KnownBlockTensors,
    sharp: float,
    trust: float = 1.0,
) -> torch.Tensor:
    """Relative squared errors of the outputs, summed over images, and of each weight's gradient."""
    weights = _weights(blocks)
    _, patterns = _soft_forward(blocks, x, weights, sharp)
    fires = known.outputs > 0

    def forward(*weights: torch.Tensor) -> torch.Tensor:
        return _soft_forward(blocks, x, weights, sharp, patterns)[0]

    if known.weight_gradients:
        outputs, pullback = vjp(forward, *weights)[:2]
    else:
        outputs, pullback = forward(*weights), None
    errors = torch.where(fires, outputs - known.outputs, outputs.relu()).square().flatten(1).sum(1)
    loss = trust * (errors / known.outputs.square().flatten(1).sum(1)).sum()
    gradient = pullback(known.output_gradients * fires) if pullback else ()
    for computed, true in zip(gradient, known.weight_gradients, strict=True):
        loss = loss + (computed - true).square().sum() / true.square().sum()
    return loss


def _input_gradients(
    block: _ConvolutionBlock, x: torch.Tensor, cotangents: torch.Tensor, sharp: float
) -> torch.Tensor:
    """Gradient of a block's input, under the winners and active units at that input."""
    weights = _weights([block])
    _, patterns = _soft_forward([block], x, weights, sharp)
    input_cotangents: torch.Tensor = vjp(lambda x: _soft_forward([block], x, weights, sharp, patterns)[0], x)[
        1
    ](cotangents)[0]
    return input_cotangents


def _search_input(
    blocks: Sequence[_ConvolutionBlock],
    start: torch.Tensor,
    known: _KnownBlockTensors,
    bounds: Bounds,
    unit: torch.Tensor,
    steps: int,
    tv: float,
    sharpness_range: tuple[float, float],
    output_weight: float = 1.0,
    min_tv: float = 0.0,
) -> torch.Tensor:
    """Search a chain's input by Adam, with increasing sharpness and decreasing total variation, down to
    ``min_tv``.
    """
    x = (start / unit).requires_grad_()
    optimizer = torch.optim.Adam([x], LR, betas=(0.9, 0.99))
    for step in range(steps):
        progress = step / steps
        optimizer.param_groups[0]["lr"] = LR * max(1 - progress, 0.02)
        sharpness = sharpness_range[0] * (sharpness_range[1] / sharpness_range[0]) ** progress
        variation = sum(x.diff(dim=dim).abs().mean((0, 2, 3)).sum() for dim in (-1, -2)) * len(x)
        loss = (
            _mismatch(blocks, x * unit, known, sharpness, output_weight)
            + max(tv * (1 - progress) ** 2, min_tv) * variation
        )
        (x.grad,) = torch.autograd.grad(loss, x)
        optimizer.step()
        with torch.no_grad():
            x.copy_((x * unit).maximum(bounds[0]).minimum(bounds[1]) / unit)
    return (x * unit).detach()
