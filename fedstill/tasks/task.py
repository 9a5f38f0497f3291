"""What one of a task's metrics is called, in which unit, and which way is better.

Tells which case each example is a part of, and takes means over these.

What a method, a node and a report may ask of a task, whichever it is.

Letters: K nodes, G models of a group, B inputs, C classes, labels or channels of an output. Outputs of one
model are ``(B, C, ...)``: nothing follows C where an input has one answer, H and W where each pixel has one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch

from fedstill.core.dataset import CaseIndex, Form, TensorData, check_inputs, check_labels
from fedstill.core.errors import ArgumentError, MethodRefused
from fedstill.core.registry import Registry
from fedstill.tasks import formulas


@dataclass(frozen=True)
class Metric:
    """One of a task's metrics, as tables show it.

    Args:
        unit: "%", "dB", "px" or nothing.
        better: whether a higher or a lower one is better.
        brief: whether a terminal and a comparison's tables have it, too, and not only pages and files.
    """

    key: str
    title: str
    unit: str = "%"
    digits: int = 1
    better: Literal["higher", "lower"] = "higher"
    brief: bool = True


def case_of(examples: int, cases: CaseIndex | None) -> tuple[torch.Tensor, int]:
    """Each example's case, ``(N,)`` from 0 in the order of :meth:`CaseIndex.present`, and how many there are."""
    if cases is None:
        return torch.arange(examples), examples
    present, of = torch.unique(cases.of, return_inverse=True)
    return of, len(present)


def mean_by(values: torch.Tensor, of: torch.Tensor, count: int) -> torch.Tensor:
    """Means of ``values`` (N,) by group ``of`` (N,), ``(count,)``, without those that are NaN."""
    known = ~values.isnan()
    total = torch.zeros(count, dtype=values.dtype).index_add(0, of[known], values[known])
    return total / torch.bincount(of[known], minlength=count)  # 0 / 0 is NaN


Kind = Literal["class", "labels", "map", "image", "number", "time"]

# Functions of answers, weights and task: what goes in and comes out stands in fedstill.tasks.ensembles.
ENSEMBLES: Registry[Callable[[torch.Tensor, torch.Tensor, Task], torch.Tensor]] = Registry(
    "ensemble",
    {
        "logits": "fedstill.tasks.ensembles:logits",
        "log_probs": "fedstill.tasks.ensembles:log_probs",
        "probs": "fedstill.tasks.ensembles:probs",
        "consensus": "fedstill.tasks.ensembles:consensus",
    },
    takes="answers, weights and task",
)
Ensemble = Annotated[str, ENSEMBLES]  # an option that names one


