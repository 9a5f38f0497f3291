"""Directives that insert parts of the program's help: ``{program-help}``, ``-options``, ``-methods``.

The options, defaults and limits on the pages are therefore those of the program.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.pycode.ast import _UnparseVisitor
from sphinx.util.docutils import SphinxDirective

from fedstill.attacks.attack import ATTACKS
from fedstill.cli.main import main
from fedstill.core import options
from fedstill.core.config_tables import describe_type, to_table
from fedstill.core.options import CheckedOptions, field_docs
from fedstill.core.registry import Registrable
from fedstill.data.config import DATA
from fedstill.data.partitioners import SPLITS
from fedstill.federation.adversaries import ADVERSARIES
from fedstill.node.node_file import NodeFile
from fedstill.privacy.config import MECHANISMS
from fedstill.protocol.method import METHODS
from fedstill.runs.spec import RunSpec
from fedstill.tasks import TASKS

# Sphinx cannot unparse {**more} in a decorator, and then finds no field docstrings in that file.
_UnparseVisitor.visit_Dict = lambda self, node: ast.unparse(node)  # type: ignore[method-assign]

CHOSEN = {  # what can be chosen: its registry, and the table whose key selects it
    "method": (METHODS, "method"),
    "task": (TASKS, "task"),
    "data": (DATA, "data"),
    "split": (SPLITS, "split"),
    "mechanism": (MECHANISMS, "nodes.privacy"),
    "adversary": (ADVERSARIES, "adversary"),
    "attack": (ATTACKS, ""),
}


FIXED = {  # properties that a method declares, which are not options
    name
    for method in METHODS.values()
    for kind in method.__mro__
    for name, meaning in vars(kind).get("__annotations__", {}).items()
    if str(meaning).startswith("ClassVar")
}


class Help(SphinxDirective):
    """Output of ``fedstill ARGUMENT --help``."""

    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Called by docutils."""
        words, printed = self.arguments, io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            main([*words, "--help"])
        return [nodes.literal_block(printed.getvalue(), printed.getvalue(), language="none")]


class Options(SphinxDirective):
    """Options with their meanings: of a ``run``, of a ``node``, or of each entry of a registry."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Called by docutils."""
        what = self.arguments[0]
        if what in CHOSEN:
            registry, under = CHOSEN[what]
            parts = [choice(registry, name, under) for name in registry.builtin]
        elif what == "node":
            parts = [listed(NodeFile(name="clinic"), "", keys=True)]
        else:
            parts = [listed(RunSpec(method=METHODS["fedavg"]()), "--")]
        return self.parse_text_to_nodes("\n\n".join(parts), allow_section_headings=True)


class Methods(SphinxDirective):
    """The class of each method, for reStructuredText pages."""

    def run(self) -> list[nodes.Node]:
        """Called by docutils."""
        shown = [f".. autoclass:: fedstill.{METHODS[name].__name__}" for name in METHODS.builtin]
        return self.parse_text_to_nodes("\n".join(shown))


def choice(registry: Any, name: str, under: str) -> str:
    """Return the section of one entry of a registry: heading, description and options."""
    kind = registry[name]
    about = " ".join((kind.__doc__ or "").partition("\n\n")[0].split())
    key = f"--{under}.{kind.key} {name}" if under else f"--attacks {name}"
    options = listed(kind(), f"--{under or name}.")
    return "\n\n".join([f"## `{key}`", about, options or "It has no options."])


def listed(config: Any, prefix: str, keys: bool = False) -> str:
    """Return a configuration's options, including nested ones, as a definition list in Markdown."""
    return "\n\n".join(rows(config, prefix, keys))


