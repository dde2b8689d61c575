"""The `carpool` command: `commands` lists all commands, and each has a module, or a package."""
