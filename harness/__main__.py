"""Run the command line: `python -m harness` is the same as `bench`."""

from harness.cli.app import main

if __name__ == "__main__":
    main(prog_name="bench")
