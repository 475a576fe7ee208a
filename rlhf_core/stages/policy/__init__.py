"""What the stages that train the policy share: models, selection, prompts, outputs."""
