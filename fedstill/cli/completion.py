"""``fedstill completion``: scripts that complete commands, presets, methods and options in a shell."""

from __future__ import annotations

import re

from fedstill.cli.arguments import ParsedArgs
from fedstill.cli.commands import COMMANDS, CommandGroup
from fedstill.core.errors import ArgumentError

BASH = """\
_fedstill() {{
    local word=${{COMP_WORDS[COMP_CWORD]}}
    COMPREPLY=()
    if [[ $COMP_CWORD -eq 1 ]]; then COMPREPLY=($(compgen -W "{commands}" -- "$word")); return; fi
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
}}
complete -o default -F _fedstill fedstill
"""
ZSH = "autoload -U +X bashcompinit && bashcompinit\n"


def completion(args: ParsedArgs) -> None:
    """Print the script of a shell, for ``eval "$(fedstill completion bash)"``; for fish, ``... | source``."""
    shell = args.positionals[0]
    if shell not in ("bash", "zsh", "fish"):
        raise ArgumentError("fedstill completion", shell, "bash, zsh or fish")
    by_command = completions()
    commands = " ".join(by_command)
    if shell == "fish":
        print("complete -c fedstill -n __fish_use_subcommand -a", f'"{commands}"')
        for command, words in by_command.items():
            print(f'complete -c fedstill -n "__fish_seen_subcommand_from {command}" -a "{" ".join(words)}"')
        return
    cases = "\n".join(
        f'    {command}) COMPREPLY=($(compgen -W "{" ".join(words)}" -- "$word")) ;;'
        for command, words in by_command.items()
    )
    print((ZSH if shell == "zsh" else "") + BASH.format(commands=commands, cases=cases), end="")


def completions() -> dict[str, list[str]]:
    """Return, by command, the words that can follow: subcommands, presets, methods and options."""
    from fedstill.cli.list_command import kinds
    from fedstill.protocol.method import METHODS
    from fedstill.runs import presets

    names = {
        "run": presets.names(),
        "config": presets.names(),
        "compare": list(METHODS),
        "list": [*METHODS, *kinds()],
    }
    found = {}
    for name, command in COMMANDS.items():
        subcommands = command.commands if isinstance(command, CommandGroup) else {}
        each = subcommands.values() if isinstance(command, CommandGroup) else [command]
        usages = " ".join(form for one in each for form in one.usage)
        options = dict.fromkeys(re.findall(r"--[a-z-]+", usages))
        found[name] = [*subcommands, *names.get(name, ()), *options]
    return found
