"""``python -m candid`` is the command line; processes that a command starts read this file, too."""


def main() -> None:
    """Run the command line."""
    from candid.cli.app import main as run

    run()


if __name__ == "__main__":
    main()
