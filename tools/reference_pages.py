"""Write the generated parts of the API reference in docs/reference.

    python tools/reference_pages.py

A page has its text, and blocks between ``<!-- generated: KIND ARGUMENTS -->`` and ``<!-- /generated -->``:
``api NAMES`` (a summary table and an entry for each dotted name), ``options WHAT``, ``help COMMAND`` and
``index PAGES``. The sources are docstrings, options and the command's help. The result is plain Markdown,
which a site and a code host show alike. A test compares it with the code.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import io
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from fedstill.attacks.attack import ATTACKS
from fedstill.cli.main import main as command
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

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
BLOCK = re.compile(r"(<!-- generated: (\w+)(?: ([^>]*?))? -->\n).*?(<!-- /generated -->)", re.DOTALL)
SECTIONS = ("Args", "Returns", "Raises", "Yields", "Attributes", "Example", "Examples")
MAX_SUMMARY = 160  # characters of a cell
CHOSEN = {  # what can be chosen: its registry, and the table whose key selects it
    "method": (METHODS, "method"),
    "task": (TASKS, "task"),
    "data": (DATA, "data"),
    "split": (SPLITS, "split"),
    "mechanism": (MECHANISMS, "nodes.privacy"),
    "adversary": (ADVERSARIES, "adversary"),
    "attack": (ATTACKS, ""),
}
WRITTEN_PACKAGES = ("fedstill.datasets", "fedstill.figures")  # as in fedstill.datasets.load
ALIASES = {  # public names that are no class or function
    "fedstill.__version__": "The installed version, a string.",
    "fedstill.methods.Tensors": "Named tensors of a message: `Mapping[str, torch.Tensor]`.",
    "fedstill.tasks.Targets": "Kind of a task's targets: `class`, `labels`, `map`, `image`, `instances`, ...",
    "fedstill.privacy.PrivacyCost": "Events of a privacy cost, and the number of each: `Counter[Event]`.",
    "fedstill.tasks.Ensemble": "Name of an ensemble, for the type of an option.",
}
PARAMETERS = {  # groups of a long signature, in the order of the page
    "fedstill.distil": {
        "Federation": ("data", "models", "student", "test", "classes", "names"),
        "Task and inputs": ("task", "mean", "std", "vocabulary", "schema", "features"),
        "Method and training": (
            "method",
            "public",
            "local",
            "local_loss",
            "perceptual",
            "perceptual_weights",
            "seed",
        ),
        "Policy and privacy": ("policies", "privacies"),
        "Engine and link": ("engine", "link"),
        "Output": ("every", "out", "track", "progress"),
    }
}


def main() -> None:
    """Write all pages."""
    for page in sorted(FOLDER.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        page.write_text(regenerate(text), encoding="utf-8")


def regenerate(text: str) -> str:
    """Return a page's text with its blocks generated from the code."""
    kinds: dict[str, Callable[[str], str]] = {
        "api": api,
        "options": option_sections,
        "help": command_help,
        "index": index,
    }
    return BLOCK.sub(lambda m: f"{m[1]}\n{kinds[m[2]](m[3] or '').strip()}\n\n{m[4]}", text)


def names_on(text: str) -> list[str]:
    """Return the dotted names in the api blocks of a page."""
    found = [name for block in BLOCK.finditer(text) if block[2] == "api" for name in block[3].split()]
    return [part for name in found for part in expand(name)]


def expand(name: str) -> list[str]:
    """Return the names for ``METHODS``, which stands for all built-in methods, or the name itself."""
    return [f"fedstill.{METHODS[each].__name__}" for each in METHODS.builtin] if name == "METHODS" else [name]


def index(pages: str) -> str:
    """Return a table for each page: its sections with the linked names."""
    parts = []
    for page in pages.split():
        text = (FOLDER / f"{page}.md").read_text(encoding="utf-8")
        title = text.partition("\n")[0].lstrip("# ")
        rows, section = [f"**[{title}]({page}.md)**\n", "| section | names |", "|---|---|"], title
        for part in re.finditer(r"^## (.+)$|<!-- generated: api ([^>]*?) -->", text, re.MULTILINE):
            if part[1]:
                section = part[1]
            else:
                links = [
                    f"[`{short(name)}`]({page}.md#{anchor(name)})"
                    for item in part[2].split()
                    for name in expand(item)
                ]
                rows += [f"| {section} | {' · '.join(links)} |"]
        parts.append("\n".join(rows))
    return "\n\n".join(parts)


