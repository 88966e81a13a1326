"""The command line: megarl train, megarl plan, megarl keys."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from megarl import __version__, config


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="megarl", description="Train language models by reinforcement learning.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("train", "train as a configuration says"),
        (
            "plan",
            "print what a configuration comes to: batches, memory a GPU, the engine's room, what a weight sync moves, "
            "the rank grid; needs neither GPU nor a running Ray",
        ),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("config", help="YAML file, e.g. configs/quickstart.yaml")
        command.add_argument(
            "more",
            nargs="*",
            metavar="file.yaml | key=value",
            help="more files, each laid over those before it, e.g. configs/algorithms/dr_grpo.yaml; over all of them "
            "values, e.g. run.total_steps=10 actor.optimizer.lr=1e-6",
        )
    commands.add_parser("keys", help="list every configuration key")
    given = parser.parse_args(arguments)
    if given.command == "keys":
        print("\n".join(config.config_keys()))
        return 0
    try:
        files = [argument for argument in given.more if "=" not in argument and argument.endswith((".yaml", ".yml"))]
        loaded = config.load([given.config, *files], [argument for argument in given.more if argument not in files])
    except config.ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if given.command == "plan":
        from megarl.ops.plan import describe

        try:
            print(describe(loaded))
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
        return 0
    from megarl.train import run_training

    return run_training(loaded)


if __name__ == "__main__":
    sys.exit(main())
