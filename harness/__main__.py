"""`python -m harness` is `bench`."""

from harness.cli.app import main

if __name__ == "__main__":
    main(prog_name="bench")
