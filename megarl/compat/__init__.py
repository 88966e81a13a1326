"""Patches of third parties, one module for each: every patch with its reason, the versions it is for, and a test."""
