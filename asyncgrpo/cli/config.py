"""`asyncgrpo config`: explain a setting, show a whole configuration, list the algorithms, translate verl's and TRL's keys."""

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from asyncgrpo.cli import options
from asyncgrpo.errors import ConfigError

if TYPE_CHECKING:  # the schema is read where it is used
    from asyncgrpo.config.foreign_rules import KeyMap

app = typer.Typer()
group = typer.Typer(no_args_is_help=True)
app.add_typer(
    group, name="config", help="Explain, show and translate configurations.", epilog=options.example("config explain")
)
_FLAGS: dict[str, Any] = {"context_settings": {"ignore_unknown_options": True}}
"""For commands that take the flags of another program."""


@group.command("explain", epilog=options.example("config explain buffer.max_lag"))
def explain(
    key: Annotated[
        str | None, typer.Argument(metavar="KEY", help="A key, a section, or nothing for all keys.", show_default=False)
    ] = None,
) -> None:
    """Print what a key means and takes, and its default."""
    from asyncgrpo.config import explain

    indent = 35 if key is None or key in explain.sections() else 11
    typer.echo("\n".join(options.wrapped(line, indent=indent) for line in explain.explain(key).splitlines()))


@group.command("show", epilog=options.example("config show one_node_8gpu learner.lr=2e-6"))
def show(
    file: options.ConfigArgument,
    overrides: options.SettingsArgument = None,
    algorithm: options.AlgorithmOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Check a configuration and print all of it.

    It is that of the file, with the preset of --algorithm and the settings over it. Comments give the sizes of a step, the
    objective, the processes and the end of the run in words, and what a run on GPUs holds of their memory.
    """
    import msgspec

    from asyncgrpo.cli.running import memory_table
    from asyncgrpo.config.explain import sizes_in_words
    from asyncgrpo.config.load import load_config, to_yaml

    config = load_config(file, overrides or (), algorithm=algorithm)
    if as_json:
        options.print_json(msgspec.to_builtins(config))
        return
    comments = sizes_in_words(config, algorithm).splitlines()
    with suppress(ConfigError):  # the model is missing, which is no fault of a configuration that is only shown
        comments += memory_table(config).splitlines()
    typer.echo("".join(f"# {line}\n" for line in comments) + to_yaml(config), nl=False)


@group.command("algorithms", epilog=options.example("config algorithms"))
def algorithms() -> None:
    """List the presets that `--algorithm` takes, and what each is."""
    from asyncgrpo.config.load import algorithm_file, algorithm_names, headline

    found = {name: headline(algorithm_file(name)) for name in algorithm_names()}
    width = max(map(len, found))
    for name, what in found.items():
        typer.echo(options.wrapped(f"{name:<{width}}  {what}", indent=width + 2))


SourcesArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="FILE|KEY=VALUE|COMMAND",
        help="YAML or JSON files, shell scripts, - for a script on stdin, single keys, or the command itself.",
    ),
]
YamlOption = Annotated[bool, typer.Option("--yaml", help="A configuration file instead of a command.")]


@group.command("from-verl", **_FLAGS, epilog=options.example("config from-verl run_qwen3_8b.sh --yaml"))
def from_verl(sources: SourcesArgument, as_yaml: YamlOption = False) -> None:
    """Translate a verl configuration to the keys of asyncgrpo.

    Prints a command, or with --yaml a file. Comments name every key that was given and its counterpart, or the reason why there
    is none. Bash runs a script in a sandbox without network and files, and only records the commands that it starts. Exits with
    1 if the printed command does not run yet, with the reason.
    """
    from asyncgrpo.config.foreign_rules import VERL

    _translate(sources, VERL, as_yaml)


@group.command(
    "from-trl", **_FLAGS, epilog=options.example("config from-trl args.json model_name_or_path=Qwen/Qwen3-8B")
)
def from_trl(sources: SourcesArgument, as_yaml: YamlOption = False) -> None:
    """Translate a TRL configuration to the keys of asyncgrpo.

    Takes the JSON of args.to_json_string(), YAML, a shell script (see from-verl), or the command itself. num_processes=N is the
    number of processes that accelerate starts. Prints a command, or with --yaml a file, with comments on every field. Exits with
    1 if the printed command does not run yet.
    """
    from asyncgrpo.config.foreign_rules import TRL

    _translate(sources, TRL, as_yaml)


def _translate(sources: list[str], keys: "KeyMap", as_yaml: bool) -> None:
    from asyncgrpo.config.foreign import assignments, read, report
    from asyncgrpo.config.load import load_config

    found = read(sources, keys, sys.stdin.read() if "-" in sources else "")
    problem = ""
    try:
        load_config(None, assignments(found.ours))
    except ConfigError as error:
        problem = str(error).removeprefix("command line: ")
    typer.echo(report(found, problem, as_yaml=as_yaml))
    if problem:
        raise typer.Exit(1)
