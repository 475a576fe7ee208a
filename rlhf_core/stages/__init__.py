"""The stages of the pipeline: read files, call the core, write files."""
