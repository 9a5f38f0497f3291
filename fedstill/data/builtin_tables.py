"""Tables that come with scikit-learn, with ranges from what was published of them, rounded outwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fedstill.core.table_schema import Schema, SchemaColumn
from fedstill.data.table_data import TableData
from fedstill.tasks import Targets

# Of each of ten measurements of a nucleus: its mean, its standard error, and its worst value.
NUCLEI = {
    "radius": ((6, 30), (0, 3), (7, 40)),
    "texture": ((9, 40), (0, 5), (12, 50)),
    "perimeter": ((40, 190), (0, 22), (50, 260)),
    "area": ((140, 2600), (0, 550), (180, 4300)),
    "smoothness": ((0.05, 0.17), (0, 0.035), (0.07, 0.23)),
    "compactness": ((0, 0.35), (0, 0.14), (0, 1.1)),
    "concavity": ((0, 0.43), (0, 0.4), (0, 1.3)),
    "concave points": ((0, 0.21), (0, 0.055), (0, 0.3)),
    "symmetry": ((0.1, 0.31), (0, 0.08), (0.15, 0.67)),
    "fractal dimension": ((0.04, 0.1), (0, 0.03), (0.05, 0.21)),
}
WINE = {
    "alcohol": (11, 15),
    "malic acid": (0.7, 6),
    "ash": (1.3, 3.3),
    "alcalinity of ash": (10, 30),
    "magnesium": (70, 170),
    "total phenols": (0.9, 4),
    "flavanoids": (0.3, 5.2),
    "nonflavanoid phenols": (0.1, 0.7),
    "proanthocyanins": (0.4, 3.6),
    "colour intensity": (1, 13),
    "hue": (0.4, 1.8),
    "OD280/OD315": (1.2, 4),
    "proline": (270, 1700),
}
DIABETES = {
    "age": (18, 80),
    "bmi": (15, 45),
    "blood pressure": (60, 140),
    "tc": (90, 310),
    "ldl": (40, 250),
    "hdl": (20, 100),
    "tch": (1, 10),
    "ltg": (3, 6.5),
    "glu": (50, 130),
}


@dataclass(frozen=True, kw_only=True)
class BreastCancer(TableData):
    """30 measurements of cell nuclei, malignant or benign (569 rows), as they come with scikit-learn."""

    note: ClassVar[str] = "the Breast Cancer Wisconsin (Diagnostic) data of scikit-learn"

    def schema(self) -> Schema:
        """Means, standard errors and worst values, in scikit-learn's order."""
        ranges = {
            f"{kind} {name}": each[place]
            for place, kind in enumerate(("mean", "error of", "worst"))
            for name, each in NUCLEI.items()
        }
        return _schema(ranges, "diagnosis", ("malignant", "benign"))

    def cells(self) -> Mapping[str, Sequence[Any]]:
        """All 569 rows."""
        from sklearn.datasets import load_breast_cancer

        return _cells(load_breast_cancer(), self.schema())


@dataclass(frozen=True, kw_only=True)
class Wine(TableData):
    """13 chemical measurements of wines of three cultivators (178 rows), as they come with scikit-learn."""

    note: ClassVar[str] = "the wine recognition data of scikit-learn"

    def schema(self) -> Schema:
        """In scikit-learn's order."""
        return _schema(WINE, "cultivator", ("0", "1", "2"))

    def cells(self) -> Mapping[str, Sequence[Any]]:
        """All 178 rows."""
        from sklearn.datasets import load_wine

        return _cells(load_wine(), self.schema())


@dataclass(frozen=True, kw_only=True)
class Diabetes(TableData):
    """Ten baseline measurements of patients and how far their diabetes was a year later (442 rows), as they
    come with scikit-learn."""

    targets: ClassVar[tuple[Targets, ...]] = ("values",)
    note: ClassVar[str] = "the diabetes data of scikit-learn, unscaled"

    def schema(self) -> Schema:
        """Nine numbers, with the sex in its place as a category; the target is the progression."""
        age, *others = (_number(name, ends) for name, ends in DIABETES.items())
        sex = SchemaColumn(name="sex", type="category", categories=("1", "2"))
        return Schema("progression", (age, sex, *others, _number("progression", (0, 350))))

    def cells(self) -> Mapping[str, Sequence[Any]]:
        """All 442 rows."""
        from sklearn.datasets import load_diabetes

        found, schema = load_diabetes(scaled=False), self.schema()
        names = [column.name for column in schema.inputs]
        return {**dict(zip(names, found.data.T.tolist(), strict=True)), schema.target: found.target.tolist()}


def _number(name: str, ends: tuple[float, float]) -> SchemaColumn:
    return SchemaColumn(name=name, range=(float(ends[0]), float(ends[1])))


def _schema(ranges: Mapping[str, tuple[float, float]], target: str, classes: tuple[str, ...]) -> Schema:
    answer = SchemaColumn(name=target, type="category", categories=classes)
    numbers = (_number(name, ends) for name, ends in ranges.items())
    return Schema(target, (*numbers, answer))


def _cells(bunch: Any, schema: Schema) -> dict[str, Sequence[Any]]:
    """scikit-learn's columns by the schema's names, the target's numbers as its categories."""
    names = [column.name for column in schema.inputs]
    columns: dict[str, Sequence[Any]] = dict(zip(names, bunch.data.T.tolist(), strict=True))
    return {**columns, schema.target: [schema.classes[number] for number in bunch.target]}