class Task(ABC):
    """One task.

    Args:
        classes: C.

    Attributes:
        name: in messages and results.
        metrics: its metrics; the first one is what models are judged by, in percent, and higher is better.
        kind: what is learned: one class, labels that do not exclude each other, a class a pixel, an image, a
            number, the time until an event.
        form: of inputs: images ``(B, channels, H, W)`` float32, texts, which are token ids ``(B, L)`` int64,
            or rows of a table ``(B, F)`` float32.
        least: the fewest classes it can have.
        like: the package's task whose data it learns from, where that does not follow from kind and form.
        conditions: channels of what a generator of inputs is told of each, 0 where it is told nothing.
        counted: in how many classes one record is counted at most; what a node's counts can move by.
    """

    name: ClassVar[str]
    metrics: tuple[Metric, ...]
    kind: ClassVar[Kind]
    form: ClassVar[Form] = "images"
    min_classes: ClassVar[int] = 2
    data_task: ClassVar[str] = ""
    condition_channels: int = 0
    count_sensitivity: int = 1

    def __init__(self, classes: int) -> None:
        self.classes = classes

    def describe_options(self) -> str:
        """The task with its options, the same text for equal ones; what leads among its figures is none."""
        own = sorted((name, of) for name, of in vars(self).items() if name != "metrics")
        told = {name: each.tolist() if isinstance(each, torch.Tensor) else each for name, each in own}
        return f"{self.name} {told}"

    @property
    def metric(self) -> str:
        """The key of the figure that models are judged by."""
        return self.metrics[0].key

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a model's output for one input of a shape: ``(C,)``, or ``(C, H, W)`` for maps."""
        return (self.classes, *shape[1:]) if self.kind in ("map", "image") else (self.classes,)

    def empty_targets(self, count: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Targets of inputs of a shape that say nothing, in the form that this task's targets have."""
        if self.kind in ("image", "number"):
            return torch.zeros(count, *self.output_shape(shape))
        if self.kind == "map":
            return torch.zeros(count, *shape[1:], dtype=torch.int64)
        if self.kind == "labels":
            return torch.full((count, self.classes), -1, dtype=torch.int64)
        return torch.zeros(count, dtype=torch.int64)

    def check(self, data: TensorData, what: str) -> None:
        """Refuse data that cannot be learned from (shapes, NaN, targets outside what is allowed).

        Raises:
            DataError: naming the first fault; begins with ``what``.
        """
        check_inputs(data, what, self.form)
        if self.kind == "labels":  # -1 is unknown
            check_labels(data.targets, 2, what, (self.classes,), least=-1)
        elif self.kind != "image":
            shape = tuple(data.inputs.shape[2:]) if self.kind == "map" else ()
            check_labels(data.targets, self.classes, what, shape)

    # --- local training ---

    @abstractmethod
    def loss(self, outputs: torch.Tensor, targets: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
        """What G models lose on G batches: ``(G, B, C, ...)`` and ``(G, B, ...)`` to ``(G,)``.

        Examples must count each by itself and evenly: private training takes them one by one.
        """

    @abstractmethod
    def counts(self, data: TensorData) -> torch.Tensor:
        """How many examples of each class: ``(C,)`` floats, one example adding at most :attr:`counted`.

        Where :attr:`counted` is 1 each example adds 1 in all, so that counts sum to the number of examples.
        """

    # --- FedIOD: answers of K nodes ---

    @abstractmethod
    def confidence_loss(self, responses: torch.Tensor, pi: torch.Tensor) -> torch.Tensor:
        """L_conf, FedIOD Eq. 3, of answers ``(K, B, C, ...)`` weighed by ``pi`` (K,): a scalar."""

    @abstractmethod
    def uniqueness_loss(self, responses: torch.Tensor, pi: torch.Tensor) -> torch.Tensor:
        """L_unique, FedIOD Eq. 5: a scalar, the lower the less the nodes agree."""

    @abstractmethod
    def balance_loss(self, ensembled: torch.Tensor) -> torch.Tensor:
        """Lowest where the classes of ``(B, C, ...)`` are evenly met; 0 where inputs are made to order."""

    def importance_weights(self, counts: torch.Tensor, ratio: torch.Tensor | None = None) -> torch.Tensor:
        """pi_k(x), FedIOD Eq. 8: ``(K, C)`` counts and ``(K, B)`` critic ratios to ``(K, B or 1, C)``."""
        return formulas.importance(counts.float(), ratio)

    def ensemble(self, responses: torch.Tensor, weights: torch.Tensor, how: str) -> torch.Tensor:
        """A(z_1..z_K, x), FedIOD Eq. 9, by an ensemble's name: ``(K, B, C, ...)`` and weights ``(K, B or 1,
        C)``, which sum to 1 over the nodes, to ``(B, C, ...)``.

        Raises:
            ArgumentError: it gives something else.
        """
        weights = weights.reshape(weights.shape + (1,) * (responses.ndim - 3))
        together = ENSEMBLES[how](responses, weights, self)
        found = tuple(getattr(together, "shape", ()))
        if found != responses.shape[1:]:
            allowed = f"one that makes {tuple(responses.shape[1:])} of answers {tuple(responses.shape)}"
            raise ArgumentError("ensemble", how, f"{allowed}, not {found}")
        if responses.requires_grad and torch.is_grad_enabled() and not together.requires_grad:
            allowed = "one that lets gradients through, as the method asks with what is made of the answers"
            raise ArgumentError("ensemble", how, allowed)
        return together

    def normalize_outputs(self, responses: torch.Tensor) -> torch.Tensor:
        """Outputs ``(K, B, C, ...)`` without what training leaves arbitrary, so that nodes can be compared
        number by number: log-probabilities of classes, and as they are what has no such thing."""
        return responses

    def mix_outputs(self, responses: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The output ``(B, C, ...)`` that means the weighted mean of what ``(K, B, C, ...)`` predict.

        Args:
            weights: broadcasting with them, summing to 1 over the nodes.
        """
        return (weights * responses).sum(0)

    def consensus(self, responses: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """:meth:`mixture`, but nodes are weighed as wholes, by what they know of the classes that an input
        shows. The same where no class excludes another."""
        return self.mix_outputs(responses, weights)

    @abstractmethod
    def expertise(self, ensembled: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """How much each node knows about what an input shows, ``(K, B)``, summing to 1 over nodes."""

    @abstractmethod
    def distillation_loss(self, student: torch.Tensor, target: torch.Tensor, tau: float) -> torch.Tensor:
        """How far the student is from the ensemble, FedIOD Eq. 6 and 10: ``(B,)`` from ``(B, C, ...)``."""

    # --- evaluation ---

    @abstractmethod
    def compute_metrics(
        self, outputs: torch.Tensor, targets: torch.Tensor, cases: CaseIndex | None = None
    ) -> Mapping[str, float]:
        """All :attr:`metrics` by key, of outputs ``(N, C, ...)``; NaN where one cannot be said.

        Args:
            cases: of which cases the examples are parts; None: each is a case of its own.
        """

    def compute_primary_metric(
        self, outputs: torch.Tensor, targets: torch.Tensor, cases: CaseIndex | None = None
    ) -> float:
        """The figure that models are judged by, alone: looked at often, while the others may take long."""
        return self.compute_metrics(outputs, targets, cases)[self.metric]

    def bootstrap_metric(
        self,
        outputs: torch.Tensor,
        targets: torch.Tensor,
        cases: CaseIndex | None,
        weights: npt.NDArray[np.float64],
    ) -> npt.NDArray[np.float64] | None:
        """The leading figure for each of R weightings, ``(R,)``: examples count several times or not at all.

        Here the weighted mean of :meth:`scores`; None for tasks that have none.

        Args:
            weights: how often each example counts, ``(R, N)``; those of one case count alike.
        """
        scores = self.case_scores(outputs, targets, cases)
        if scores is None:
            return None
        of, count = case_of(len(targets), cases)
        by_case = np.empty((len(weights), count))
        by_case[:, of.numpy()] = weights
        told, known = scores.double().cpu().numpy(), ~scores.isnan().cpu().numpy()
        means: npt.NDArray[np.float64] = by_case[:, known] @ told[known] / by_case[:, known].sum(1)
        return means

    def prior_outputs(self, targets: torch.Tensor) -> torch.Tensor | None:
        """Outputs ``(N, C, ...)`` of who knows how often each class is met in ``targets``, and nothing of the
        inputs: a mark that models should pass. None for tasks without one."""
        return None

    def extra_results(self, outputs: torch.Tensor, targets: torch.Tensor) -> Mapping[str, Any]:
        """What a result says of the central model's outputs beside its figures, by key."""
        return {}

    def metric_advice(self, targets: torch.Tensor, names: tuple[str, ...]) -> str | None:
        """What a reader should be told of test targets that make the leading figure say little."""
        return None

    def measurable_targets(self, targets: torch.Tensor, data: TensorData) -> torch.Tensor:
        """Test targets, of ``targets``' shape, as far as a model that learned from ``data`` alone was taught
        what they ask: all of them, but for tasks some of whose labels can be unknown."""
        return targets

    def case_scores(
        self, outputs: torch.Tensor, targets: torch.Tensor, cases: CaseIndex | None = None
    ) -> torch.Tensor | None:
        """How good the prediction is of each case that there is an example of, for choosing which to show;
        the leading figure is their mean.

        In the order of ``Cases.present()``, ``(cases,)``; NaN where it cannot be said. None for tasks whose
        predictions are not pictures.
        """
        return None

    def display_map(self, probabilities: torch.Tensor) -> torch.Tensor:
        """What a picture shows, for people to look at: probabilities ``(C, H, W)`` to numbers ``(H, W)``.

        They are of classes or, where a task tells objects apart, of objects (0 is none).
        """
        return probabilities.argmax(0)

    def per_class(self, outputs: torch.Tensor, targets: torch.Tensor) -> list[float] | None:
        """The metric for each label by itself, NaN where it cannot be said; None for tasks without labels."""
        return None

    # --- inputs made to order, for tasks with conditions ---

    def observe(self, x: torch.Tensor) -> torch.Tensor:
        """What a model gets to see of images ``(..., channels, H, W)``, differentiably: all of them, but for
        reconstruction, which sees what its measurement leaves."""
        return x

    def real_images(self, data: TensorData) -> torch.Tensor:
        """The images ``(N, channels, H, W)`` that a generator should imitate."""
        return data.inputs

    def label_maps(self, data: TensorData) -> torch.Tensor:
        """What a generator would be told to make each example: ``(N, H, W)`` uint8. Private: a release.

        Raises:
            MethodRefused: a task without conditions.
        """
        raise self._unconditional()

    def encode_maps(self, maps: torch.Tensor) -> torch.Tensor:
        """Maps ``(..., H, W)`` as a network takes them: ``(..., conditions, H, W)`` float32 in -1..1."""
        raise self._unconditional()

    def targets_from_maps(self, maps: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The targets that images ``x`` made from maps ``(B, H, W)`` should have."""
        raise self._unconditional()

    def sample_maps(self, count: int, height: int, width: int, generator: torch.Generator) -> torch.Tensor:
        """Maps that no data were needed for: ``(count, H, W)`` uint8, synthetic shapes."""
        raise self._unconditional()

    def _unconditional(self) -> MethodRefused:
        reason = f"task {self.name} has no label maps to make inputs from"
        return MethodRefused("a generator told what to make", "every node", reason)