def api(names: str) -> str:
    """Return a table of the names with their summaries, and an entry for each."""
    every = [part for name in names.split() for part in expand(name)]
    rows = ["| name | summary |", "|---|---|"]
    rows += [f"| [`{short(name)}`](#{anchor(name)}) | {summary(name)} |" for name in every]
    return "\n\n".join(["\n".join(rows), *map(entry, every)])


def short(name: str) -> str:
    """Return the name under which an entry is shown: with its package, if users write that."""
    package, _, last = name.rpartition(".")
    return f"{package.rpartition('.')[2]}.{last}" if package in WRITTEN_PACKAGES else last


def anchor(name: str) -> str:
    """Return the anchor of an entry's heading, as code hosts make it."""
    return short(name).lower().replace(".", "")


def load(name: str) -> Any:
    """Return the object of a dotted name."""
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)


def summary(name: str) -> str:
    """Return the first sentence of a docstring, for a cell."""
    text = ALIASES.get(name) or inline((inspect.getdoc(load(name)) or "").partition("\n\n")[0])
    first = re.split(r"(?<=[.:]) (?=[A-Z*])", text)[0].rstrip(":")
    return (
        first if len(first) <= MAX_SUMMARY else textwrap.shorten(first, MAX_SUMMARY, placeholder=" ...")
    ).replace("|", r"\|")


def entry(name: str) -> str:
    """Return the entry of one name: heading, signature, docstring, and options or members."""
    if name in ALIASES:
        return f"### `{short(name)}`\n\n{ALIASES[name]}"
    thing = load(name)
    parts = [f"### `{short(name)}`"]
    only_options = inspect.isclass(thing) and is_configured(thing)
    if inspect.isclass(thing) and issubclass(thing, BaseException):
        parts.append(f"Subclass of `{thing.__base__.__name__}`.")
    elif not only_options:
        parts.append(f"```python\n{signature(name, thing)}\n```")
    parts.append(docstring(thing, PARAMETERS.get(name, {}), without_args=only_options))
    if only_options:
        parts += [source(thing), "\n".join(class_options(thing))]
    elif inspect.isclass(thing):
        parts += members(thing)
    return "\n\n".join(part for part in parts if part)


def is_configured(thing: Any) -> bool:
    """Return whether users only set options of a class: a built-in choice or a configuration."""
    if issubclass(thing, Registrable):
        return bool(thing.registry.name_of(thing) in thing.registry.builtin)
    return issubclass(thing, CheckedOptions)


def source(thing: Any) -> str:
    """Return the name by which a registered class is chosen, and its paper."""
    if not issubclass(thing, Registrable):
        return ""
    registry = thing.registry
    option = {"mechanism": "nodes.privacy.mechanism", "method": "method.name", "task": "task.name"}.get(
        registry.what
    )
    lines = [f"By name: `--{option} {registry.name_of(thing)}`."] if option else []
    if re.search(r"\d{4}", paper := getattr(thing, "paper", "")):
        lines.append(f"Source: {paper}.")
    return " ".join(lines)


def signature(name: str, thing: Any, owner: bool = True) -> str:
    """Return a signature, over several lines if it is long."""
    shown = inspect.signature(thing)
    kept = [part for part in shown.parameters.values() if part.name != "self"]
    words = [spell(part) for part in kept]
    if any(part.kind is part.KEYWORD_ONLY for part in kept) and not any(
        part.kind is part.VAR_POSITIONAL for part in kept
    ):
        words.insert(next(i for i, part in enumerate(kept) if part.kind is part.KEYWORD_ONLY), "*")
    back = type_name(shown.return_annotation)
    end = "" if shown.return_annotation in (shown.empty, "None") or inspect.isclass(thing) else f" -> {back}"
    called = name if owner else name.rpartition(".")[2]
    line = f"{called}({', '.join(words)}){end}"
    return line if len(line) <= 100 else f"{called}(\n    " + ",\n    ".join(words) + f",\n){end}"


