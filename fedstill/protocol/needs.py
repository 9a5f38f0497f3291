"""Requirements of methods, and whether a task meets them."""

from __future__ import annotations

from dataclasses import dataclass

from fedstill.core.errors import by_caller
from fedstill.tasks import Task


@dataclass(frozen=True)
class Needs:
    """Requirements of a method. A federation that does not meet them is refused before any training.

    Args:
        same_architecture: the nodes' networks and the student have one architecture.
        public: public data, without labels.
        public_labels: labels of the public data, from the task's own classes.
        trains_on_public: the public data join each node's training data, so that no mechanism can account for
            the node's own records.
        split_models: networks that consist of extractor and head.
        student_architecture: a student with the architecture of one of the nodes.
        trainable: nodes' networks with trainable parameters, for training in rounds.
        images: images as inputs.
        generates_inputs: inputs that a server can generate: images or rows of a table, not texts.
        table_rows: rows of a table as inputs.
        vectors: one vector of features for each input: features of a backbone, or rows of a table.
        single_label: one class for each input.
        label_maps: inputs that can be generated from label maps.
        no_label_maps: inputs that are not generated from label maps.
        vector_outputs: one output vector for each input, not maps or images.

    >>> Needs(public=True, public_labels=True).public
    True
    """

    same_architecture: bool = False
    public: bool = False
    public_labels: bool = False
    trains_on_public: bool = False
    split_models: bool = False
    student_architecture: bool = False
    trainable: bool = False
    images: bool = False
    generates_inputs: bool = False
    table_rows: bool = False
    vectors: bool = False
    single_label: bool = False
    label_maps: bool = False
    no_label_maps: bool = False
    vector_outputs: bool = False


def unmet_need(needs: Needs, task: Task) -> str | None:
    """Return why a method with these needs cannot learn a task, or None."""
    input_name = {"texts": "texts", "rows": "rows of a table"}.get(task.form, "")
    if needs.images and input_name:
        return f"it needs images, and the inputs of this task are {input_name}"
    if needs.generates_inputs and task.form == "texts":
        return "it generates inputs, and the inputs of this task are texts"
    if needs.table_rows and task.form != "rows":
        return f"it needs rows of a table, and the inputs of this task are {task.form}"
    if needs.vectors and task.form != "rows":
        backbone = by_caller("--features.backbone NAME", "features.backbone", "features=...")
        return f"it needs vectors as inputs, such as features of a backbone ({backbone}), not {task.form}"
    if needs.single_label and task.kind != "class":
        return "it needs one class for each input, and this task has none"
    if needs.label_maps and not task.condition_channels:
        return "it generates images from label maps, and this task has none"
    if needs.no_label_maps and task.condition_channels:
        return "it generates inputs from noise, and this task generates them from label maps (fediod-maps)"
    if needs.vector_outputs and task.kind in ("map", "image"):
        return "it needs one output vector for each input, and this task has one for each pixel"
    return None
