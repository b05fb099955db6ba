"""How well selectors cover what a query's gold program needs, and what a language model makes of their picks."""
