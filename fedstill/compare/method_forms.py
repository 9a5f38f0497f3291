"""Form of a method in a comparison: as its paper prints it, as its published code, or fedstill's own.

A comparison's file names forms by label, ``[forms.fediod]``, or one for all, ``[forms."*"]``. Tables group
their rows by form, and say how a row differs from the print.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from fedstill.core.config_tables import read_table
from fedstill.core.errors import ArgumentError
from fedstill.core.options import CheckedOptions

FormName = Literal["printed", "published", "fedstill"]
EVERY_METHOD = "*"  # label of a form of all methods that have none of their own
FORM_TITLES: Mapping[str, str] = {
    "": "",  # baselines, and methods whose form is not named
    "printed": "as printed",
    "published": "as published code",
    "fedstill": "fedstill's form",
}


@dataclass(frozen=True, kw_only=True)
class MethodForm(CheckedOptions):
    """Form of one method: its losses and ensemble.

    Widths, rounds, steps, batches and learning rates do not belong to it.
    """

    section: ClassVar[str] = "forms"

    form: FormName
    """printed, published (as the authors' published code), or fedstill."""
    differs: str = ""
    """Differences from the print: options with their values, the printed ones in brackets."""

    @property
    def title(self) -> str:
        """The form in words, above a group of rows."""
        return FORM_TITLES[self.form]


def form_sentences(forms: Mapping[str, MethodForm]) -> list[str]:
    """Return a sentence on each form that differs from the print, with the methods that have it."""
    names: dict[MethodForm, list[str]] = {}
    for name, form in forms.items():
        if form.differs:
            names.setdefault(form, []).append(name)
    return [f"{', '.join(labels)}: {form.title}; {form.differs}." for form, labels in names.items()]


def form_rank(form: MethodForm | None) -> int:
    """Return the position of a form's group in a table; methods without a form come first."""
    return list(FORM_TITLES).index("" if form is None else form.form)


def read_forms(table: object, labels: Collection[str]) -> dict[str, MethodForm]:
    """Read the forms of a comparison's methods.

    Args:
        table: form by label of a method.
        labels: labels of the methods.

    Raises:
        ArgumentError: a label is unknown, or a form is invalid.
    """
    if not isinstance(table, Mapping):
        raise ArgumentError("forms", table, "a table")
    for label, form in table.items():
        if label not in (*labels, EVERY_METHOD):
            raise ArgumentError("forms", label, f"forms of listed methods: {', '.join(labels)}")
        if not isinstance(form, Mapping):
            raise ArgumentError(f"forms.{label}", form, "a table")
    forms = {label: read_table(MethodForm, form, f"forms.{label}.") for label, form in table.items()}
    shared = dict.fromkeys(labels, forms[EVERY_METHOD]) if EVERY_METHOD in forms else {}
    return shared | {label: form for label, form in forms.items() if label != EVERY_METHOD}
