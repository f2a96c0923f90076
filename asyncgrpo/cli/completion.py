"""What the shell offers after Tab: presets, engines, and our configuration keys with their values."""

from collections.abc import Iterable

import typer

Offer = tuple[str, str]
"""What is put in, and what it is, for shells that show it."""


def algorithms(incomplete: str) -> list[Offer]:
    """Presets of `--algorithm`."""
    from asyncgrpo.config_files import algorithm_file, algorithm_names, headline

    return _fitting(((name, headline(algorithm_file(name))) for name in algorithm_names()), incomplete)


def configurations(incomplete: str) -> list[Offer]:
    """Files that come with the package; the shell itself adds those of the folder."""
    from asyncgrpo.config_files import headline, shipped, shipped_names

    return _fitting(((name, headline(shipped(name))) for name in shipped_names()), incomplete)


def engines(incomplete: str) -> list[Offer]:
    """Values of `--engine`."""
    return _fitting(_values("generators.engine"), incomplete)


def keys(incomplete: str) -> list[Offer]:
    """Keys and sections of the configuration."""
    from asyncgrpo.config_help import knobs

    return _fitting(((knob.key, knob.description) for knob in knobs().values()), incomplete)


def settings(ctx: typer.Context, incomplete: str) -> list[Offer]:
    """`key=value` of the argument `overrides`: the key with its `=`, then the values of one that has few.

    Bash takes `=` for a word of its own, so that there the key is among the words before; click leaves out an `=` that
    comes last.
    """
    from asyncgrpo.config_help import knobs

    match [*(ctx.params.get("overrides") or ()), incomplete]:
        case [*_, key, ""] if key in knobs():
            return _values(key)
        case [*_, key, "=", start]:
            return _fitting(_values(key), start)
    key, equals, _ = incomplete.partition("=")
    if equals:
        return _fitting(((f"{key}={value}", what) for value, what in _values(key)), incomplete)
    return _fitting(((f"{knob.key}=", knob.description) for knob in knobs().values()), incomplete)


def _values(key: str) -> list[Offer]:
    """The values of a key that names them, or is true or false."""
    from asyncgrpo.config_help import choices

    return [(value, "") for value in choices(key)]


def _fitting(offers: Iterable[Offer], incomplete: str) -> list[Offer]:
    return [(name, what) for name, what in offers if name.startswith(incomplete)]
