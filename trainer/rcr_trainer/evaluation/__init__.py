"""What picks are worth, before and after they are served.

How well selectors cover what a query's gold program needs, what a language model makes of their picks, and what a log
of use teaches (`learn`).
"""
