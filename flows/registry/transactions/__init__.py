"""Changes of aliases: each recorded before it is made, and finished or taken back after a crash."""
