"""The task interface: losses, ensembles, metrics and label maps behind one class.

Methods, nodes and reports call only :class:`Task`, so they work with every task. A :class:`TaskConfig`, a
frozen dataclass next to each task's class, selects a task by name, with its options. The module also holds
:class:`Metric` and the helpers that average metrics over cases.

Letters: K nodes, G stacked models, B inputs, C classes, labels or output channels. The outputs of one model
have shape ``(B, C, ...)``. Nothing follows C if an input has one target; H and W follow if each pixel has
one.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from inspect import isabstract
from typing import Annotated, Any, ClassVar, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch

from fedstill.core.dataset import CaseIndex, Form, TensorData, check_inputs, check_labels
from fedstill.core.errors import ArgumentError, MethodRefused
from fedstill.core.registry import Registrable, Registry
from fedstill.tasks import logit_formulas


@dataclass(frozen=True)
class Metric:
    """One metric of a task, as tables show it.

    Args:
        key: name in result files, such as ``"balanced_accuracy"``.
        title: name in tables and figures.
        unit: ``"%"``, ``"dB"``, ``"px"`` or an empty string.
        digits: decimals in tables, 0 or more.
        better: ``"higher"`` or ``"lower"``.
        in_summary: True if the terminal and the tables of comparisons show it. Report pages and result files
            show all metrics.

    Example:
        >>> Metric("psnr", "PSNR", unit="dB", digits=2).better
        'higher'
    """

    key: str
    title: str
    unit: str = "%"
    digits: int = 1
    better: Literal["higher", "lower"] = "higher"
    in_summary: bool = True


def case_indices(examples: int, cases: CaseIndex | None) -> tuple[torch.Tensor, int]:
    """Return the case of each example, ``(N,)`` int64, and the number of cases.

    Cases count from 0 in the order of :meth:`CaseIndex.present_ids`. Without cases each example is its own
    case.
    """
    if cases is None:
        return torch.arange(examples), examples
    present, case = torch.unique(cases.case_ids, return_inverse=True)
    return case, len(present)


def mean_by_group(values: torch.Tensor, group: torch.Tensor, count: int) -> torch.Tensor:
    """Return the mean of ``values`` (N,) in each of ``count`` groups, ``(count,)``; NaN values are ignored.

    Args:
        values: one number per example, ``(N,)``.
        group: group of each example, ``(N,)`` int64.
        count: number of groups. A group without known values has NaN.
    """
    known = ~values.isnan()
    total = torch.zeros(count, dtype=values.dtype).index_add(0, group[known], values[known])
    return total / torch.bincount(group[known], minlength=count)  # 0 / 0 is NaN


TargetKind = Literal["class", "labels", "map", "image", "number", "time"]
# Form of a data set's examples: the targets of images, or "texts", or rows of a table with a class ("rows"),
# a number ("values") or a time until an event ("times"), or images with separate objects ("instances").
Targets = Literal["class", "labels", "map", "image", "instances", "texts", "rows", "values", "times"]

# Functions of responses, weights and task; fedstill.tasks.ensembles documents their shapes.
ENSEMBLES: Registry[Callable[[torch.Tensor, torch.Tensor, Task], torch.Tensor]] = Registry(
    "ensemble",
    {
        "logits": "fedstill.tasks.ensembles:logits",
        "sum": "fedstill.tasks.ensembles:logit_sum",
        "log_probs": "fedstill.tasks.ensembles:log_probs",
        "probs": "fedstill.tasks.ensembles:probs",
        "consensus": "fedstill.tasks.ensembles:consensus",
        "median": "fedstill.tasks.ensembles:median",
        "trimmed_mean": "fedstill.tasks.ensembles:trimmed_mean",
        "geometric_median": "fedstill.tasks.ensembles:geometric_median",
        "cronus": "fedstill.tasks.ensembles:cronus",
        "expguard": "fedstill.tasks.ensembles:expguard",
    },
    call_signature="responses, weights and task",
)
Ensemble = Annotated[str, ENSEMBLES]  # type of options that name an ensemble


class Task(ABC):
    """Base class of a learning task: targets, losses, ensembling of responses, and metrics.

    A custom task subclasses :class:`Task` or one of its subclasses, such as
    :class:`fedstill.tasks.classification.SoftmaxTask` for logits over mutually exclusive classes. A frozen
    :class:`TaskConfig` with ``task_class`` makes it available by name (docs/custom-task.md).

    Abstract methods: :meth:`loss`, :meth:`counts`, :meth:`confidence_loss`, :meth:`uniqueness_loss`,
    :meth:`balance_loss`, :meth:`expertise`, :meth:`distillation_loss` and :meth:`compute_metrics`.

    Args:
        classes: C, the number of classes, labels or output channels.

    Attributes:
        name: name in messages and results.
        metrics: all metrics. The first one is the primary metric, which ranks models. It is a percentage, and
            higher is better.
        kind: form of the targets: ``"class"`` (one class), ``"labels"`` (labels that do not exclude each
            other), ``"map"`` (one class per pixel), ``"image"``, ``"number"`` or ``"time"`` (time until an
            event).
        form: form of the inputs: ``"images"`` ``(B, channels, H, W)`` float32, ``"texts"`` (token ids
            ``(B, L)`` int64) or ``"rows"`` of a table ``(B, F)`` float32.
        min_classes: smallest allowed C.
        data_task: name of the built-in task whose data this task uses. Empty if ``kind`` and ``form``
            determine the data.
        condition_channels: channels of the condition that a generator of inputs receives. 0 for tasks without
            label maps.
        count_sensitivity: largest number of classes in which :meth:`counts` counts one record. This is the L1
            sensitivity of the counts.

    Example:
        >>> from fedstill.tasks.classification import Classification
        >>> task = Classification(3)
        >>> task.metric, task.output_shape((1, 28, 28))
        ('accuracy', (3,))
        >>> outputs = torch.tensor([[2.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
        >>> task.compute_metrics(outputs, torch.tensor([0, 1]))["accuracy"]
        50.0
    """

    name: ClassVar[str]
    metrics: tuple[Metric, ...]
    kind: ClassVar[TargetKind]
    form: Form = "images"
    min_classes: ClassVar[int] = 2
    data_task: ClassVar[str] = ""
    condition_channels: int = 0
    count_sensitivity: int = 1

    def __init__(self, classes: int) -> None:
        self.classes = classes

    def option_values(self) -> list[Any]:
        """Return the values of the task's attributes, without the metrics. Equal tasks give equal values."""
        values = [value for name, value in vars(self).items() if name != "metrics"]
        return [value.tolist() if isinstance(value, torch.Tensor) else value for value in values]

    @property
    def metric(self) -> str:
        """Key of the primary metric."""
        return self.metrics[0].key

    def on_features(self) -> Task:
        """Return this task with rows of features in place of its images or texts.

        Raises:
            ArgumentError: an input has a target at each pixel.
        """
        if self.kind in ("map", "image"):
            expected = "a task with one output per input, as features are one vector per input"
            raise ArgumentError("task.name", self.name, expected)
        task = copy.copy(self)
        task.form = "rows"
        return task

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a model's output for one input of a shape: ``(C,)``, or ``(C, H, W)`` for
        maps.
        """
        return (self.classes, *shape[1:]) if self.kind in ("map", "image") else (self.classes,)

    def empty_targets(self, count: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Return ``count`` placeholder targets for inputs of a shape: zeros, or -1 (unknown) for labels."""
        if self.kind in ("image", "number"):
            return torch.zeros(count, *self.output_shape(shape))
        if self.kind == "map":
            return torch.zeros(count, *shape[1:], dtype=torch.int64)
        if self.kind == "labels":
            return torch.full((count, self.classes), -1, dtype=torch.int64)
        return torch.zeros(count, dtype=torch.int64)

    def check(self, data: TensorData, description: str) -> None:
        """Refuse data with wrong shapes or types, with NaN, or with targets out of range.

        Args:
            data: examples to check.
            description: description of the data, the first words of the error.

        Raises:
            DataError: the data are invalid; the message names the first fault.
        """
        check_inputs(data, description, self.form)
        if self.kind == "labels":  # -1 is unknown
            check_labels(data.targets, 2, description, (self.classes,), min_label=-1)
        elif self.kind != "image":
            shape = tuple(data.inputs.shape[2:]) if self.kind == "map" else ()
            check_labels(data.targets, self.classes, description, shape)

    # --- local training ---

    @abstractmethod
    def loss(self, outputs: torch.Tensor, targets: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
        """Return the training loss of G models on one batch each: ``(G, B, C, ...)`` and ``(G, B, ...)`` to
        ``(G,)``.

        The loss must be the mean of one loss per example, because DP-SGD computes gradients per example.

        Args:
            outputs: logits or values of G models, ``(G, B, C, ...)``.
            targets: targets of each model's batch, ``(G, B, ...)``.
            smoothing: label smoothing, from 0 to 1. Tasks without labels ignore it.
        """

    @abstractmethod
    def counts(self, data: TensorData) -> torch.Tensor:
        """Return the number of examples of each class, ``(C,)`` floats.

        One example adds at most :attr:`count_sensitivity` in all. If :attr:`count_sensitivity` is 1, each
        example adds exactly 1, and the counts sum to the number of examples.
        """

    # --- FedIOD: responses of K nodes ---

    @abstractmethod
    def confidence_loss(self, responses: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        """Return L_conf, FedIOD Eq. 3, a scalar: the mean entropy of the responses.

        Args:
            responses: outputs of the nodes, ``(K, B, C, ...)``.
            share: shares of the nodes in all examples, ``(K,)``: pi_k of Eq. 2 to 5.
        """

    @abstractmethod
    def uniqueness_loss(self, responses: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        """Return L_unique, FedIOD Eq. 5, a scalar: lower if the nodes agree less.

        Args:
            responses: outputs of the nodes, ``(K, B, C, ...)``.
            share: shares of the nodes in all examples, ``(K,)``: pi_k of Eq. 2 to 5.
        """

    @abstractmethod
    def balance_loss(self, ensembled: torch.Tensor) -> torch.Tensor:
        """Return a scalar that is lowest if the ensembled outputs ``(B, C, ...)`` show all classes equally
        often.

        It is 0 if the inputs are generated from label maps.
        """

    def importance_weights(self, counts: torch.Tensor, ratio: torch.Tensor | None = None) -> torch.Tensor:
        """Return pi_k(x), FedIOD Eq. 8: ``(K, C)`` counts and ``(K, B)`` critic ratios to
        ``(K, B or 1, C)``.
        """
        return logit_formulas.importance_weights(counts.float(), ratio)

    def ensemble(self, responses: torch.Tensor, weights: torch.Tensor, name: str) -> torch.Tensor:
        """Return A(z_1..z_K, x), FedIOD Eq. 9: the ensembled outputs ``(B, C, ...)``.

        Args:
            responses: outputs of the nodes, ``(K, B, C, ...)``.
            weights: importance weights ``(K, B or 1, C)``, summing to 1 over the nodes.
            name: name of the ensemble, such as ``"logits"``.

        Raises:
            ArgumentError: the ensemble returns another shape, or it stops gradients that the method needs.
        """
        weights = weights.reshape(weights.shape + (1,) * (responses.ndim - 3))
        ensembled = ENSEMBLES[name](responses, weights, self)
        shape = tuple(getattr(ensembled, "shape", ()))
        if shape != responses.shape[1:]:
            expected = f"one that returns {tuple(responses.shape[1:])} for responses {tuple(responses.shape)}"
            raise ArgumentError("ensemble", name, f"{expected}, not {shape}")
        if responses.requires_grad and torch.is_grad_enabled() and not ensembled.requires_grad:
            expected = "one that lets gradients through, as the method needs gradients of the ensemble"
            raise ArgumentError("ensemble", name, expected)
        return ensembled

    def normalize_outputs(self, responses: torch.Tensor) -> torch.Tensor:
        """Return outputs ``(K, B, C, ...)`` without the offsets that training leaves arbitrary.

        Classes become log-probabilities, so that nodes can be compared number by number. Outputs without such
        an offset stay as they are.
        """
        return responses

    def predictions(self, responses: torch.Tensor) -> torch.Tensor:
        """Return what outputs ``(K, B, C, ...)`` predict, in bounded units where there are such.

        Classes become probabilities, and so do labels. Numbers stay as they are.
        """
        return responses

    def mix_outputs(self, responses: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the output ``(B, C, ...)`` that predicts the weighted mean of the nodes' predictions.

        Args:
            responses: outputs of the nodes, ``(K, B, C, ...)``.
            weights: weights that broadcast with the responses, summing to 1 over the nodes.
        """
        return (weights * responses).sum(0)

    def consensus(self, responses: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return :meth:`mix_outputs` with one weight per node instead of one per class.

        A node's weight follows from what it knows about the classes that the input shows. Tasks whose classes
        do not exclude each other return :meth:`mix_outputs`.
        """
        return self.mix_outputs(responses, weights)

    @abstractmethod
    def expertise(self, ensembled: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return how much each node knows about the classes that an input shows, ``(K, B)``, summing to 1
        over nodes.

        Args:
            ensembled: ensembled outputs, ``(B, C, ...)``.
            weights: importance weights, ``(K, B or 1, C)``.
        """

    @abstractmethod
    def distillation_loss(self, student: torch.Tensor, target: torch.Tensor, tau: float) -> torch.Tensor:
        """Return the distance between student and ensemble, FedIOD Eq. 6 and 10: ``(B,)`` from
        ``(B, C, ...)``.

        Args:
            student: outputs of the student, ``(B, C, ...)``.
            target: ensembled outputs, ``(B, C, ...)``.
            tau: temperature, above 0; infinity gives the limit.
        """

    # --- evaluation ---

    @abstractmethod
    def compute_metrics(
        self, outputs: torch.Tensor, targets: torch.Tensor, cases: CaseIndex | None = None
    ) -> Mapping[str, float]:
        """Return all :attr:`metrics` by key. A metric that is undefined for these data is NaN.

        Args:
            outputs: outputs of a model, ``(N, C, ...)``.
            targets: targets, ``(N, ...)``.
            cases: cases, such as patients, that the examples belong to. None: each example is its own case.
        """

    def compute_primary_metric(
        self, outputs: torch.Tensor, targets: torch.Tensor, cases: CaseIndex | None = None
    ) -> float:
        """Return the primary metric only. It is computed often, and the other metrics may be slow."""
        return self.compute_metrics(outputs, targets, cases)[self.metric]

    def bootstrap_metric(
        self,
        outputs: torch.Tensor,
        targets: torch.Tensor,
        cases: CaseIndex | None,
        weights: npt.NDArray[np.float64],
    ) -> npt.NDArray[np.float64] | None:
        """Return the primary metric under each of R weightings of the examples, ``(R,)``, or None.

        Confidence intervals come from these values. The default is the weighted mean of :meth:`case_scores`,
        or None for tasks without case scores.

        Args:
            outputs: outputs of a model, ``(N, C, ...)``.
            targets: targets, ``(N, ...)``.
            cases: cases that the examples belong to. None: each example is its own case.
            weights: number of times that each example counts, ``(R, N)``. Examples of one case have equal
                weights.
        """
        scores = self.case_scores(outputs, targets, cases)
        if scores is None:
            return None
        case, count = case_indices(len(targets), cases)
        by_case = np.empty((len(weights), count))
        by_case[:, case.numpy()] = weights
        values, known = scores.double().cpu().numpy(), ~scores.isnan().cpu().numpy()
        means: npt.NDArray[np.float64] = by_case[:, known] @ values[known] / by_case[:, known].sum(1)
        return means

    def prior_outputs(self, targets: torch.Tensor) -> torch.Tensor | None:
        """Return outputs ``(N, C, ...)`` that depend on class frequencies in ``targets`` only, or None.

        They are a baseline: a model should exceed their metrics. None for tasks without such a baseline.
        """
        return None

    def extra_results(self, outputs: torch.Tensor, targets: torch.Tensor) -> Mapping[str, Any]:
        """Return additional results of the student's outputs, by key, such as a confusion matrix."""
        return {}

    def metric_warning(self, targets: torch.Tensor, names: tuple[str, ...]) -> str | None:
        """Return a warning if the primary metric says little about these test targets, or None.

        Args:
            targets: test targets, ``(N, ...)``.
            names: names of the classes.
        """
        return None

    def measurable_targets(self, targets: torch.Tensor, data: TensorData) -> torch.Tensor:
        """Return test targets without the labels that a model trained on ``data`` cannot know.

        Tasks with unknown labels replace them by "unknown". All other tasks return ``targets``.
        """
        return targets

    def case_scores(
        self, outputs: torch.Tensor, targets: torch.Tensor, cases: CaseIndex | None = None
    ) -> torch.Tensor | None:
        """Return a score of the prediction of each present case, ``(cases,)``, or None.

        Scores are in the order of :meth:`CaseIndex.present_ids`, and NaN if undefined. The primary metric is
        their mean. Reports choose example predictions by them. None for tasks that do not predict images or
        maps.
        """
        return None

    def display_map(self, probabilities: torch.Tensor) -> torch.Tensor:
        """Return the map that figures show: probabilities ``(C, H, W)`` to numbers ``(H, W)``.

        The numbers are classes, or objects for tasks that separate objects (0 is background).
        """
        return probabilities.argmax(0)

    def metric_per_class(self, outputs: torch.Tensor, targets: torch.Tensor) -> list[float] | None:
        """Return the primary metric of each label, NaN if undefined. None for tasks without labels."""
        return None

    # --- inputs generated from label maps, for tasks with conditions ---

    def observe(self, x: torch.Tensor) -> torch.Tensor:
        """Return the inputs that a model sees of images ``(..., channels, H, W)``, differentiably.

        For reconstruction this is the undersampled image. All other tasks return ``x``.
        """
        return x

    def real_images(self, data: TensorData) -> torch.Tensor:
        """Return the images ``(N, channels, H, W)`` that a generator should imitate."""
        return data.inputs

    def label_maps(self, data: TensorData) -> torch.Tensor:
        """Return the label map of each example, from which a generator makes images: ``(N, H, W)`` uint8.

        The maps are private: sending them is a release.

        Raises:
            MethodRefused: the task has no label maps.
        """
        raise self._no_label_maps()

    def encode_maps(self, maps: torch.Tensor) -> torch.Tensor:
        """Return maps ``(..., H, W)`` as network inputs: ``(..., condition_channels, H, W)`` float32 in
        -1..1.
        """
        raise self._no_label_maps()

    def targets_from_maps(self, maps: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return the targets of images ``x`` that were generated from maps ``(B, H, W)``."""
        raise self._no_label_maps()

    def sample_maps(self, count: int, height: int, width: int, generator: torch.Generator) -> torch.Tensor:
        """Return ``count`` random label maps of synthetic shapes, ``(count, H, W)`` uint8. They use no
        private data.
        """
        raise self._no_label_maps()

    def _no_label_maps(self) -> MethodRefused:
        reason = f"task {self.name} has no label maps to generate inputs from"
        return MethodRefused("a conditional generator", "", reason)


class TaskConfig(Registrable):
    """Base class of task options. A subclass is a frozen dataclass whose fields are the task's keyword
    arguments.

    Attributes:
        task_class: class of the task. :meth:`make` calls it with the number of classes and with each field.

    Example:
        >>> from fedstill.tasks.segmentation import SegmentationConfig
        >>> SegmentationConfig(dice=0.0).make(["background", "tumor"]).classes
        2
    """

    section: ClassVar[str] = "task"

    default = "classification"
    task_class: ClassVar[type[Task]]

    @staticmethod
    def validate_class(kind: Any) -> str | None:
        """Return what a custom class is missing: all that options need, and a complete task class."""
        if missing := Registrable.validate_class(kind):
            return missing
        task_class = kind.task_class
        if not (isinstance(task_class, type) and issubclass(task_class, Task)):
            return "a class with task_class: ClassVar[type[Task]], the class of its task"
        if isabstract(task_class):
            missing = ", ".join(sorted(task_class.__abstractmethods__))
            return f"a class whose {task_class.__name__} also has {missing}"
        metrics = getattr(task_class, "metrics", ())
        if not metrics or not all(isinstance(metric, Metric) for metric in metrics):
            return f"a class whose {task_class.__name__} has metrics, a tuple of Metric"
        if getattr(task_class, "kind", None) not in get_args(TargetKind):
            return f"a class whose {task_class.__name__} has a kind, one of {', '.join(get_args(TargetKind))}"
        if not isinstance(getattr(task_class, "name", None), str):
            return f"a class whose {task_class.__name__} has a name, for messages"
        return None

    def make(self, classes: int | Sequence[str]) -> Task:
        """Return the task with these options.

        Args:
            classes: C, or the names of the C classes, labels or channels.
        """
        options: Any = self
        task_class: Any = self.task_class
        count = classes if isinstance(classes, int) else len(classes)
        task: Task = task_class(count, **{field.name: getattr(self, field.name) for field in fields(options)})
        return task

    def minimal_task(self) -> Task:
        """Return the task with the smallest number of classes, for checks that do not depend on it."""
        return self.make(self.task_class.min_classes)

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Metrics of the task, the primary metric first."""
        return self.minimal_task().metrics

    @property
    def targets(self) -> Targets:
        """Form of the examples that this task needs. Tasks with equal forms share data sets."""
        if self.task_class.data_task == "instances":
            return "instances"
        kind = self.task_class.kind
        if kind == "number":
            return "values"
        if kind == "time":
            return "times"
        return kind if self.task_class.form == "images" else self.task_class.form


TASKS: Registry[type[TaskConfig]] = Registry(
    "task",
    {
        "classification": "fedstill.tasks.classification:ClassificationConfig",
        "text": "fedstill.tasks.classification:TextConfig",
        "tabular": "fedstill.tasks.classification:TabularConfig",
        "regression": "fedstill.tasks.regression:RegressionConfig",
        "survival": "fedstill.tasks.survival:SurvivalConfig",
        "multi-label": "fedstill.tasks.multi_label:MultiLabelConfig",
        "segmentation": "fedstill.tasks.segmentation:SegmentationConfig",
        "instances": "fedstill.tasks.instances:InstancesConfig",
        "reconstruction": "fedstill.tasks.reconstruction:ReconstructionConfig",
    },
    base=TaskConfig,
)

TaskConfig.registry = TASKS
