"""Print a script that lets a shell complete commands, options and names of layers."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator

NAME = "completion"
HELP = "a script that completes commands in bash or zsh"
EXAMPLES = """\
examples:
  normkit completion bash > ~/.local/share/bash-completion/completions/normkit
      for every bash from now on
  source <(normkit completion bash)       for this one
  source <(normkit completion zsh)        likewise; in ~/.zshrc after compinit, for every zsh

Names of layers are those of the installed normkit: make the script again after an upgrade."""
SHELLS = ("bash", "zsh")
LAYER = ("LAYER",)  # arguments that take a name of the catalog, by their names in the help
SCRIPT = """\
# completion of normkit; made by: normkit completion {shell}
{start}_normkit() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} path=normkit i words=
    for ((i = 1; i < COMP_CWORD; i++)); do
        case "$path ${{COMP_WORDS[i]}}" in
            {commands}) path="$path ${{COMP_WORDS[i]}}" ;;
        esac
    done
    COMPREPLY=()
    case "$path ${{COMP_WORDS[COMP_CWORD - 1]}}" in
{values}
    esac
    case "$path" in
{words}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _normkit normkit
"""
ZSH = "autoload -U +X bashcompinit && bashcompinit\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="which one")


def run(options: argparse.Namespace) -> int:
    from normkit.catalog import names

    print(script(options.command_line, options.shell, names()), end="")
    return 0


def script(parser: argparse.ArgumentParser, shell: str, layers: list[str]) -> str:
    """The script for all that a parser takes; files are completed by the shell itself."""
    commands, values, words = [], [], []
    for path, each in _parsers(parser, "normkit"):
        if path != "normkit":
            commands.append(shlex.quote(path))
        offered: list[str] = []
        for action in each._actions:
            choices = _choices(action, layers)
            offered += action.option_strings or choices
            if action.option_strings and action.nargs != 0:
                patterns = "|".join(shlex.quote(f"{path} {o}") for o in action.option_strings)
                reply = f'COMPREPLY=($(compgen -W {shlex.quote(" ".join(choices))} -- "$current"))'
                values.append(f"        {patterns}) {reply if choices else ':'}; return ;;")
        words.append(f"        {shlex.quote(path)}) words={shlex.quote(' '.join(offered))} ;;")
    return SCRIPT.format(
        shell=shell,
        start=ZSH if shell == "zsh" else "",
        commands="|".join(commands),
        values="\n".join(values),
        words="\n".join(words),
    )


def _parsers(
    parser: argparse.ArgumentParser, path: str
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    yield path, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from _parsers(inner, f"{path} {name}")


def _choices(action: argparse.Action, layers: list[str]) -> list[str]:
    if action.metavar in LAYER:
        return layers
    return [] if action.choices is None else [str(choice) for choice in action.choices]
