"""``python -m forebay.cli``: the same as the ``forebay`` command."""

from forebay.cli.main import main

if __name__ == "__main__":
    main()
