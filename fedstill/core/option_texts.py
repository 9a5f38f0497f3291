"""What options mean, read from where it is written: the texts below the fields of a dataclass.

So files that explain themselves, ``help()`` of a class and the site's reference cannot say different things.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import fields, is_dataclass
from typing import Any

WIDTH = 100  # columns of a docstring


def meanings(kind: Any) -> dict[str, str]:
    """The text of each field of a dataclass, its own and those of its bases, as one line."""
    found = dict[str, str]()
    for base in reversed(kind.__mro__):
        if is_dataclass(base):
            found |= _below_fields(base)
    return found


def _below_fields(kind: Any) -> dict[str, str]:
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    except (OSError, TypeError, SyntaxError):  # no source is at hand, as of what was typed in
        return {}
    told = {}
    for field, below in zip(*(getattr(definition, "body", [])[start:] for start in (0, 1)), strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            text = below.value if isinstance(below, ast.Expr) else None
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                told[field.target.id] = " ".join(text.value.split())
    return told


class WithOptions(str):
    """A class's docstring that ends in its options, put together when somebody asks for it.

    Reading a module's source takes a while, so nothing is read as a class is made. Whoever takes the
    attribute of the class gets all of it (``inspect.getdoc``, notebooks, editors); ``help()`` takes what
    stands in the class and expands its tabs, and gets it there.

    Attributes:
        kind: the class.
    """

    kind: Any

    @classmethod
    def of(cls, kind: Any, text: str) -> WithOptions:
        """For a class, from its docstring as it is written."""
        made = cls(inspect.cleandoc(text))
        made.kind = kind
        return made

    def __get__(self, _: object, kind: Any) -> str:
        # The last thing that a dataclass is given: one in the making asks only whether there is a text.
        return self.whole(kind) if "__match_args__" in vars(kind) else str(self)

    def expandtabs(self, tabsize: Any = 8) -> str:
        """See the class."""
        return self.whole(self.kind).expandtabs(tabsize)

    def whole(self, kind: Any) -> str:
        """With the options that the class has, or one below it that has no text of its own."""
        told, indent = meanings(kind), " " * 4
        lines = [f"{field.name}: {told[field.name]}" for field in fields(kind) if field.name in told]
        wrapped = [
            textwrap.fill(each, WIDTH, initial_indent=indent, subsequent_indent=2 * indent) for each in lines
        ]
        return "\n".join([f"{self}\n\nArgs:", *wrapped] if lines else [str(self)])
