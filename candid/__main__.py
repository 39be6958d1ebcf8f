"""``python -m candid`` is the command line."""

from candid.cli.app import main

if __name__ == "__main__":
    main()
