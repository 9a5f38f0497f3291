"""How an owner's data are kept: the table ``data`` of ``node.toml``."""

from __future__ import annotations

from dataclasses import dataclass

from fedstill.core.errors import ArgumentError, DataError
from fedstill.core.names import class_names
from fedstill.data.config import DATA

SOURCES = ("npz", "folder", "csv", "parquet", "nifti", "tensors")


@dataclass(frozen=True)
class PrivateConfig:
    """Where a node's own examples are, and in what form."""

    source: str = "npz"
    """npz: a file with arrays images and labels, or masks, or instances; folder: images by class, one folder
    a class, or a folder images beside a folder masks; nifti: a folder of volumes; csv: a table of pixels,
    image files, findings, texts, or the columns that the run's schema has; parquet: these columns, too;
    tensors: a .safetensors file of inputs and targets just as the server declares them; or
    package.module:function, your own, called with the path below, which gives images and labels, or arrays by
    name as an npz has them; or a data set of your own, by name or package.module:Class, whose folder (root)
    is the path below."""

    path: str = "data.npz"
    """The file or folder, from the folder of this file."""

    fit: bool = False
    """Bring images of another size or number of channels into the server's form; else they are refused."""

    label: str = "label"
    """csv: the column of labels, which are names of classes or their numbers from 0; of findings, the column
    that lists them divided by "|", without which each finding has a column of its own."""

    image: str = ""
    """csv: the column of image files, from the folder of the csv; if empty, "image" where there is one, else
    all other columns are pixels from 0 to 255."""

    group: str = ""
    """Whose each example is (a patient, say), for privacy.group_size: a column of the csv, or an array of the
    npz with one number or name an example, "patient" of nifti; if empty, none. Patches of a picture (task
    instances) always have that picture's patient, or "slide": the picture itself."""

    channels: tuple[int, ...] = ()
    """npz, folder and nifti for maps, images or findings: which channels, from 0; if empty, all."""

    slices: int = 0
    """nifti: at most so many axial slices of each volume, evenly spread; 0: all."""

    schema: str = ""
    """Rows of a table: the schema file that a run must have, from the folder of this file. A run of any other
    schema is refused before your data are looked at, and without a run your rows are checked against it. If
    empty, any run's will do: then a server that proposes one range after another learns, by what your node
    refuses, the least and the largest value of each column."""

    classes: tuple[str, ...] = ()
    """The classes, labels or channels that a run must have, by name and in its order; of tables the schema
    says them. A run of others is refused before your data are looked at. If empty, any run's will do: then a
    server that proposes one list after another learns, by what your node refuses, which classes your examples
    have."""

    vocabulary: str = ""
    """Texts: how words become ids, as data.vocabulary of the run; if empty, by hashing."""

    def __post_init__(self) -> None:
        # The package's own data sets are no owner's, and partly a run's test data.
        if self.source not in SOURCES and (self.source in DATA.own or self.source not in DATA):
            raise ArgumentError(
                "data.source", self.source, f"{', '.join(SOURCES)} or package.module:function"
            )
        if self.schema and self.source in ("npz", "folder", "nifti"):
            raise ArgumentError("data.schema", self.schema, f"empty, as source {self.source} holds no rows")
        try:
            object.__setattr__(self, "classes", class_names(self.classes, "data.classes"))
        except DataError as error:
            raise ArgumentError("data.classes", list(self.classes), "different names") from error
        if self.schema and self.classes:
            raise ArgumentError("data.classes", list(self.classes), "empty, as data.schema says them")
        if self.slices < 0 or (self.slices and self.source != "nifti"):
            raise ArgumentError("data.slices", self.slices, "0, or a whole number from 1 up for source nifti")
        if self.channels and self.source == "csv":
            raise ArgumentError("data.channels", list(self.channels), "empty, as source csv has all channels")
