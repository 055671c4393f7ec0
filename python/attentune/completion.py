"""A script that completes the command line in bash and zsh, made from its parser."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable, Mapping, Sequence

SHELLS = ("bash", "zsh")
# bash splits words at colons, so a target's name is completed up to the first alone.
_VALUES = {"--target": ("native", "cuda:sm_80", "cuda:sm_90"), "--policy": ("default", "seed")}

_SCRIPT = """\
# Completion of attentune for {shell}; use it with: source <(attentune completion {shell})
{head}_attentune() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD - 1]}} words=
  case "${{COMP_WORDS[1]}} $before" in
{values}
  esac
  if [[ -z $words && $COMP_CWORD -eq 1 ]]; then words={commands}; fi
  if [[ -z $words ]]; then
    case "${{COMP_WORDS[1]}}" in
{options}
    esac
    [[ $word == -* ]] || words=
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _attentune attentune
"""


def script(parser: argparse.ArgumentParser, shell: str, models: Iterable[str]) -> str:
    """Return the script.

    Parameters
    ----------
    parser : ArgumentParser
        With subparsers.
    shell : str
        One of `SHELLS`.
    models : iterable of str
        What ``--model`` takes.
    """
    commands = subcommands(parser)
    values, options = [], []
    for name, command in commands.items():
        known: list[str] = []
        for action in command._actions:
            known += action.option_strings
            for option in action.option_strings:
                words = _words(option, action, models)
                if words:
                    values.append(f"    {_pattern(name, option)}) words={_quoted(words)} ;;")
        options.append(f"      {name}) words={_quoted(known)} ;;")
    head = "autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    return _SCRIPT.format(
        shell=shell,
        head=head,
        values="\n".join(values),
        options="\n".join(options),
        commands=_quoted(commands),
    )


def subcommands(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """Return the parsers of a parser's commands by name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _words(option: str, action: argparse.Action, models: Iterable[str]) -> Sequence[str]:
    if option == "--model":
        return list(models)
    return list(action.choices or _VALUES.get(option, ()))


def _pattern(name: str, option: str) -> str:
    return f'"{name} {option}"'


def _quoted(words: Iterable[str]) -> str:
    return shlex.quote(" ".join(words))
