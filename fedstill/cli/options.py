"""Options of a command line from the fields of a frozen configuration: bad ones are one line.

tyro reads the values and writes the help. What it says about bad words is a box of many lines; here it
becomes one error that names the option, its value and what is allowed.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple, TypeVar, get_args

from fedstill.core.errors import ArgumentError, FedstillError, UnknownName

C = TypeVar("C")


class Given(NamedTuple):
    """An option as it was given: ``--split.nodes 8`` or ``--split.nodes=8``."""

    option: str
    values: list[str]

    @property
    def name(self) -> str:
        """The dotted name that it means."""
        return self.option.removeprefix("--").replace("-", "_")


def override(config: C, words: list[str], prog: str, about: str, also: Sequence[str] = ()) -> C:
    """The same configuration with options from the command line.

    Args:
        config: a frozen dataclass: what holds where no option is given.
        words: the options, each followed by its values; ``--help`` prints all of them and leaves with 0.
        prog: the command before the options, for help and errors.
        about: what help says above the options.
        also: options that the command takes beside those of the configuration, which may have been meant.

    Raises:
        FedstillError: an option that does not exist, or a value that it cannot have.
    """
    from fedstill.core.tables import as_table, options, read_table, refuse_anothers

    kind = type(config)
    helps = [word for word in words if word in ("-h", "--help")]
    config, given = choose(config, group([word for word in words if word not in helps]))
    if helps:
        _tyro(config, ["--help"], prog, f"{about}\n{_choices(config)}")
    known = options(config)
    for option in given:
        if option.name not in known:
            refuse_anothers(config, option.name, " ".join(option.values))
            names = [*also, *(f"--{name}" for name in known)]
            raise UnknownName("option", option.option, names, see=f"`{prog} --help` shows all")
    given = [Given(option.option, _spelled(known[option.name], option.values)) for option in given]
    captured = io.StringIO()
    try:
        with contextlib.redirect_stderr(captured):
            changed = _tyro(config, _flat(given), prog, about)
    except SystemExit as exit:
        raise _diagnose(exit, config, given, captured.getvalue()) from exit
    # Through the reader again: it refuses what a text can say but a configuration cannot hold, as nan.
    return read_table(kind, as_table(changed))


def choose(config: C, given: Sequence[Given]) -> tuple[C, list[Given]]:
    """The configuration with those methods, tasks, splits that options choose by name; and the other options.

    What is chosen anew has its defaults, but for such options as all that could be chosen have.
    """
    from fedstill.core.tables import as_table, choices, layered, read_table

    kind, rest = type(config), list(given)
    for option in given:
        if option.name not in choices(config):
            continue
        if len(option.values) != 1:
            raise ArgumentError(option.name, " ".join(option.values), "one name")
        above: Any = option.values[0]
        for key in reversed(option.name.split(".")):
            above = {key: above}
        config = read_table(kind, layered(kind, as_table(config), above))
        rest.remove(option)
    return config, rest


def _choices(config: Any) -> str:
    """What can be chosen by name, a line each; the options below are those of what is chosen now."""
    from fedstill.core.tables import as_table, choices

    lines = []
    for name, base in choices(config).items():
        now = reduce(dict.__getitem__, name.split("."), as_table(config))
        lines.append(f"--{name} NAME (default: {now}): {base.registry.allowed}")
    return "\n".join(lines)


def group(words: list[str]) -> list[Given]:
    """Each option with the values behind it.

    Raises:
        ArgumentError: a word before the first option.

    >>> group(["--seed", "3", "--split.nodes=8"])
    [Given(option='--seed', values=['3']), Given(option='--split.nodes', values=['8'])]
    """
    given: list[Given] = []
    for word in words:
        if word.startswith("--"):
            option, equals, value = word.partition("=")
            given.append(Given(option, [value] if equals else []))
        elif given:
            given[-1].values.append(word)
        else:
            raise ArgumentError("option", word, "--NAME VALUE; one preset, file or folder only")
    return given


def _tyro(config: C, words: list[str], prog: str, about: str) -> C:
    """What tyro makes of the words; on bad words it draws a box on stderr and raises SystemExit."""
    import tyro

    made: C = tyro.cli(
        type(config),
        default=config,
        args=words,
        prog=prog,
        description=about,
        use_underscores=True,  # an option is spelled as its key in TOML
        config=(tyro.conf.FlagConversionOff,),  # and has a value, as there
    )
    return made


def _flat(given: Sequence[Given]) -> list[str]:
    return [word for option in given for word in (option.option, *option.values)]


def _spelled(kind: Any, values: list[str]) -> list[str]:
    """TOML's spelling of true, false and none in tyro's."""
    if kind is bool:
        return [value.capitalize() if value in ("true", "false") else value for value in values]
    if type(None) in get_args(kind):
        return ["None" if value == "none" else value for value in values]
    return values


def _diagnose(failure: SystemExit, config: Any, given: list[Given], text: str) -> FedstillError:
    """tyro's box of many lines as one error of ours.

    The options are tried one at a time to find the bad one, as tyro names it in no stable way.
    """
    from fedstill.core.tables import describe, full_path, options

    known = options(config)
    refusal = _refusal(failure)
    if refusal is not None:
        return full_path(refusal, known) if isinstance(refusal, ArgumentError) else refusal
    for option in given:
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                _tyro(config, _flat([option]), "", "")
        except SystemExit as alone:
            if _refusal(alone) is None:  # else it is good beside the others, and only alone it is not
                return ArgumentError(option.name, " ".join(option.values), describe(known[option.name]))
    # A configuration refused them in words of its own: what tyro wrote, without its box, has to do.
    words = "".join(letter for letter in text if not "\u2500" <= letter <= "\u257f")
    return FedstillError(" ".join(words.split()))


def _refusal(failure: BaseException) -> FedstillError | None:
    """The error of a configuration that refused its values, which tyro has caught and put into its box."""
    cause = failure.__context__
    while cause is not None and not isinstance(cause, FedstillError):
        cause = cause.__context__
    return cause
