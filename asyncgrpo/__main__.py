"""`python -m asyncgrpo`: the command line, where the `asyncgrpo` script is not on the path."""

from asyncgrpo.cli import main

main()
