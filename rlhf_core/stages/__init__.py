"""The stages of the pipeline, one file each: read files, call the core, write files."""