def spell(part: inspect.Parameter) -> str:
    """Return one parameter as in source code."""
    star = {part.VAR_POSITIONAL: "*", part.VAR_KEYWORD: "**"}.get(part.kind, "")
    kind = "" if part.annotation is part.empty else f": {type_name(part.annotation)}"
    default = part.default
    if default is part.empty:
        return f"{star}{part.name}{kind}"
    shown = repr(default) if isinstance(default, str | int | float | bool | tuple | None) else "..."
    return f"{star}{part.name}{kind} = {shown}" if kind else f"{star}{part.name}={shown}"


def type_name(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def docstring(thing: Any, groups: dict[str, tuple[str, ...]], without_args: bool = False) -> str:
    """Return a docstring as Markdown."""
    text = inspect.cleandoc(plain_doc(thing))
    parts = re.split(rf"^({'|'.join(SECTIONS)}):[ ]*$", text, flags=re.MULTILINE)
    done = [prose(parts[0])]
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        body = textwrap.dedent(body.strip("\n"))
        if title == "Args" and without_args:
            continue
        if title == "Args" and groups:
            done.append(grouped(body, groups))
        elif title in ("Args", "Attributes", "Raises"):
            heading = {"Args": "Parameters"}.get(title, title)
            done.append(f"**{heading}**\n\n" + "\n".join(f"- `{key}`: {value}" for key, value in items(body)))
        elif title in ("Returns", "Yields"):
            done.append(f"**{title}**: {prose(body)}")
        else:
            done.append(f"**Example**\n\n{prose(body)}")
    return "\n\n".join(part for part in done if part)


def plain_doc(thing: Any) -> str:
    """Return the docstring as it is written, without the options that a class appends when it is read."""
    if inspect.isclass(thing):
        with contextlib.suppress(OSError, TypeError):
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(thing))).body
            assert isinstance(tree, ast.ClassDef)
            return ast.get_docstring(tree, clean=True) or ""
    return inspect.getdoc(thing) or ""


def items(body: str) -> Iterator[tuple[str, str]]:
    """Yield the entries ``name: text`` of a section, whose further lines are indented."""
    for part in re.split(r"\n(?=\S)", body):
        key, _, value = part.partition(":")
        yield key.strip(), inline(" ".join(value.split()))


def grouped(body: str, groups: dict[str, tuple[str, ...]]) -> str:
    """Return parameters under the titles of their groups."""
    texts = {name.strip(): (key, value) for key, value in items(body) for name in key.split(",")}
    known = [name for names in groups.values() for name in names]
    if sorted(known) != sorted(texts):
        raise ValueError(f"groups of parameters lack or exceed {sorted(set(known) ^ set(texts))}")
    parts = ["**Parameters**"]
    for title, names in groups.items():
        shown = dict.fromkeys(texts[name] for name in names)
        parts.append(f"*{title}*\n\n" + "\n".join(f"- `{key}`: {value}" for key, value in shown))
    return "\n\n".join(parts)


def prose(text: str) -> str:
    """Return paragraphs of reStructuredText as Markdown: literal blocks, doctests and inline marks."""
    parts = []
    paragraphs = re.split(r"\n\s*\n", textwrap.dedent(text.strip("\n")))
    i = 0
    while i < len(paragraphs):
        part = paragraphs[i]
        i += 1
        if part.lstrip().startswith(">>>"):
            parts.append(f"```python\n{re.sub(r'  # doctest:.*', '', textwrap.dedent(part))}\n```")
        elif part.startswith("    "):  # after a paragraph that ends in a double colon
            code = [part]
            while i < len(paragraphs) and paragraphs[i].startswith("    "):
                code.append(paragraphs[i])
                i += 1
            parts.append("```python\n" + textwrap.dedent("\n\n".join(code)) + "\n```")
        else:
            parts.append(inline(re.sub(r"::$", ":", part)))
    return "\n\n".join(part for part in parts if part.strip())


