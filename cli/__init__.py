"""The command line: every command parses, calls the library and prints."""

if __name__ == "cli":
    raise ImportError("import mergekit_iso.cli: the folder cli/ is installed under that name")
