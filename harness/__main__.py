"""`python -m harness` is `bench`."""

from harness.cli import main

if __name__ == "__main__":
    main(prog_name="bench")
