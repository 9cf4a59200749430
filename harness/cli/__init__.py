"""The command line: one file per group of commands, imported on use; and the generated pages of the documentation."""
