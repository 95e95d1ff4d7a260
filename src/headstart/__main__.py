"""`python -m headstart`: the same as the command `headstart`."""

from headstart.cli.main import main

if __name__ == "__main__":
    main()
