"""Keeps a run's student as a file that says itself how it is used: ``student.safetensors``.

The header of the file, which whoever has safetensors can read, says in JSON what the network is called, what
its inputs are and how pixels become them. Nothing of it is code, and no pickle is written or read.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import nn

from fedstill.core.errors import ArgumentError, FedstillError, ModelError, RunFolderError, by_caller
from fedstill.core.registry import first_line
from fedstill.core.version import __version__
from fedstill.data.input_spec import InputSpec
from fedstill.models import MODELS, build
from fedstill.runs.config import load_toml
from fedstill.runs.setting import Setting, normalization, shape_of

FILE = "student.safetensors"
FORMAT = "fedstill student 1"
KEY = "fedstill"  # of the file's header


@dataclass(frozen=True)
class StudentFile:
    """What such a file says of its network.

    Args:
        model: its name, as :func:`fedstill.models.build` takes it; of a module of one's own, its class.
        spec: its inputs, classes and normalization; None: known to whoever made them alone.
        words: how words become token ids, as ``data.vocabulary`` says it, where inputs are texts.
    """

    model: str
    spec: InputSpec | None
    words: str = ""

    def header(self) -> dict[str, str]:
        """The file's header, JSON under one key, as safetensors writes several in any order; :meth:`of` reads
        it back."""
        spec = {} if self.spec is None else self.spec.to_dict()
        told = {"format": FORMAT, "version": __version__, "model": self.model, **spec, "words": self.words}
        return {KEY: json.dumps(told)}

    @classmethod
    def of(cls, header: Mapping[str, str], where: str, tasks: Collection[str] = ()) -> StudentFile:
        """What a header says. No task is imported for it beside the package's own and ``tasks``.

        Raises:
            RunFolderError: it is of another format, or says what cannot be.
        """
        try:
            table = dict(json.loads(header.get(KEY, "{}")))
        except (ValueError, TypeError) as error:
            raise RunFolderError(f"{where}: {first_line(error)}") from error
        if table.pop("format", None) != FORMAT:
            raise RunFolderError(f"{where}: is not of {FORMAT!r} (expected a student of this version)")
        try:
            model, words = str(table.pop("model")), str(table.pop("words"))
            table.pop("version")
            return cls(model, InputSpec.from_dict(table, tasks) if table else None, words)
        except (ValueError, KeyError) as error:  # ArgumentError is one
            raise RunFolderError(f"{where}: {first_line(error)}") from error

    def network(self, given: str = "", own: str = "") -> nn.Module:
        """A network of its architecture, with first weights.

        Args:
            given: a name that the caller gives in place of the file's.
            own: that may be imported, where the file names it, beside the package's own.

        Raises:
            ArgumentError: a name that may not be imported.
        """
        wanted = given or self.model
        if not given and own != wanted and wanted.partition(":")[0] not in MODELS.builtin:
            option = by_caller("--model", "model=", "model=")
            mine = f"one of the package's own, or a network that you name yourself: {option}"
            raise ArgumentError("the student's model", wanted, mine)
        spec = self.known
        return build(wanted, spec.shape, len(spec.classes), 0, "student", vocabulary=spec.vocabulary)

    @property
    def known(self) -> InputSpec:
        """Its spec.

        Raises:
            RunFolderError: the file does not say it.
        """
        if self.spec is None:
            told = "the student's file does not say what its inputs are, as features that no schema describes"
            raise RunFolderError(f"{told} (expected a run with schema=; from Python, outcome.student)")
        return self.spec


def header(setting: Setting) -> dict[str, str]:
    """What the file of a setting's student says beside the weights."""
    spec = None
    if setting.learns is not None:
        mean, std = (tuple(values.flatten().tolist()) for values in normalization(setting))
        known = setting.schema.classes if setting.schema else setting.classes
        names = tuple(known or map(str, range(setting.task.classes)))
        form = (setting.learns, names, shape_of(setting), mean, std, setting.vocabulary, setting.schema)
        with suppress(ArgumentError):  # features of rows without a schema, say
            spec = InputSpec(*form)
    return StudentFile(setting.student_name or name_of(setting), spec, setting.words).header()


def name_of(setting: Setting) -> str:
    """What a student that is given as a module is called: one of the package's own as on a command line."""
    student = setting.student
    name = MODELS.name_of(type(student))
    known = {key: each.shape for key, each in student.state_dict().items()}
    if name in MODELS.builtin:
        width = len(next(student.parameters()))  # of the first layer, which is what ``:width`` says
        given = (shape_of(setting), setting.task.output_shape(shape_of(setting))[0], 0, "student")
        for spec in (name, f"{name}:{width}"):
            with suppress(FedstillError):
                made = build(spec, *given, vocabulary=setting.vocabulary).state_dict()
                if {key: each.shape for key, each in made.items()} == known:
                    return spec
    return f"{type(student).__module__}:{type(student).__qualname__}"


def read(place: str | Path, model: nn.Module | type | str | None = None) -> tuple[nn.Module, StudentFile]:
    """A run's student, in evaluation mode on the CPU.

    Args:
        place: a run's folder, or the file out of it.
        model: a network of its architecture, to take the weights, or the name of one; None makes the one that
            the file names. What is neither the package's own nor named here is only imported for a run's
            folder on this machine, whose ``config.toml`` names it too: a file from elsewhere imports nothing.

    Raises:
        RunFolderError: there is no such file, it is broken, or does not say enough.
        ArgumentError: it names a network or a task that it may not import.
        ModelError: the weights are of another architecture.
    """
    if isinstance(model, type):
        called = model.__name__
        raise ArgumentError("model", called, f"a network, as {called}(...) makes one, or its name")
    path, folder = _located(Path(place))
    try:
        with safe_open(str(path), "pt") as file:
            told, weights = dict(file.metadata() or {}), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise RunFolderError(f"{path} cannot be read: {first_line(error)}") from error
    own: tuple[str, ...] = ()
    if folder is not None and (folder / "config.toml").exists():
        config = load_toml(folder / "config.toml")  # which also says where modules are looked for
        own = (config.student.model, config.task.registered_name)
    about = StudentFile.of(told, str(path), own[1:])
    about.known  # noqa: B018
    network = model if isinstance(model, nn.Module) else about.network(model or "", "".join(own[:1]))
    try:
        network.load_state_dict(weights)
    except (RuntimeError, KeyError) as error:
        other = f"holds weights of another architecture than {type(network).__name__}"
        raise ModelError(f"{path}: {other}: {first_line(error)}") from error
    return network.eval(), about


def _located(place: Path) -> tuple[Path, Path | None]:
    """The file, and the folder of its run, if that was named."""
    if place.is_file():
        return place, None
    if not place.is_dir():
        raise RunFolderError(f"there is no {place} (expected the folder of a finished run, or its {FILE})")
    if not (place / FILE).exists():
        none = "its run is not finished, or its method has no central model (fedstill list METHOD)"
        runs = [file.parent for below in ("*", "*/*") for file in sorted(place.glob(f"{below}/{FILE}"))]
        if runs:  # as a comparison does, by settings if it has some
            none = f"it is no run, but holds some: allowed is one of them, as {runs[0]}"
        raise RunFolderError(f"{place} holds no {FILE}: {none}")
    return place / FILE, place
