"""Measures what picks are worth, before and after they are served.

How well selectors cover what a query's gold program needs, how well a language model answers with their picks, and what
a log of use teaches (`learn`).
"""
