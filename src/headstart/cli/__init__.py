"""The command line: one file for each command, `main` puts them together.

A command's file imports only typer and light modules at its top; what the command works with is
imported inside its function, so that `headstart --help` stays fast. A command ends in one of

    0   good
    1   it ran, and what it found is bad
    2   wrong usage, or the environment is not fit for it

and gives its result as a table on stdout and, with `--json`, as JSON with a `schema` field.
"""
