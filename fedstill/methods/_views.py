"""Public data under several views: as nodes predict them, and as the student sees them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, Literal

import torch

from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError
from fedstill.core.seeds import derive, torch_generator
from fedstill.data.augment import shifted
from fedstill.data.public import Public
from fedstill.methods._one_shot import Asked, OneShot
from fedstill.methods._public import AT_ONCE, Batch, Distance, distil, known, labelled, logits, passes
from fedstill.methods.server import Server
from fedstill.node.group import Group
from fedstill.node.node import Node
from fedstill.protocol.method import Needs
from fedstill.protocol.questions import NodeSetting, Question


def view_seed(seed: int, p: int) -> int:
    """Of the p-th view; the first one is the public data as they are."""
    return derive(seed, "view", p) if p else 0


class Views(OneShot):
    """Public data are predicted under several views, and may have labels from which nodes learn, too."""

    longer: ClassVar[tuple[str, ...]] = ("predictions",)

    predictions: int
    views: Literal["shift", "shift-flip"]
    student_augment: Literal["none", "shift"]
    labelled: bool

    def view(self, public: Public | None, seed: int) -> torch.Tensor:
        """All public inputs ``(N, ...)`` as they are (seed 0), or moved and perhaps mirrored by a draw.

        The same seed gives the same images at the server and at every node.
        """
        inputs = known(public).inputs
        if seed == 0:
            return inputs
        return shifted(inputs, torch_generator(seed, "view"), flip=self.views == "shift-flip")

    def needs(self) -> Needs:
        """Public data, and their labels where nodes learn from them."""
        return Needs(public=True, public_labels=self.labelled, joins_public=self.labelled)

    def questions(self, at: NodeSetting) -> Iterable[Question]:
        """What nodes are asked.

        Raises:
            ArgumentError: an option by which texts, or images whose targets are pictures, would be shifted.
        """
        task = at.task
        if self.predictions > 1 and (task.tokens or task.kind == "image"):
            why = "texts are never shifted" if task.tokens else "a shifted image was never measured"
            raise ArgumentError("method.predictions", self.predictions, f"1 for task {task.name}: {why}")
        if self.student_augment != "none" and (task.tokens or task.kind in ("map", "image")):
            allowed = f"none: task {task.name} has targets that move with the image, or no images"
            raise ArgumentError("method.student_augment", self.student_augment, allowed)
        return super().questions(at)

    def prepare(self, nodes: Sequence[Node], at: NodeSetting) -> None:
        """With labelled public data: they are part of what each node learns from."""
        if self.labelled:
            public = labelled(at.public)
            for node in nodes:
                inputs = torch.cat([node.data.inputs, public.inputs])
                node.data = TensorData(inputs, torch.cat([node.data.targets, public.targets]))

    def predicted(self, nodes: Group, view: int) -> torch.Tensor:
        """What each node's model answers about all public inputs under one view, ``(G, N, C, ...)``.

        Models learn no more once the first question is asked: the last pass of each group is kept, since all
        questions about one view come from it.
        """
        names = tuple(node.name for node in nodes.nodes)
        kept: dict[tuple[str, ...], tuple[int, torch.Tensor]] = nodes.at.once("predicted", dict)
        if names not in kept or kept[names][0] != view:
            kept[names] = view, logits(nodes, self.view(nodes.at.public, view))
        return kept[names][1]

    def rehearse(self, nodes: Group) -> None:
        """A part of a pass."""
        logits(nodes, known(nodes.at.public).inputs[:AT_ONCE])

    def distil(
        self, server: Server, state: Asked, targets: torch.Tensor, distance: Distance, e: int
    ) -> float:
        """Pass ``e`` of the student towards targets of each view, ``(P, N, C, ...)``; its mean distance."""
        batches, seed = self.batches(server, targets, e), server.seed
        return distil(server.student, state.optimiser, batches, distance, server.compute, seed, "student", e)

    def batches(self, server: Server, targets: torch.Tensor, e: int) -> Iterator[Batch]:
        """Pass ``e``: shuffled public data, under the view whose turn it is, with its targets.

        Args:
            server: whose public data they are.
            targets: of each view, ``(P, N, C, ...)``.
            e: which pass.
        """
        p = e % self.predictions
        x = self.view(server.public, view_seed(server.seed, p))
        order = passes(len(x), self.batch, torch_generator(server.seed, "public", e))
        for step, rows in enumerate(order):
            chosen = rows.to(x.device)
            batch = x[chosen]
            if self.student_augment == "shift":
                batch = shifted(batch, torch_generator(server.seed, "augment", e, step), flip=False)
            yield batch, targets[p, chosen]
