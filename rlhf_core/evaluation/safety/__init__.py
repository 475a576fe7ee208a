"""The safety prompts, and what is counted of the replies to them."""
