"""What a text shows and tells: visible characters, statistics, language, refusals."""
