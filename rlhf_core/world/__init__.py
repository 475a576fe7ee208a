"""The synthetic world: small English dialogues whose true preference is known."""
