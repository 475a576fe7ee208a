"""Starting models: from nothing, a folder, a hub or a GGUF file, checked before they are loaded."""
