"""``python -m candid`` is the command line."""

from candid.cli import main

if __name__ == "__main__":
    main()
