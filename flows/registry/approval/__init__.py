"""Approval: a version that passed everything waits in the history until a named person has decided on it."""