def rows(config: Any, prefix: str, keys: bool) -> Iterator[str]:
    """Yield the options one by one."""
    hints, docs = get_type_hints(type(config), include_extras=True), field_docs(type(config))
    for field in fields(config):
        name, hint, value = f"{prefix}{field.name}", hints[field.name], getattr(config, field.name)
        if isinstance(value, Registrable):
            if value.key:
                allowed = f"{value.registry.choices_text}, or module:Name"
                yield row(f"{name}.{value.key}", allowed, value.registered_name, docs.get(field.name, ""))
            if keys or "method" not in name:  # a method's options are under its own heading
                yield from common(value, f"{name}.", keys)
        elif is_dataclass(value):
            yield from rows(value, f"{name}.", keys)
        elif not any(map(is_kind, get_args(hint))):  # lists of tables are only for files
            default = "" if needed(field) else to_table(value)
            yield row(name, limits(hint), default, docs.get(field.name, ""))


def common(chosen: Registrable, prefix: str, keys: bool) -> Iterator[str]:
    """Yield the options that all entries of the registry share."""
    base = next(each for each in type(chosen).__mro__ if "registry" in vars(each))
    shared = {field.name for field in fields(base)} if is_dataclass(base) else set()
    for line in rows(chosen, prefix, keys):
        if line.removeprefix(f"`{prefix}").partition("`")[0].partition(".")[0] in shared:
            yield line


def is_kind(part: object) -> bool:
    """Return whether a part of a type is a dataclass, and not an annotation's metadata."""
    return isinstance(part, type) and is_dataclass(part)


def needed(field: Field[Any]) -> bool:
    """Return whether an option has no default."""
    return field.default is MISSING and field.default_factory is MISSING


def row(name: str, allowed: str, default: object, meaning: str) -> str:
    """Return the entry of an option: its name, valid values, default and meaning."""
    given = "" if default == "" or default == [] else f"; default `{toml(default)}`"
    return f"`{name}`\n: *{safe(allowed)}*{given}. {safe(meaning)}".rstrip()


def toml(value: object) -> str:
    """Format a value for a command line or TOML."""
    if isinstance(value, list):
        return " ".join(map(toml, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def safe(text: str) -> str:
    """Escape text for Markdown."""
    return text.replace("<", r"\<").replace("*", r"\*").replace("``", "`")


def limits(hint: Any) -> str:
    """Return the valid values of an option in words: "a whole number: 1 or more"."""
    within = options.describe_constraints(hint)
    kind = describe_type(bare(hint))
    literal = get_origin(hint) is Literal
    return within if literal else f"{kind}: {within}" if within and "one of" not in kind else kind


def bare(hint: Any) -> Any:
    """Return a type without its constraints."""
    if get_origin(hint) is Annotated:
        return bare(get_args(hint)[0])
    if get_origin(hint) is tuple:
        return tuple[tuple(part if part is ... else bare(part) for part in get_args(hint))]
    if type(None) in get_args(hint):
        return bare(next(part for part in get_args(hint) if part is not type(None))) | None
    return hint


def skip(app: Sphinx, what: str, name: str, member: Any, skipped: bool, options: Any) -> bool | None:
    """Show only the options of classes that users choose and configure, not their methods."""
    only_options = app.env.docname in ("reference/methods", "reference/privacy")
    other = name in FIXED or callable(member) or isinstance(member, property)
    return True if only_options and other else None


def add(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Add the source paper and the name of a registered class to its docstring."""
    registry = getattr(thing, "registry", None)
    if what == "class" and registry is not None and registry.name_of(thing) in registry.builtin:
        called = registry.name_of(thing)
        option = {"mechanism": "nodes.privacy.mechanism", "method": "method.name", "task": "task.name"}
        if registry.what in option:
            lines += ["", f"By name: ``--{option[registry.what]} {called}``."]
        if re.search(r"\d{4}", paper := getattr(thing, "paper", "")):
            lines += ["", f"Source: {paper}."]


def once(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Remove the list of options from docstrings, as options are listed as attributes with their defaults."""
    if what == "class" and issubclass(thing, CheckedOptions) and "Args:" in lines:
        del lines[lines.index("Args:") :]


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("autodoc-skip-member", skip)
    app.connect("autodoc-process-docstring", once, priority=1)  # before napoleon formats the list
    app.connect("autodoc-process-docstring", add)
    app.add_directive("program-help", Help)
    app.add_directive("program-options", Options)
    app.add_directive("program-methods", Methods)
    return {"parallel_read_safe": True}
