"""Which of several drafters drafts for a request.

A request can name one, and an operator can set a default. Otherwise `bandit` chooses the one that generated the most
tokens per second for requests of the same tenant and `text_kind`, by times of steps that `selector` makes comparable.
No choice changes a request's text.
"""
