"""``fedstill completion``: what makes a shell complete commands, presets, methods and options."""

from __future__ import annotations

import re

from fedstill.cli.arguments import ParsedArgs
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
    """A script for a shell: ``eval "$(fedstill completion bash)"``, for fish ``... | source``."""
    shell = args.positionals[0]
    if shell not in ("bash", "zsh", "fish"):
        raise ArgumentError("fedstill completion", shell, "bash, zsh or fish")
    words = completed()
    commands = " ".join(words)
    if shell == "fish":
        print("complete -c fedstill -n __fish_use_subcommand -a", f'"{commands}"')
        for command, own in words.items():
            print(f'complete -c fedstill -n "__fish_seen_subcommand_from {command}" -a "{" ".join(own)}"')
        return
    cases = "\n".join(
        f'    {command}) COMPREPLY=($(compgen -W "{" ".join(own)}" -- "$word")) ;;'
        for command, own in words.items()
    )
    print((ZSH if shell == "zsh" else "") + BASH.format(commands=commands, cases=cases), end="")


def completed() -> dict[str, list[str]]:
    """By command, what may stand behind it: its options as the help has them, presets, methods."""
    from fedstill.cli.list_command import kinds
    from fedstill.cli.main import COMMANDS, HELP, ROOMS
    from fedstill.protocol.method import METHODS
    from fedstill.runs import presets

    usage = HELP.partition("usage:\n")[2].partition("\n\n")[0]
    entries = re.split(r"^(?=  fedstill )", usage, flags=re.MULTILINE)
    named = {
        "run": presets.names(),
        "show": presets.names(),
        "compare": list(METHODS),
        "list": [*METHODS, *kinds()],
    }
    found = {}
    for command in (*COMMANDS, *ROOMS):
        own = " ".join(entry for entry in entries if entry.startswith(f"  fedstill {command} "))
        options = [option for option in re.findall(r"--[a-z-]+", own) if option != "--help"]
        found[command] = [*named.get(command, ()), *dict.fromkeys(options)]
    return found
