"""Errors that a user can act on: each says what was found, what was expected, and what to do."""

from __future__ import annotations


class PCTreeError(Exception):
    """Something failed while working on valid input (command line: exit code 1)."""


class UsageError(PCTreeError, ValueError):
    """An argument cannot be used as given (command line: exit code 2)."""


class CheckpointError(PCTreeError):
    """A checkpoint is missing, damaged, or does not fit the model it is meant for (exit code 1)."""
