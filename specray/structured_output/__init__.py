"""Structured output: compiling grammars, matching outputs against them, and draft trees that they allow."""
