"""The one place that calls a language model: dedupe, cache, retries, budget; and an offline simulator of one."""