def inline(text: str) -> str:
    """Return a paragraph with Markdown's marks for names and links."""
    text = re.sub(r":\w+:`~?([^`]*)`", lambda m: f"`{m[1].removeprefix('fedstill.')}`", text)
    text = re.sub(r"`([^`<]+) <([^`>]+)>`_+", r"[\1](\2)", text)
    text = re.sub(r"``(.+?)``", lambda m: f"`{' '.join(m[1].split())}`", text, flags=re.DOTALL)
    return re.sub(r"(`[^`]*`)|<(?=[A-Za-z/])", lambda m: m[1] or r"\<", text)


def members(thing: Any) -> list[str]:
    """Return the public methods, properties and attributes of a class and of its bases in this package."""
    found, seen = [], set[str]()
    for owner in thing.__mro__:
        if not owner.__module__.startswith("fedstill") or owner in (CheckedOptions, Registrable):
            continue
        docs = field_docs(owner) if is_dataclass(owner) else {}
        for name, member in vars(owner).items():
            if name.startswith("_") or name in seen:
                continue
            seen.add(name)
            function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
            if inspect.isfunction(function) and inspect.getdoc(function):
                text = docstring(function, {})
                found.append(f"- `{signature(name, function, owner=False)}`\n\n{textwrap.indent(text, '  ')}")
            elif isinstance(member, property | functools.cached_property) and member.__doc__:
                found.append(f"- `{name}`: {inline(' '.join(member.__doc__.split()))}")
        own = {name: text for name, text in docs.items() if not name.startswith("_") and name not in seen}
        found += [f"- `{name}`: {inline(text)}" for name, text in own.items()]
        seen |= set(docs)
    return ["**Members**", "\n".join(found)] if found else []


def class_options(kind: Any) -> Iterator[str]:
    """Yield the options of a configuration class, and of the groups of a chosen one."""
    if issubclass(kind, Registrable):
        yield from rows(kind(), "", keys=True)
        return
    hints, docs = get_type_hints(kind, include_extras=True), field_docs(kind)
    for field in fields(kind):
        if field.name.startswith("_"):
            continue
        default = (
            ""
            if needed(field)
            else field.default
            if field.default is not MISSING
            else field.default_factory()
        )  # type: ignore[misc]
        text = f"default `{type(default).__name__}()`" if is_dataclass(default) else f"default `{default!r}`"
        given = "" if needed(field) else f"; {text}"
        allowed, meaning = safe(limits(hints[field.name])), safe(docs.get(field.name, ""))
        yield f"- `{field.name}`: *{allowed}*{given}. {meaning}".rstrip()


def command_help(words: str) -> str:
    """Return the output of ``fedstill WORDS --help``."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        command([*words.split(), "--help"])
    return f"```text\n{printed.getvalue().rstrip()}\n```"


def option_sections(what: str) -> str:
    """Return options with their meanings: of a ``run``, of a ``node``, or of each entry of a registry."""
    if what in CHOSEN:
        registry, under = CHOSEN[what]
        return "\n\n".join(choice(registry, name, under) for name in registry.builtin)
    if what == "node":
        return listed(NodeFile(name="clinic"), "", keys=True)
    return listed(RunSpec(method=METHODS["fedavg"]()), "--")


def choice(registry: Any, name: str, under: str) -> str:
    """Return the section of one entry of a registry: heading, description and options."""
    kind = registry[name]
    about = inline(" ".join(plain_doc(kind).partition("\n\n")[0].split()))
    key = f"--{under}.{kind.key} {name}" if under else f"--attacks {name}"
    return "\n\n".join([f"### `{key}`", about, listed(kind(), f"--{under or name}.") or "It has no options."])


def listed(config: Any, prefix: str, keys: bool = False) -> str:
    """Return a configuration's options, including nested ones, as a list."""
    return "\n".join(rows(config, prefix, keys))


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
        if line.removeprefix(f"- `{prefix}").partition("`")[0].partition(".")[0] in shared:
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
    return f"- `{name}`: *{safe(allowed)}*{given}. {safe(meaning)}".rstrip()


def toml(value: object) -> str:
    """Format a value for a command line or TOML."""
    if isinstance(value, list):
        return " ".join(map(toml, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def safe(text: str) -> str:
    """Escape text for Markdown."""
    return text.replace("``", "`").replace("<", r"\<").replace("*", r"\*")


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


if __name__ == "__main__":
    main()
