"""Any third party's replies to the evaluation's prompts, as the opponent of SFT and of the policy."""
