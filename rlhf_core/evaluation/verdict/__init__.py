"""What is concluded from an evaluation: better or not, and which figures alarm."""
