"""One file per stage, thin: read files, call the core, write files."""
