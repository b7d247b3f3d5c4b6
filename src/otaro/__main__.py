"""``python -m otaro``: the command line; without a command what this machine offers and which backend runs what."""

import sys


def main(arguments: list[str]) -> int:
    if arguments in ([], ["--json"]):
        from otaro.diagnostics import main as diagnose

        return diagnose(arguments)
    from otaro.cli import main as run

    return run(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
